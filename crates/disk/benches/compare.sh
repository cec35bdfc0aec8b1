#!/bin/bash
# memfold serve beside nbdkit's memory plugin, in turn: crates/disk/benches/compare.sh [ROUNDS]
# Needs fio with its nbd engine, nbdkit, python3, and target/release/memfold.
# Prints the median, least and most of each figure over the rounds. Discards are of a disk of 1 GiB.
set -euo pipefail
cd "$(dirname "$0")/../../.."
memfold="$PWD/target/release/memfold"
rounds="${1:-5}"
folder="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT
socket="$folder/disk.sock"
size=512M
uri="nbd+unix:///?socket=$socket"

# Pages of which 60 % compress away, as fio makes them.
job() {
    fio --name=job --ioengine=nbd --uri="$uri" --size="$size" --buffer_compress_percentage=60 \
        --refill_buffers --minimal "$@" 2> /dev/null | grep '^3;'
}

# Operations a second, of both directions.
operations() {
    job --rw="$1" --bs=4k --iodepth=16 --time_based --runtime=3 --norandommap --randrepeat=0 |
        awk -F';' '{ print $8 + $49 }'
}

milliseconds_of_cpu() {
    # In ticks of 10 ms. Threads that have ended are counted.
    awk '{ print 10 * ($14 + $15) }' "/proc/$1/stat"
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
server.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 4, 1, 0, 1 << 30))
take(16)
print(1000 * (time.monotonic() - began))
PYTHON
}

# Starts the server of a name, and waits until it listens.
start() {
    local kind="${1#*-}"
    case "$1" in
        memfold-*) "$memfold" serve --nbd "unix:$socket" --size "$size" --limit 2G --algo "$kind" --quiet & ;;
        nbdkit-*) nbdkit -f -U "$socket" memory size="$size" allocator="$kind" & ;;
    esac
    server=$!
    until [[ -S "$socket" ]]; do sleep 0.02; done
}

end() {
    kill "$server"
    wait "$server" || true
    rm -f "$socket"
}

measure() {
    size=512M
    start "$1"
    local began="$EPOCHREALTIME"
    job --rw=write --bs=256k --iodepth=4 > /dev/null
    echo "$1 fill_seconds $(python3 -c "print($EPOCHREALTIME - $began)")"
    echo "$1 resident_mib $(awk '/VmRSS/ { print $2 / 1024 }' "/proc/$server/status")"
    echo "$1 reads_mib_per_s $(job --rw=read --bs=256k --iodepth=4 | awk -F';' '{ print $7 / 1024 }')"
    echo "$1 random_reads_per_s $(operations randread)"
    echo "$1 random_writes_per_s $(operations randwrite)"
    end
    size=1G
    start "$1"
    job --rw=write --bs=256k --iodepth=4 > /dev/null
    local before
    before="$(milliseconds_of_cpu "$server")"
    echo "$1 discard_ms $(discard)"
    # What is left to a worker is done then.
    sleep 2
    echo "$1 discard_cpu_ms $(python3 -c "print($(milliseconds_of_cpu "$server") - $before)")"
    end
}

for ((round = 0; round < rounds; round++)); do
    for name in memfold-lz4 memfold-zstd nbdkit-zstd nbdkit-malloc; do
        measure "$name"
    done
done > "$folder/figures"

python3 crates/testing/medians.py "$folder/figures"
