#!/usr/bin/env bash
# Makes a Debian package of an installation: program, libraries, headers, data, documentation,
# manual pages and completion scripts. `make deb` builds with the prefix /usr and calls this.
#
#   tools/make_deb.sh BUILD FOLDER     packs the build in BUILD as FOLDER/quadrille_VERSION_ARCH.deb
#
# DEBFULLNAME and DEBEMAIL name the maintainer; SOURCE_DATE_EPOCH fixes all times in the package.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: tools/make_deb.sh BUILD FOLDER" >&2; exit 2; }
build=$(realpath "$1")
source=$(realpath "$(dirname "$0")/..")
mkdir -p "$2"
folder=$(realpath "$2")
for tool in dpkg-deb dpkg-shlibdeps cmake; do
    command -v $tool >/dev/null || { echo "make_deb: $tool is missing (Debian: apt-get install dpkg-dev cmake)" >&2; exit 1; }
done

version=$(sed -n 's/^#define QD_VERSION "\(.*\)"$/\1/p' "$source/include/quadrille/version.h")
architecture=$(dpkg --print-architecture)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct 2>/dev/null || date +%s)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
umask 022

DESTDIR=$root cmake --install "$build" --prefix /usr --strip >"$work/install.log" || { cat "$work/install.log" >&2; exit 1; }

# Debian's names for the licence and the list of changes; manual pages are compressed.
doc=$root/usr/share/doc/quadrille
rm "$doc/LICENSE"
cat >"$doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: quadrille

Files: *
Copyright: the Quadrille authors
License: Apache-2.0
 On Debian systems, the text of the Apache License, version 2.0, is in
 /usr/share/common-licenses/Apache-2.0.
END
mv "$doc/CHANGELOG.md" "$doc/changelog"
mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions" # where Debian's zsh looks
gzip -9n "$doc/changelog" "$root"/usr/share/man/man*/*

# The libraries that the program and the shared libraries need, as packages.
mkdir -p "$work/debian" "$root/DEBIAN"
printf 'Source: quadrille\n\nPackage: quadrille\nArchitecture: any\nDescription: x\n' >"$work/debian/control"
mapfile -t shared < <(find "$root/usr/lib" -type f -name '*.so.*')
depends=$(cd "$work" && dpkg-shlibdeps -O --ignore-missing-info "${shared[@]}" "$root/usr/bin/quadrille" 2>"$work/shlibdeps.log" |
    sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { cat "$work/shlibdeps.log" >&2; exit 1; }

cat >"$root/DEBIAN/control" <<END
Package: quadrille
Version: $version
Architecture: $architecture
Maintainer: ${DEBFULLNAME:-Quadrille maintainers} <${DEBEMAIL:-maintainers@quadrille.invalid}>
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Depends: $depends
Section: science
Priority: optional
Description: trains language models with 4D parallelism
 Quadrille trains language models with data, tensor, context, pipeline and
 expert parallelism, and plans and simulates such runs. The package has the
 program, the libraries with their headers, manual pages and examples.
END
[ ${#shared[@]} -eq 0 ] || echo "activate-noawait ldconfig" >"$root/DEBIAN/triggers"
(cd "$root" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums)
find "$root" -newermt "@$SOURCE_DATE_EPOCH" -print0 | xargs -0r touch -hd "@$SOURCE_DATE_EPOCH"

package=$folder/quadrille_${version}_$architecture.deb
dpkg-deb --root-owner-group --build "$root" "$package" >/dev/null
echo "$package"
