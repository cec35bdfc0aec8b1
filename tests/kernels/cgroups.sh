# In a machine of run.sh: version 2 of cgroups. A share is of the least limit around memfold, and of what a container sees
# in its own namespace. memfold, verify and unshare (util-linux's) are programs.
failed() {
    echo "FAILED: $*"
    cat /tmp/said
    exit 1
}
ip link set lo up
cgroups=/sys/fs/cgroup
mount -t cgroup2 cgroup2 $cgroups || failed "no version 2 of cgroups"
mkdir $cgroups/outer
echo +memory > $cgroups/cgroup.subtree_control || failed "no memory controller"
echo +memory > $cgroups/outer/cgroup.subtree_control
mkdir $cgroups/outer/inner

# Runs a command in the inner group.
inside() {
    sh -c 'echo $$ > '$cgroups'/outer/inner/cgroup.procs && exec "$@"' inside "$@"
}
# What half of a limit is: of all around and of its own.
half_is() {
    echo "$2" > $cgroups/outer/memory.max
    echo "$3" > $cgroups/outer/inner/memory.max
    shown="$1"
    shift 3
    inside "$@" memfold run --limit 50% -v -- verify 48 2 /tmp/result 2> /tmp/said || failed "verify: $?"
    grep -q "the limit of $shown MiB was kept" /tmp/said || failed "half is not $shown MiB"
    [ ! -s /tmp/result ] || failed "a page was wrong"
    echo "half of $(cat $cgroups/outer/memory.max) and $(cat $cgroups/outer/inner/memory.max) is $shown MiB $*"
}
half_is 32.0 64M max env
half_is 32.0 64M 96M env
half_is 40.0 96M 80M env
half_is 40.0 max 80M /bin/unshare --cgroup --mount sh -c \
    "umount $cgroups && mount -t cgroup2 cgroup2 $cgroups && exec \"\$@\"" container

# Below the limit of the group nothing is killed, and swap of the host takes nothing.
grep -qx 'oom_kill 0' $cgroups/outer/inner/memory.events || failed "the kernel killed"
