#!/usr/bin/env bash
# Builds the CPU image of the Dockerfile with buildah, which needs no daemon, and trains in it as a
# user: on ranks of its own and on those of mpirun. Needs root, buildah and, without BASE,
# mmdebstrap and a Debian mirror.
#
#   tools/test_image.sh [BASE]     BASE: the image to build from and on; default: a minimal system
#                                  of this machine's release
set -euo pipefail
source=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
container=""
finish() {
    [ -z "$container" ] || buildah rm "$container" >/dev/null
    rm -rf "$work"
}
trap finish EXIT

base=${1:-}
if [ -z "$base" ]; then
    base=localhost/quadrille-base
    mmdebstrap --quiet --mode=root --variant=minbase "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$work/base.tar"
    container=$(buildah from scratch)
    buildah add -q "$container" "$work/base.tar" / >/dev/null
    buildah commit -q "$container" "$base" >/dev/null
    buildah rm "$container" >/dev/null
    container=""
fi
buildah bud -q --build-arg BUILD_IMAGE="$base" --build-arg RUN_IMAGE="$base" -t localhost/quadrille-test "$source" >/dev/null

container=$(buildah from localhost/quadrille-test)
inside() { buildah run --user "$1" "$container" -- sh -ec "$2"; }
[ "$(buildah inspect --format '{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.User}}' "$container")" = "[quadrille] quadrille" ] ||
    { echo "the image does not start quadrille as its own user" >&2; exit 1; }
inside quadrille 'quadrille help >/dev/null; quadrille doctor --json | grep -q "\"serve_built\":true"'
# Any user, as with --user "$(id -u)", in a folder that belongs to it.
inside root 'mkdir -m 777 /mounted'
inside 12345 '
    cd /mounted
    cp -r /usr/share/doc/quadrille/examples/data .
    run() {
        "$@" model.layers=2 model.hidden=64 model.heads=2 data.path=data/king-james.txt data.seq=64 train.global_batch=8 train.steps=4 >log
    }
    run quadrille train parallel.ranks=2 --dir runs/a
    quadrille report runs/a >log
    quadrille generate runs/a --tokens 4 >log 2>&1
    run mpirun -n 2 quadrille train --dir runs/b
    test -s runs/b/metrics.jsonl' || { echo "the image does not train" >&2; exit 1; }
echo "Dockerfile: built on $base; trained as an unknown user, alone and under mpirun"
