#!/bin/bash
# Pages a second and latency of faults where pages go: a remote store of one and of three servers, the
# file tier, a swap file of the kernel.  As root; `cargo build --release -p memfold-cli` first.
#   crates/remote/benches/compare.sh [RUNS [MEBIBYTES [READS]]]
# All servers are on this host, so they take CPU time from what is measured.
set -euo pipefail
cd "$(dirname "$0")/../../.."
runs="${1:-3}" mebibytes="${2:-512}" reads="${3:-40000}"
limit=$((mebibytes / 8))
folder="$(mktemp -d /var/tmp/remote-bench.XXXXXX)"
memfold="$PWD/target/release/memfold"
servers=()
# Of a cgroup v2, or the memory controller of v1.
if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    group=/sys/fs/cgroup/remote-bench most=memory.max
else
    group=/sys/fs/cgroup/memory/remote-bench most=memory.limit_in_bytes
fi
end() {
    for server in "${servers[@]}"; do kill "$server" 2> /dev/null || true; done
    swapoff "$folder/kernel" 2> /dev/null || true
    [[ ! -d "$group" ]] || rmdir "$group" || true
    rm -rf "$folder"
}
trap end EXIT
cc -O2 -o "$folder/touch" crates/remote/benches/touch.c

# Servers at 17100 and on; the cluster's are 17101 to 17103.
server() {
    mkdir "$folder/$1"
    redis-server --port "$1" --dir "$folder/$1" --save "" --bind 127.0.0.1 "${@:2}" > "$folder/$1/log" &
    servers+=($!)
}
server 17100
for port in 17101 17102 17103; do server $port --cluster-enabled yes --cluster-port $((port + 100)); done
sleep 1
redis-cli --cluster create 127.0.0.1:17101 127.0.0.1:17102 127.0.0.1:17103 --cluster-yes > "$folder/log"
sleep 2

run() {
    "$memfold" run -q --limit "${limit}M" --stats "$folder/stats" "$@" -- "$folder/touch" "$mebibytes" "$reads"
    # Of faults on pages in the store alone.
    python3 - "$folder/stats" << 'PYTHON'
import json
import sys

latency = json.load(open(sys.argv[1])).get("remote_fault_ns")
if latency and latency["p99"]:
    print(f", from the store {latency['p50'] / 1000:.0f} and {latency['p99'] / 1000:.0f}")
PYTHON
}
kernel() {
    fallocate -l $((2 * mebibytes))M "$folder/kernel"
    chmod 600 "$folder/kernel"
    mkswap -q "$folder/kernel"
    swapon "$folder/kernel"
    mkdir -p "$group"
    echo "${limit}M" > "$group/$most"
    bash -c "echo \$\$ > $group/cgroup.procs; exec $folder/touch $mebibytes $reads"
    swapoff "$folder/kernel"
    rmdir "$group"
}

echo "where: pages filled a second, faults a second, p50 and p99 in us"
for ((round = 0; round < runs; round++)); do
    echo "one server: $(run --remote valkey://127.0.0.1:17100 | tr -d '\n')"
    echo "three servers: $(run --remote valkey://127.0.0.1:17101 | tr -d '\n')"
    echo "file: $(run --swap-file "$folder" --swap-size "$((2 * mebibytes))M")"
    if [[ -d "$(dirname "$group")" ]]; then
        echo "kernel swap file: $(kernel)"
    fi
done
