#!/bin/bash
# memfold serve beside nbdkit's memory plugin with a real image, in turn:
#
#   crates/disk/benches/compare-image.sh IMAGE [ROUNDS]
#
# Memory once the image is copied and, of memfold, after 40 seconds without requests; then random reads of what was
# left alone, the same once more, and random writes. Needs fio with its nbd engine, nbdcopy, nbdkit, python3,
# and target/release/memfold. Prints the median, least and most of each figure over the rounds.
set -euo pipefail
image="$(realpath "$1")"
cd "$(dirname "$0")/../../.."
memfold="$PWD/target/release/memfold"
rounds="${2:-5}"
size="$(stat -c %s "$image")"
folder="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT
socket="$folder/disk.sock"
uri="nbd+unix:///?socket=$socket"

# Operations a second, of both directions.
operations() {
    fio --name=job --ioengine=nbd --uri="$uri" --size="$size" --buffer_compress_percentage=60 \
        --refill_buffers --minimal --rw="$1" --bs=4k --iodepth=16 --time_based --runtime="$2" \
        --norandommap --randrepeat=0 2> /dev/null |
        awk -F';' '/^3;/ { print $8 + $49 }'
}

resident() {
    awk '/VmRSS/ { print $2 / 1024 }' "/proc/$1/status"
}

seconds_of_cpu() {
    awk '{ print ($14 + $15) / 100 }' "/proc/$1/stat"
}

# Name, seconds to wait, command.
measure() {
    local name="$1" seconds="$2"
    shift 2
    "$@" &
    local server=$!
    until [[ -S "$socket" ]]; do sleep 0.02; done
    nbdcopy "$image" "$uri"
    echo "$name resident_mib $(resident "$server")"
    local before="$(seconds_of_cpu "$server")"
    sleep "$seconds"
    echo "$name resident_later_mib $(resident "$server")"
    echo "$name idle_cpu_seconds $(python3 -c "print($(seconds_of_cpu "$server") - $before)")"
    echo "$name random_reads_per_s $(operations randread 3)"
    operations randread 5 > /dev/null
    echo "$name random_reads_again_per_s $(operations randread 3)"
    echo "$name random_writes_per_s $(operations randwrite 3)"
    kill "$server"
    wait "$server" || true
    rm -f "$socket"
}

for ((round = 0; round < rounds; round++)); do
    for algorithm in lz4 zstd; do
        measure "memfold-$algorithm" 40 "$memfold" serve --nbd "unix:$socket" --size "$size" --limit 2G \
            --algo "$algorithm" --quiet
    done
    for allocator in zstd malloc; do
        measure "nbdkit-$allocator" 1 nbdkit -f -U "$socket" memory size="$size" allocator="$allocator"
    done
done > "$folder/figures"

python3 crates/testing/medians.py "$folder/figures"
