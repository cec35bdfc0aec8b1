#!/bin/bash
# Builds what people install from packages, into a folder: packaging/build.sh [FOLDER], by default
# target/packages.
#
#   memfold_VERSION_amd64.deb, memfold-VERSION-1.x86_64.rpm, memfold-VERSION-x86_64.tar.xz
#   memfold.debug    symbols of the binary in all of them (docs/packaging.md)
#
# Both packages are made of one tree, so they cannot differ. Needs dpkg-deb, rpmbuild (package rpm) and what release.sh needs.
# MEMFOLD_DIST is a folder that release.sh has filled already.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${1:-$root/target/packages}")
cd "$root"
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
dist=${MEMFOLD_DIST:-target/dist}
[[ -n "${MEMFOLD_DIST:-}" ]] || packaging/release.sh "$dist"
version=$("$dist/memfold" --version | awk '{ print $2 }')
# Two builds of one commit are the same, byte for byte.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

# What goes into a template instead of its marks.
fill() {
    local text
    text=$(< "$1")
    text=${text//@VERSION@/"$version"}
    text=${text//@ARCH@/amd64}
    text=${text//@SIZE@/"$(du --summarize --apparent-size --block-size=1K "$tree" | cut -f 1)"}
    text=${text//@TREE@/"$tree"}
    text=${text//@GRANT@/"$(< packaging/grant.sh)"}
    text=${text//@REVOKE@/"$(< packaging/revoke.sh)"}
    text=${text//@DELETE_GROUP@/"$(< packaging/delete-group.sh)"}
    [[ $text != *@[A-Z]*@* ]] || { echo "build.sh: $1 has an unknown mark" >&2; exit 1; }
    printf '%s\n' "$text"
}

tree=$work/memfold
put() { install -D --mode "$1" "$2" "$tree/$3"; }
put 755 "$dist/memfold" usr/bin/memfold
put 644 packaging/memfold.rules usr/lib/udev/rules.d/60-memfold.rules
put 644 packaging/memfold.sysusers usr/lib/sysusers.d/memfold.conf
put 644 README.md usr/share/doc/memfold/README.md
# Messages name them.
for page in docs/*; do put 644 "$page" "usr/share/doc/memfold/$page"; done
put 644 CHANGELOG.md usr/share/doc/memfold/changelog
gzip --best --no-name "$tree/usr/share/doc/memfold/changelog"
for notices in copyright copyright-rust.html; do put 644 "$dist/$notices" "usr/share/doc/memfold/$notices"; done
"$dist/memfold" man --dir "$tree/usr/share/man/man1"
gzip --best --no-name "$tree"/usr/share/man/man1/*.1
completion() {
    "$dist/memfold" completions "$1" > "$work/completion"
    put 644 "$work/completion" "usr/share/$2"
}
completion bash bash-completion/completions/memfold
completion fish fish/vendor_completions.d/memfold.fish
completion zsh zsh/site-functions/_memfold
find "$tree" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +

tar --create --xz --file "$out/memfold-$version-x86_64.tar.xz" --directory "$work" --sort=name \
    --owner=0 --group=0 --numeric-owner memfold
install -m 644 "$dist/memfold.debug" "$out"

# --- rpm: every file of the tree, memfold's own directory, and those of programs that may not be installed.
top=$work/rpm
mkdir -p "$top/BUILD"
{
    fill packaging/rpm/memfold.spec
    (cd "$tree" && find . -type f -printf '/%P\n' | LC_ALL=C sort \
        | sed -e 's,^/usr/share/man/,%doc &,' -e 's,^/usr/share/doc/memfold/copyright$,%license &,')
    for folder in lib/sysusers.d share/doc/memfold{,/docs} share/bash-completion{,/completions} \
        share/fish{,/vendor_completions.d} share/zsh{,/site-functions}; do
        echo "%dir /usr/$folder"
    done
} > "$work/memfold.spec"
rpmbuild -bb --quiet --target x86_64 --buildroot "$work/root" --define "_topdir $top" \
    --define "_rpmdir $out" --define '_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' \
    --define 'use_source_date_epoch_as_buildtime 1' --define '_buildhost localhost' \
    --define '_binary_payload w19.zstdio' "$work/memfold.spec"

# --- deb: Debian's shells look for zsh's completions elsewhere.
mkdir -p "$tree/usr/share/zsh/vendor-completions" "$tree/DEBIAN"
mv "$tree/usr/share/zsh/site-functions/_memfold" "$tree/usr/share/zsh/vendor-completions"
rmdir "$tree/usr/share/zsh/site-functions"
fill packaging/deb/control > "$work/control"
put 644 "$work/control" DEBIAN/control
for script in postinst postrm; do
    fill "packaging/deb/$script" > "$work/$script"
    put 755 "$work/$script" "DEBIAN/$script"
done
(cd "$tree" && find usr -type f -exec md5sum {} + | LC_ALL=C sort -k 2) > "$work/md5sums"
put 644 "$work/md5sums" DEBIAN/md5sums
dpkg-deb --root-owner-group -Zxz --build "$tree" "$out/memfold_${version}_amd64.deb" > /dev/null

(cd "$out" && ls -l)
