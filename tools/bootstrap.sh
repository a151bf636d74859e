#!/usr/bin/env bash
# Installs missing Debian or Ubuntu packages that the build needs, without prompting. Does nothing
# if all are present. On other systems it only reports what is missing.
#
#   tools/bootstrap.sh [PACKAGE …]              these packages too
#   tools/bootstrap.sh --program [PACKAGE …]    without the libraries of the tests and MPI
#   tools/bootstrap.sh --if-possible PACKAGE…   only these, if they can be installed; never fails
set -u

optional=""
if [ "${1:-}" = --if-possible ]; then
    shift
    optional=yes
fi

tests="libcmocka-dev libopenmpi-dev openmpi-bin python3"
test_tools="python3"
test_modules="cmocka"
if [ "${1:-}" = --program ]; then
    shift
    tests=""
    test_tools=""
    test_modules=""
fi
packages="build-essential cmake ninja-build pkg-config libyaml-dev libjansson-dev
libxxhash-dev libpcre2-dev $tests $*"
if [ -n "$optional" ]; then
    command -v dpkg-query >/dev/null 2>&1 || exit 0
    packages="$*"
fi

if ! command -v dpkg-query >/dev/null 2>&1; then
    lacking=""
    for tool in cc cmake ninja pkg-config $test_tools; do
        command -v "$tool" >/dev/null 2>&1 || lacking="$lacking $tool"
    done
    for module in yaml-0.1 jansson libxxhash libpcre2-8 $test_modules; do
        pkg-config --exists "$module" 2>/dev/null || lacking="$lacking $module"
    done
    [ -z "$lacking" ] && exit 0
    echo "quadrille: missing:$lacking. This is not Debian or Ubuntu, so install them with your own package" >&2
    echo "manager (also an MPI library if you want one), then run make again." >&2
    exit 1
fi

missing=""
for package in $packages; do
    case $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) in
    *" installed") ;;
    *) missing="$missing $package" ;;
    esac
done
# pkg-config is a transitional package in newer releases; pkgconf provides it.
if command -v pkg-config >/dev/null 2>&1; then
    missing=" $(echo "$missing" | tr ' ' '\n' | grep -vx pkg-config | tr '\n' ' ')"
fi
missing=$(echo $missing)
[ -z "$missing" ] && exit 0

become=""
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        become="sudo -n"
    elif command -v sudo >/dev/null 2>&1 && [ -t 0 ] && [ -z "$optional" ]; then
        become="sudo"
    elif [ -n "$optional" ]; then
        exit 0
    else
        echo "quadrille: missing packages: $missing" >&2
        echo "They cannot be installed without root privileges. As root: apt-get install $missing" >&2
        exit 1
    fi
fi

echo "quadrille: installing $missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
    $become env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1
}
updated=""
install() {
    apt install --no-install-recommends "$@" && return
    # The package lists of a fresh machine are empty or outdated.
    [ -z "$updated" ] && updated=yes && apt update && apt install --no-install-recommends "$@"
}

if [ -n "$optional" ]; then # one by one, so that a missing package does not block the others
    for package in $missing; do
        install "$package" || echo "quadrille: $package could not be installed; tests that need it are skipped"
    done
elif ! install $missing; then
    tail -n 15 "$log" >&2
    echo "quadrille: could not install $missing (see above). Install them by hand, then run make again." >&2
    exit 1
fi
