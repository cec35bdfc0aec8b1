# shellcheck shell=bash
# For the scripts here, which source it: clean root filesystems, in which what people install is built and used.

# A root filesystem of a suite with these packages: make_root FOLDER SUITE PACKAGES, which commas separate. Needs
# mmdebstrap (debootstrap does the same, without apt and slower), and for another distribution's suite its keyring. MIRROR is
# what mmdebstrap is given as a mirror of this machine's suite, if anything.
make_root() {
    local options=() mirror=()
    if [[ $2 == "$(own_suite)" ]]; then
        [[ -z "${MIRROR:-}" ]] || mirror=("$MIRROR")
        ! grep -qx ID=ubuntu /etc/os-release || options=("--components=main,universe")
    fi
    mmdebstrap --variant=minbase --include="$3" ${options[@]+"${options[@]}"} "$2" "$1" ${mirror[@]+"${mirror[@]}"} \
        > "$1.log" 2>&1 \
        || { tail -n 20 "$1.log" >&2; echo "mmdebstrap failed" >&2; return 1; }
    rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/* "$1.log"
}

# The suite of this machine.
own_suite() {
    # shellcheck disable=SC1091
    (. /etc/os-release && echo "$VERSION_CODENAME")
}

# Runs a command as root of a filesystem, in namespaces of its own: what it mounts and leaves running ends
# with it. /dev has what a container's has, and /dev/userfaultfd as the kernel makes it (from Linux 6.1 on), root's. BOUND
# has folders of this machine that are seen there, as FROM:TO or FROM:TO:ro, and NAMED what is set in the environment, as
# NAME=VALUE.
BOUND=()
NAMED=()
within() {
    local root=$1
    shift
    # The script expands them.
    # shellcheck disable=SC2016
    unshare --mount --pid --fork --kill-child bash -euc '
        root=$1
        shift
        while [[ "$1" != -- ]]; do
            IFS=: read -r from to mode <<< "$1"
            mkdir -p "$root/$to"
            mount --bind "$from" "$root/$to"
            [[ -z "$mode" ]] || mount -o "remount,bind,$mode" "$root/$to"
            shift
        done
        shift
        mount -t tmpfs -o mode=755 dev "$root/dev"
        for device in null zero full random urandom tty; do
            cp -a "/dev/$device" "$root/dev/$device"
        done
        mkdir "$root/dev/shm"
        mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
        ln -s /proc/self/fd "$root/dev/fd"
        mknod -m 600 "$root/dev/userfaultfd" c "$(tr : " " < /sys/class/misc/userfaultfd/dev | cut -d " " -f 1)" \
            "$(cut -d : -f 2 /sys/class/misc/userfaultfd/dev)"
        mount -t proc proc "$root/proc"
        mount -t sysfs -o ro sys "$root/sys"
        # As some distributions have it: runs are in /var/lib/memfold then.
        mount -t tmpfs -o mode=755,noexec run "$root/run"
        exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
    ' bash "$root" ${BOUND[@]+"${BOUND[@]}"} -- ${NAMED[@]+"${NAMED[@]}"} "$@"
}

# Runs a script of bash in which `engine` is Podman with all its state below a folder, and `limits` are the options without
# which it would raise limits, which not every root may: with_podman FOLDER SCRIPT ARGUMENTS.
with_podman() {
    local folder=$1 script=$2
    shift 2
    # The other shell expands them.
    # shellcheck disable=SC2016
    unshare --mount --pid --fork --kill-child --mount-proc bash -euo pipefail -c '
        # crun knows the first and the second version of cgroups, but not both at a time.
        umount /sys/fs/cgroup/unified 2> /dev/null || true
        podman_folder=$1
        shift
        limits=(--ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=4096:4096)
        engine() {
            podman --root "$podman_folder/storage" --runroot "$podman_folder/state" --storage-driver vfs \
                --cgroup-manager cgroupfs --events-backend none --runtime crun "$@"
        }
    '"$script" bash "$folder" "$@"
}
