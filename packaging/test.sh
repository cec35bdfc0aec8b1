#!/bin/bash
# Installs the packages that build.sh has made on clean root filesystems, uses and removes them:
# packaging/test.sh [FOLDER], by default target/packages. As root; needs what roots.sh does, util-linux, rpm, dnf,
# createrepo_c, and podman with crun.
#
# Each root filesystem has a /dev of its own, so the host's /dev/userfaultfd stays as it is. SUITE and
# MIRROR are what mmdebstrap is given (default: the host's release, and its mirror). BASE is a
# root filesystem that is there already, with udev.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
packages=$(realpath "${1:-$root/target/packages}")
cd "$root"
. packaging/roots.sh

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
suite=${SUITE:-$(own_suite)}
base=$work/base

fail() {
    echo "test.sh: $*" >&2
    exit 1
}

echo "== root filesystem"
if [[ -n "${BASE:-}" ]]; then
    cp -a "$BASE" "$base"
else
    make_root "$base" "$suite" udev
fi

# All files, their owners, modes and contents; but what package managers note.
state() {
    local kept=(\( -path ./dev -o -path ./proc -o -path ./sys -o -path ./run -o -path ./tmp -o -path ./var/log
        -o -path ./var/lib/dpkg -o -path ./var/lib/rpm -o -path ./var/cache -o -name ld.so.cache
        -o -path './etc/*-' \) -prune -o)
    (cd "$1" && {
        find . "${kept[@]}" -printf '%p %U:%G %m %l\n'
        find . "${kept[@]}" -type f -exec sha256sum {} +
    } | LC_ALL=C sort)
}

# What an installed memfold must do. udev does not run in there: what its rule says is done by hand after
# udevadm has read it.
cat > "$base/use" << 'SCRIPT'
set -eu
getent group memfold > /dev/null
group=$(getent group memfold | cut -d : -f 3)
told=$(udevadm test /sys/class/misc/userfaultfd 2>&1)
case "$told" in
    *"60-memfold.rules:"*"GROUP $group"*) ;;
    *) echo "$told"; echo "udev does not follow the rule"; exit 1 ;;
esac
chgrp memfold /dev/userfaultfd
chmod 660 /dev/userfaultfd

memfold --version
memfold doctor > /tmp/doctor || { cat /tmp/doctor; exit 1; }
seq 600000 | memfold run --limit 64M -- sort -rn -S 1G --parallel=1 | sha256sum > /tmp/found
seq 600000 | memfold run --limit 24M --summary always -- sort -rn -S 1G --parallel=1 2> /tmp/summary | sha256sum > /tmp/tight
seq 600000 | sort -rn | sha256sum > /tmp/expected
cmp /tmp/expected /tmp/found
cmp /tmp/expected /tmp/tight
grep -q 'spent on swapping' /tmp/summary

# A member of the group may open the device, another user may not.
useradd --no-create-home --groups memfold member
useradd --no-create-home other
as() { setpriv --reuid "$1" --regid "$1" --init-groups env HOME=/ memfold doctor --json; }
may='"name": *"userfaultfd", *"verdict": *"ok"'
as member | tr -d '\n' | grep -q "$may" || { as member; exit 1; }
if as other | tr -d '\n' | grep -q "$may"; then echo "others may open the device"; exit 1; fi
# A member may run programs without a capability.
as member > /dev/null
seq 600000 | setpriv --reuid member --regid member --init-groups \
    memfold run --limit 24M -- sort -rn -S 1G --parallel=1 | sha256sum | cmp - /tmp/expected
for user in member other; do userdel "$user"; done

