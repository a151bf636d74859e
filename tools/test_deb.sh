#!/usr/bin/env bash
# Installs a Debian package in a bare chroot, runs the demo there as a user, removes the package,
# and checks that it leaves nothing behind. Needs root, mmdebstrap and a Debian mirror.
#
#   tools/test_deb.sh PACKAGE.deb [RELEASE]     RELEASE: that of this machine
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: tools/test_deb.sh PACKAGE.deb [RELEASE]" >&2; exit 2; }
package=$(realpath "$1")
release=${2:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
work=$(mktemp -d)
root=$work/root
finish() {
    for mount in dev/shm proc; do
        if mountpoint -q "$root/$mount"; then umount "$root/$mount"; fi
    done
    rm -rf --one-file-system "$work"
}
trap finish EXIT
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive "$@"; }
files() { (cd "$root" && find bin boot etc home lib* opt root sbin srv usr var -xdev | LC_ALL=C sort); }

mmdebstrap --quiet --mode=root --variant=minbase "$release" "$root"
chmod 755 "$work"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm"
cp /etc/resolv.conf "$root/etc/"
cp "$package" "$root/tmp/quadrille.deb"
inside apt-get -qq update
# The dependencies first, so that what the package itself leaves behind can be seen.
depends=$(dpkg-deb -f "$package" Depends | sed 's/([^)]*)//g; s/|[^,]*//g; s/,/ /g')
# shellcheck disable=SC2086 # a list of words
inside apt-get -qq -y --no-install-recommends install $depends >"$work/apt.log" 2>&1 || { cat "$work/apt.log" >&2; exit 1; }
files >"$work/before"
inside apt-get -qq -y install /tmp/quadrille.deb >"$work/apt.log" 2>&1 || { cat "$work/apt.log" >&2; exit 1; }

inside useradd --create-home user
inside su user -c 'cd && cp -r /usr/share/doc/quadrille/examples . && QUADRILLE=quadrille bash examples/demo.sh && quadrille doctor'
inside quadrille doctor --json | grep -q '"serve_built":true' || { echo "the package has no web server" >&2; exit 1; }
inside test -s /home/user/runs/demo/metrics.jsonl
inside userdel --remove user 2>/dev/null

inside apt-get -qq -y purge quadrille >"$work/apt.log" 2>&1 || { cat "$work/apt.log" >&2; exit 1; }
files >"$work/after"
# What dpkg, apt and useradd keep about any package or user is not ours.
kept='^(var/(lib/(dpkg|apt)|log|cache|mail)|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$)'
left=$(comm -13 "$work/before" "$work/after" | grep -vE "$kept" || true)
[ -z "$left" ] || { printf 'left behind after removal:\n%s\n' "$left" >&2; exit 1; }
echo "$(basename "$package"): installed, ran the demo and was removed cleanly on $release"
