#!/bin/bash
# Builds the binary of a release into a folder (default: target/dist):
#
#   memfold          stripped
#   memfold.debug    its line tables; std's backtraces find them beside the binary (.gnu_debuglink)
#   SHA256SUMS       of both
#
# Paths of the checkout, the target folder, cargo's home and the toolchain are replaced in both files, so
# that two checkouts of one commit give the same bytes with the same toolchain, wherever they lie.
# Needs objcopy (binutils).
set -euo pipefail
cd "$(dirname "$0")/../.."

dist=${1:-target/dist}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
home=$(realpath "${CARGO_HOME:-$HOME/.cargo}")
sysroot=$(rustc --print sysroot)
commit=$(rustc -vV | sed -n 's/^commit-hash: //p')

rust=()
c=()
map() {
    rust+=("--remap-path-prefix=$1=$2")
    c+=("-ffile-prefix-map=$1=$2")
}
# Of several prefixes that match, the last one counts.
map "$PWD" /memfold
map "$target" /memfold/target
map "$home" /cargo
map "$sysroot/lib/rustlib/src/rust" "/rustc/$commit"

CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && echo -n "${rust[*]}") CFLAGS="${c[*]}" \
    CARGO_TARGET_DIR=$target \
    cargo build --release --locked --package memfold-cli

mkdir -p "$dist"
built=$target/release/memfold
objcopy --only-keep-debug --compress-debug-sections=zlib "$built" "$dist/memfold.debug"
objcopy --strip-all --add-gnu-debuglink="$dist/memfold.debug" "$built" "$dist/memfold"

for path in "$PWD" "$target" "$home" "$sysroot"; do
    if grep --quiet --binary-files=text --fixed-strings "$path" "$dist/memfold"; then
        echo "release.sh: $dist/memfold contains the build path $path" >&2
        exit 1
    fi
done
(cd "$dist" && sha256sum memfold memfold.debug | tee SHA256SUMS)
stat --printf '%s bytes %n\n' "$built" "$dist/memfold" "$dist/memfold.debug"
