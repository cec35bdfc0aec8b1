#!/bin/sh
# Runs a command in a container as Docker or Podman make them by default, beside whatever else runs here.
#
#   run.sh PROFILE [--user UID] [--group GID] [--memory BYTES] -- COMMAND...
#
# PROFILE is the seccomp profile of containers-common. The root filesystem is the host's, read-only. As root.
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
profile="$1"
shift
if [ -z "${MEMFOLD_OWN_MOUNTS:-}" ]; then
    # Mounts that end with this process.
    MEMFOLD_OWN_MOUNTS=1 exec unshare -m "$0" "$profile" "$@"
fi
folder="$(mktemp -d)"
# Its directories alone: whatever is mounted there goes with the mount namespace.
# shellcheck disable=SC2154 # It is, in the same words.
trap 'status=$?; umount -R -l "$folder/root"; rm -f "$folder/config.json"; rmdir "$folder/root" "$folder"; exit $status' EXIT
mkdir "$folder/root"
# crun knows the first and the second version of cgroups, but not both at a time.
if [ -d /sys/fs/cgroup/unified ]; then
    umount /sys/fs/cgroup/unified 2> /dev/null || true
fi
mount --rbind / "$folder/root"
python3 "$here/bundle.py" "$folder" --profile "$profile" --rootfs "$folder/root" "$@"
crun --cgroup-manager=cgroupfs run --bundle "$folder" "memfold-$$"