gzip --test /usr/share/man/man1/memfold-run.1.gz
bash -n /usr/share/bash-completion/completions/memfold
test -s /usr/share/fish/vendor_completions.d/memfold.fish
test -s /usr/share/zsh/vendor-completions/_memfold || test -s /usr/share/zsh/site-functions/_memfold
grep -q 'Apache License' /usr/share/doc/memfold/copyright
test -s /usr/share/doc/memfold/docs/containers.md
rm -rf /tmp/*
SCRIPT

# After the package is gone, the device is root's again.
revoked='test "$(stat --format "%U:%G %a" /dev/userfaultfd)" = "root:root 600"; ! getent group memfold'

echo "== deb"
deb=("$packages"/memfold_*.deb)
root=$work/deb
cp -a "$base" "$root"
state "$root" > "$work/before"
cp "${deb[0]}" "$root/tmp/memfold.deb"
within "$root" bash -euc "dpkg --install /tmp/memfold.deb && rm /tmp/memfold.deb
    . /use; dpkg --verify memfold; dpkg --purge memfold; $revoked"
state "$root" | diff "$work/before" - || fail "the .deb left traces"

echo "== rpm"
# The filesystem is Debian's, whose packages rpm does not know: hence --nodeps.
rpm=("$packages"/memfold-*.rpm)
root=$work/rpm
cp -a "$base" "$root"
state "$root" > "$work/before"
# Debian's rpm would keep its database elsewhere than the distributions of rpm.
database="--dbpath=/var/lib/rpm"
rpm --root "$root" "$database" --initdb
# rpm runs the scriptlets in the root filesystem by itself.
unshare --mount --pid --fork --kill-child bash -euc '
    mount --bind "$1" "$1"; mount -t tmpfs dev "$1/dev"; mknod -m 666 "$1/dev/null" c 1 3
    rpm --root "$1" "$3" --nodeps --install "$2"' bash "$root" "${rpm[0]}" "$database"
rpm --root "$root" "$database" --verify --nodeps memfold
within "$root" bash -euc '. /use'
unshare --mount --pid --fork --kill-child bash -euc '
    mount --bind "$1" "$1"; mount -t tmpfs dev "$1/dev"; mknod -m 666 "$1/dev/null" c 1 3
    touch "$1/dev/userfaultfd"; chgrp "$(chroot "$1" getent group memfold | cut -d : -f 3)" "$1/dev/userfaultfd"
    chmod 660 "$1/dev/userfaultfd"
    rpm --root "$1" "$2" --erase memfold
    test "$(stat --format "%u:%g %a" "$1/dev/userfaultfd")" = "0:0 600"' bash "$root" "$database"
rm -rf "$root/var/lib/rpm"
state "$root" | diff "$work/before" - || fail "the .rpm left traces"

# dnf finds what the .rpm requires by the names of Fedora and RHEL, and of openSUSE. These packages are empty here: the
# filesystem is Debian's still, and has what they stand for.
echo "== dnf"
for shadow in shadow-utils shadow; do
    repository=$work/$shadow
    root=$work/dnf-$shadow
    mkdir "$repository"
    for name in "$shadow" bash; do
        printf '%s\n' "Name: $name" 'Version: 1' 'Release: 1' 'Summary: Empty' 'License: MIT' \
            "$([[ $name != bash ]] || echo 'Provides: /bin/sh')" '%description' '%files' > "$work/empty.spec"
        rpmbuild -bb --quiet --target noarch --define "_topdir $work/top" --define "_rpmdir $repository" \
            "$work/empty.spec" 2> "$work/log" || { cat "$work/log"; fail "rpmbuild failed"; }
    done
    cp "${rpm[0]}" "$repository"
    createrepo_c --quiet "$repository"
    cat > "$work/dnf.conf" << CONFIGURATION
[main]
reposdir=$work/none
cachedir=$work/cache-$shadow
logdir=$work/logs
persistdir=$work/persist
plugins=0
gpgcheck=0
[local]
name=local
baseurl=file://$repository
CONFIGURATION
    cp -a "$base" "$root"
    unshare --mount --pid --fork --kill-child bash -euc '
        mount --bind "$1" "$1"; mount -t tmpfs dev "$1/dev"; mknod -m 666 "$1/dev/null" c 1 3
        with() { dnf --config "$2" --installroot "$1" --releasever 1 --assumeyes --quiet "${@:3}"; }
        with "$1" "$2" install memfold
        chroot "$1" getent group memfold
        chroot "$1" memfold --version
        with "$1" "$2" remove memfold
        ! chroot "$1" getent group memfold
        test ! -e "$1/usr/bin/memfold"' bash "$root" "$work/dnf.conf"
done

# By Podman with storage of its own. What it leaves running ends with the namespaces.
echo "== image"
mkdir "$work/image"
tar --extract --file "$(echo "$packages"/memfold-*-x86_64.tar.xz)" --directory "$work/image" --strip-components 1
cp "$work"/image/usr/bin/memfold "$work"/image/usr/share/doc/memfold/copyright* "$work/image"
cat > "$work/image/Copied" << 'RECIPE'
FROM localhost/base
COPY --from=localhost/memfold /usr/bin/memfold /usr/bin/memfold
RECIPE
with_podman "$work" '
    work=$1
    build() { engine build --quiet "${limits[@]}" "$@" "$work/image" > /dev/null; }
    container() { engine run --rm --network none "${limits[@]}" --device /dev/userfaultfd "$@"; }
    build --file packaging/container/Containerfile.prebuilt --tag memfold
    container memfold doctor > "$work/doctor" || { cat "$work/doctor"; exit 1; }
    tar --directory "$work/base" --create . | engine import --quiet - base > /dev/null
    build --file "$work/image/Copied" --tag copied
    container copied sh -c "seq 600000 | memfold run --limit 24M -- sort -rn -S 1G --parallel=1 | sha256sum" > "$work/found"
    seq 600000 | sort -rn | sha256sum | cmp - "$work/found"' "$work"

echo "passed"
