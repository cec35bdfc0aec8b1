#!/bin/bash
# Containers of Podman, with storage of their own: whatever Podman has on this machine stays as it is. As root.
#
#   podman.sh image FOLDER FILE...            makes an image of busybox and these programs, with their libraries
#   podman.sh run FOLDER OPTIONS... COMMAND   runs a command in a container of it, by `podman run OPTIONS`
#
# The image comes from no registry. Programs are in its /usr/bin. Containers have no network. With ROOTLESS=UID Podman
# runs as that user, who needs no entry in /etc/subuid: root in the container is that user, and there is no other.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
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
        "$here/image.sh" "$folder/image" "$@" | podman import - memfold-tests > /dev/null
        ;;
    run)
        # Podman would raise these, which not every root may.
        podman run --rm --network none --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=4096:4096 "$@"
        ;;
esac
