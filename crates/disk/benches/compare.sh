#!/bin/bash
# memfold serve beside nbdkit's memory plugin, in turn: crates/disk/benches/compare.sh [ROUNDS]
# Needs fio with its nbd engine, nbdkit, python3, and target/release/memfold.
# Prints the median, least and most of each figure over the rounds.
set -euo pipefail
cd "$(dirname "$0")/../../.."
memfold="$PWD/target/release/memfold"
rounds="${1:-5}"
folder="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT
socket="$folder/disk.sock"
uri="nbd+unix:///?socket=$socket"

# Pages of which 60 % compress away, as fio makes them.
job() {
    fio --name=job --ioengine=nbd --uri="$uri" --size=512M --buffer_compress_percentage=60 \
        --refill_buffers --minimal "$@" 2> /dev/null | grep '^3;'
}

# Operations a second, of both directions.
operations() {
    job --rw="$1" --bs=4k --iodepth=16 --time_based --runtime=3 --norandommap --randrepeat=0 |
        awk -F';' '{ print $8 + $49 }'
}

# Milliseconds that a discard of everything takes its caller.
discard() {
    python3 - "$socket" << 'PYTHON'
import socket, struct, sys, time

server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])


def take(count):
    data = b""
    while len(data) < count:
        data += server.recv(count - len(data))
    return data


take(18)
server.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, 6) + bytes(6))
while True:
    _, _, kind, length = struct.unpack(">QIII", take(20))
    take(length)
    if kind == 1:
        break
began = time.monotonic()
server.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 4, 1, 0, 512 << 20))
take(16)
print(1000 * (time.monotonic() - began))
PYTHON
}

measure() {
    local name="$1"
    shift
    "$@" &
    local server=$!
    until [[ -S "$socket" ]]; do sleep 0.02; done
    local began="$EPOCHREALTIME"
    job --rw=write --bs=256k --iodepth=4 > /dev/null
    echo "$name fill_seconds $(python3 -c "print($EPOCHREALTIME - $began)")"
    echo "$name resident_mib $(awk '/VmRSS/ { print $2 / 1024 }' "/proc/$server/status")"
    echo "$name random_reads_per_s $(operations randread)"
    echo "$name random_writes_per_s $(operations randwrite)"
    echo "$name discard_ms $(discard)"
    kill "$server"
    wait "$server" || true
    rm -f "$socket"
}

for ((round = 0; round < rounds; round++)); do
    for algorithm in lz4 zstd; do
        measure "memfold-$algorithm" "$memfold" serve --nbd "unix:$socket" --size 512M --limit 2G \
            --algo "$algorithm" --quiet
    done
    for allocator in zstd malloc; do
        measure "nbdkit-$allocator" nbdkit -f -U "$socket" memory size=512M allocator="$allocator"
    done
done > "$folder/figures"

python3 crates/testing/medians.py "$folder/figures"
