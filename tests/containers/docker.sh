#!/bin/bash
# Containers of Docker and of containerd, with daemons and storage of their own: whatever Docker has on this machine stays
# as it is. As root.
#
#   docker.sh ENGINE image FOLDER FILE...            makes an image of busybox and these programs, with their libraries
#   docker.sh ENGINE docker FOLDER OPTIONS... COMMAND     runs a command in a container of it, by `docker run OPTIONS`
#   docker.sh ENGINE containerd FOLDER OPTIONS... COMMAND   the same, by `ctr run --seccomp OPTIONS`
#
# ENGINE is the folder that fetch.sh has unpacked the engines to. The image comes from no registry, is called memfold-tests,
# and has programs in its /usr/bin. Containers have no network. FOLDER's path is short, as sockets are in it, and neither
# folder is below /run, which these daemons have for themselves.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -z "${MEMFOLD_OWN_MOUNTS:-}" ]; then
    # Mounts and processes that end with this one.
    MEMFOLD_OWN_MOUNTS=1 exec unshare --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi
engine="$1" what="$2" folder="$3"
shift 3
export PATH="$engine/usr/sbin:$engine/usr/bin:$PATH"
# Sockets of containerd are in there, wherever else it is told to have what is its own.
mount -t tmpfs -o mode=755 run /run
name="memfold-tests-$$-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
machine="$(uname -m)-linux-gnu"
LD_LIBRARY_PATH="$engine/lib/$machine:$engine/usr/lib/$machine" dockerd --data-root "$folder/storage" \
    --exec-root "$folder/state" --pidfile "$folder/pid" --host "unix://$folder/socket" --storage-driver vfs \
    --bridge none --iptables=false --ip6tables=false --ip-forward=false \
    --exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "/$name" > "$folder/log" 2>&1 &
daemon=$!
# What it has made in the cgroups goes once its containers have ended.
end() {
    status=$?
    kill "$daemon" || true
    wait "$daemon" || true
    find /sys/fs/cgroup -depth -type d -path "*/$name*" -exec rmdir {} + || true
    exit "$status"
}
trap end EXIT
docker() { command docker --host "unix://$folder/socket" "$@"; }
containerd() { ctr --address "$folder/state/containerd/containerd.sock" "$@"; }
tries=300
until docker version > /dev/null 2>&1; do
    tries=$((tries - 1))
    if [ $tries = 0 ] || ! kill -0 "$daemon"; then
        cat "$folder/log" >&2
        exit 1
    fi
    sleep 0.1
done
case "$what" in
    image)
        "$here/image.sh" "$folder/image" "$@" | docker import - memfold-tests > /dev/null
        docker save memfold-tests | containerd image import --snapshotter native - > /dev/null
        ;;
    docker)
        docker run --rm --network none "$@"
        ;;
    containerd)
        # The image's name, after the options, is followed by the container's.
        words=()
        for word in "$@"; do
            words+=("$word")
            [ "$word" != docker.io/library/memfold-tests:latest ] || words+=("$name")
        done
        containerd run --rm --seccomp --snapshotter native --cgroup "/$name/containerd" "${words[@]}"
        ;;
esac
