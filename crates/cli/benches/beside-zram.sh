#!/bin/bash
# A command natively, in a cgroup over zram (lz4), and under memfold, in turn:
#   crates/cli/benches/beside-zram.sh MEBIBYTES ROUNDS COMMAND [ARGUMENT]...
# Each may have so much resident. Needs root, cgroups v1, the zram module and target/release/memfold
# (or MEMFOLD). Prints seconds and the most that was resident, and removes what it set up.
set -euo pipefail
resident="$1" rounds="$2"
shift 2
memfold="${MEMFOLD:-$(dirname "$0")/../../../target/release/memfold}"
group="/sys/fs/cgroup/memory/beside-zram-$$"
folder="$(mktemp -d)"
number="$(cat /sys/class/zram-control/hot_add)"
disk="/dev/zram$number"
clean_up() {
    swapoff "$disk" || true
    echo "$number" > /sys/class/zram-control/hot_remove || true
    rmdir "$group" || true
    rm -rf "$folder"
}
trap clean_up EXIT
mkdir "$group"
echo "$((resident << 20))" > "$group/memory.limit_in_bytes"
echo lz4 > "/sys/block/zram$number/comp_algorithm"
echo 4G > "/sys/block/zram$number/disksize"
mkswap "$disk" > /dev/null
swapon -p 100 "$disk"

# Seconds and status of a command, which is given five minutes.
timed() {
    local began status=0
    began="$(date +%s.%N)"
    timeout 300 "$@" > "$folder/output" 2>&1 || status=$?
    printf '%.2f s' "$(bc <<< "$(date +%s.%N) - $began")"
    ((status == 0)) || printf ', status %d' "$status"
}

for ((round = 0; round < rounds; round++)); do
    printf 'native  %s\n' "$(timed "$@")"
    echo 0 > "$group/memory.max_usage_in_bytes"
    printf 'zram    %s, ' "$(timed bash -c 'echo $$ > "$0/tasks"; exec "$@"' "$group" "$@")"
    printf '%d MiB\n' "$(($(cat "$group/memory.max_usage_in_bytes") >> 20))"
    printf 'memfold %s, ' "$(timed "$memfold" run --quiet --resident "${resident}M" \
        --stats "$folder/stats" -- "$@")"
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["peak_resident_bytes"] >> 20, "MiB")' \
        "$folder/stats"
done
