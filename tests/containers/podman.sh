#!/bin/bash
# Containers of Podman, with storage of their own: whatever Podman has on this machine stays as it is. As root.
#
#   podman.sh image FOLDER FILE...            makes an image of busybox and these programs, with their libraries
#   podman.sh run FOLDER OPTIONS... COMMAND   runs a command in a container of it, by `podman run OPTIONS`
#
# The image comes from no registry. Programs are in its /usr/bin. Containers have no network. With ROOTLESS=UID Podman
# runs as that user, who needs no entry in /etc/subuid: root in the container is that user, and there is no other.
set -eu
what="$1"
folder="$2"
if [ -z "${MEMFOLD_OWN_MOUNTS:-}" ]; then
    # Mounts and processes that end with this one: Podman without root leaves one behind.
    MEMFOLD_OWN_MOUNTS=1 exec unshare --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi
shift 2
# crun knows the first and the second version of cgroups, but not both at a time.
if [ "$(id -u)" = 0 ] && [ -d /sys/fs/cgroup/unified ]; then
    umount /sys/fs/cgroup/unified 2> /dev/null || true
fi
if [ -n "${ROOTLESS:-}" ] && [ "$(id -u)" = 0 ]; then
    chown "$ROOTLESS" "$folder"
    exec setpriv --reuid "$ROOTLESS" --regid "$ROOTLESS" --clear-groups env "HOME=$folder" "XDG_RUNTIME_DIR=$folder" \
        "$0" "$what" "$folder" "$@"
fi
podman() {
    command podman --root "$folder/storage" --runroot "$folder/state" --storage-driver vfs \
        --cgroup-manager cgroupfs --events-backend none --runtime crun "$@"
}
case "$what" in
    image)
        root="$folder/image"
        mkdir -p "$root/usr/bin" "$root/etc" "$root/run" "$root/tmp" "$root/proc" "$root/sys" "$root/dev"
        chmod 1777 "$root/tmp"
        ln -s usr/bin "$root/bin"
        echo 'root:x:0:0::/root:/bin/sh' > "$root/etc/passwd"
        cp "$(command -v busybox)" "$root/usr/bin/busybox"
        for name in sh cat grep id ls mkdir rm sed seq sleep sort true; do
            ln -s busybox "$root/usr/bin/$name"
        done
        for file in "$@"; do
            # The last one of a name counts: a program is not replaced by an applet.
            cp -L --remove-destination "$file" "$root/usr/bin/"
            for library in $(ldd "$file" 2> /dev/null | grep -o '/[^ ]*'); do
                mkdir -p "$root${library%/*}"
                cp -L "$library" "$root$library"
            done
        done
        tar -C "$root" --owner=0 --group=0 -c . | podman import - memfold-tests > /dev/null
        rm -rf "$root"
        ;;
    run)
        # Podman would raise these, which not every root may.
        podman run --rm --network none --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=4096:4096 "$@"
        ;;
esac
