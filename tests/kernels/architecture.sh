#!/bin/bash
# Builds memfold and test programs for an architecture, boots a kernel of it and runs basics.sh there:
# tests/kernels/architecture.sh [ARCH [SECONDS]]
#
# ARCH is Debian's name, by default arm64; SECONDS of torture, by default 20. By emulation it takes about five minutes.
# Needs what run.sh needs, a compiler for the architecture (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross) and Rust's target.
set -euo pipefail
cd "$(dirname "$0")/../.."
arch="${1:-arm64}" seconds="${2:-20}"
case "$arch" in
    amd64) triple=x86_64-unknown-linux-gnu compiler=gcc strip=strip ;;
    arm64) triple=aarch64-unknown-linux-gnu compiler=aarch64-linux-gnu-gcc strip=aarch64-linux-gnu-strip ;;
    *) echo "architecture.sh: unknown architecture $arch" >&2; exit 1 ;;
esac
variable="CARGO_TARGET_$(tr a-z- A-Z_ <<< "$triple")"
export "${variable}_LINKER=$compiler" "${variable}_RUSTFLAGS=-Ctarget-feature=+crt-static"
# A folder of its own, as the flags are others.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/static"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/tests"

cargo build --locked --package memfold-cli --target "$triple"
"$strip" -o "$work/memfold" "$CARGO_TARGET_DIR/$triple/debug/memfold"
while read -r tests; do
    name="$(basename "$tests")"
    "$strip" -o "$work/tests/${name%-*}" "$tests"
done < <({
    cargo test --locked --package memfold-sys --features std --lib --target "$triple" --no-run
    cargo test --locked --package memfold --test regions --test signals --target "$triple" --no-run
} 2>&1 | tee /dev/stderr | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')

sources=crates/cli/tests/programs
build() {
    local name="$1"
    shift
    "$compiler" -O2 -pthread -o "$work/$name" "$@"
}
build verify $sources/verify.c
build verify-static -static $sources/verify.c
build forktree $sources/forktree.c
build torture $sources/torture.c $sources/torture_owner.c $sources/torture_threads.c

kernel="$(tests/kernels/fetch.sh --suite bookworm-backports --arch "$arch" "$CARGO_TARGET_DIR/../tmp/kernels")"
programs=()
for program in memfold verify verify-static forktree torture; do programs+=(--program "$work/$program"); done
tests/kernels/run.sh --arch "$arch" --cpus 2 --memory 1G --seconds 300 "${programs[@]}" --folder "$work/tests" \
    --set SECONDS_OF_TORTURE="$seconds" "$kernel" tests/kernels/basics.sh
