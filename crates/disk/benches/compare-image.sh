#!/bin/bash
# memfold serve beside nbdkit's memory plugin with a real image:
#
#   crates/disk/benches/compare-image.sh IMAGE [ROUNDS]
#
# Four servers get the image and are left alone for 80 seconds. Then, in turn: random reads of what was left alone (18
# seconds apart, in which it is packed again), more of them after four seconds of reads, and random writes; a second each.
# Memory before and after the 80 seconds, and the CPU time so far. Needs fio with its nbd engine, nbdcopy, nbdkit, python3,
# and target/release/memfold. Prints the median, least and most of each figure.
set -euo pipefail
image="$(realpath "$1")"
cd "$(dirname "$0")/../../.."
memfold="$PWD/target/release/memfold"
rounds="${2:-7}"
size="$(stat -c %s "$image")"
folder="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT
servers=(memfold-lz4 memfold-zstd nbdkit-zstd nbdkit-malloc)
declare -A processes

uri() {
    echo "nbd+unix:///?socket=$folder/$1.sock"
}

# Server, direction, seconds: operations a second.
operations() {
    fio --name=job --ioengine=nbd --uri="$(uri "$1")" --size="$size" --buffer_compress_percentage=60 \
        --refill_buffers --minimal --rw="$2" --bs=4k --iodepth=16 --time_based --runtime="$3" \
        --norandommap --randrepeat=0 2> /dev/null |
        awk -F';' '/^3;/ { print $8 + $49 }'
}

resident() {
    awk '/VmRSS/ { print $2 / 1024 }' "/proc/$1/status"
}

seconds_of_cpu() {
    awk '{ print ($14 + $15) / 100 }' "/proc/$1/stat"
}

# A figure, a direction, rounds, seconds between them.
in_turn() {
    local round server
    for ((round = 0; round < $3; round++)); do
        for server in "${servers[@]}"; do
            echo "$server $1 $(operations "$server" "$2" 1)"
        done
        sleep "$4"
    done
}

measure() {
    local server kind socket
    for server in "${servers[@]}"; do
        kind="${server#*-}" socket="$folder/$server.sock"
        case "$server" in
            memfold-*) "$memfold" serve --nbd "unix:$socket" --size "$size" --limit 2G --algo "$kind" --quiet & ;;
            nbdkit-*) nbdkit -f -U "$socket" memory size="$size" allocator="$kind" & ;;
        esac
        processes[$server]=$!
        until [[ -S "$socket" ]]; do sleep 0.02; done
        nbdcopy "$image" "$(uri "$server")"
        echo "$server resident_mib $(resident "${processes[$server]}")"
    done
    sleep 80
    for server in "${servers[@]}"; do
        echo "$server resident_later_mib $(resident "${processes[$server]}")"
        echo "$server cpu_seconds $(seconds_of_cpu "${processes[$server]}")"
    done
    in_turn random_reads_per_s randread "$rounds" 18
    for server in "${servers[@]}"; do operations "$server" randread 4 > /dev/null; done
    in_turn random_reads_again_per_s randread "$rounds" 0
    in_turn random_writes_per_s randwrite "$rounds" 0
}

measure > "$folder/figures"
python3 crates/testing/medians.py "$folder/figures"
