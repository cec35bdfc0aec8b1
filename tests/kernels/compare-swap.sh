#!/bin/bash
# zram in a virtual machine beside a disk of memfold serve, as its swap, in turn:
# tests/kernels/compare-swap.sh [ROUNDS [equal-total]]
#
# A machine of 128 MiB runs crates/cli/tests/programs/swapped.c with 120 MiB. With equal-total, one with zram
# also has as much more memory as memfold took, so that both take the same of the host. Prints the median, least and
# most of the program's time, and of the host's memory: QEMU's and memfold's peaks of resident memory.
# Needs target/release/memfold, and what run.sh needs.
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds="${1:-5}" equal_total="${2:-}"
work="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$work"' EXIT
kernel="$(tests/kernels/fetch.sh target/tmp/kernels)"
cc -O2 -static -o "$work/swapped" crates/cli/tests/programs/swapped.c
figures="$work/figures"

# The peak of a process's resident memory in KiB.
peak() { awk '/^VmHWM/ { print $2 }' "/proc/$1/status" 2> /dev/null || true; }

# machine NAME MEBIBYTES DEVICE [QEMU_ARGUMENT]...
machine() {
    local name="$1" memory="$2" device="$3" machine kib= now
    shift 3
    rm -f "$work/pid"
    tests/kernels/run.sh --memory "${memory}M" --seconds 300 --module virtio_pci --module virtio_blk \
        --module zram --module lz4 --file "$work/swapped" --set DEVICE="$device" --set SWAP_MEBIBYTES=512 \
        --set MEBIBYTES=120 --set ROUNDS=1 "$kernel" tests/kernels/swap.sh -pidfile "$work/pid" "$@" \
        > "$work/output" 2> "$work/errors" &
    machine=$!
    while kill -0 "$machine" 2> /dev/null; do
        now="$([[ ! -s "$work/pid" ]] || peak "$(< "$work/pid")")"
        kib="${now:-$kib}"
        sleep 0.2
    done
    wait "$machine" || { cat "$work/output" "$work/errors" >&2; exit 1; }
    sed -n "s/.*filled in \([0-9.]*\) s, checked in \([0-9.]*\) s/\1 \2/p" "$work/output" |
        awk -v name="$name" '{ print name, "seconds", $1 + $2 }' >> "$figures"
    awk -v name="$name" '$1 ~ /^pswp/ { print name, $1 "_pages", $2 }' "$work/output" >> "$figures"
    echo "$name qemu_mib $((kib / 1024))" >> "$figures"
    qemu_kib="$kib"
}

for ((round = 0; round < rounds; round++)); do
    target/release/memfold serve --nbd "unix:$work/disk" --size 512M --limit 256M --quiet &
    server=$!
    until [[ -S "$work/disk" ]]; do sleep 0.05; done
    machine memfold 128 vda -drive "file=nbd+unix:///?socket=$work/disk,format=raw,if=virtio,discard=unmap"
    memfold_kib="$(peak "$server")"
    kill "$server"
    wait "$server"
    echo "memfold server_mib $((memfold_kib / 1024))" >> "$figures"
    echo "memfold host_mib $(((qemu_kib + memfold_kib) / 1024))" >> "$figures"
    machine zram 128 zram0
    echo "zram host_mib $((qemu_kib / 1024))" >> "$figures"
    [[ -n "$equal_total" ]] || continue
    machine zram-equal-total $((128 + memfold_kib / 1024)) zram0
    echo "zram-equal-total host_mib $((qemu_kib / 1024))" >> "$figures"
done
head -n 1 "$work/errors"
python3 crates/testing/medians.py "$figures"
