#!/bin/bash
# Builds the binary of a release into a folder: packaging/release.sh [FOLDER], by default target/dist.
#
#   memfold          stripped, a static PIE (on aarch64 at a fixed address): it needs no library of the host
#   memfold.debug    its symbols and line tables; gdb and std's backtraces find them beside the binary
#                    (.gnu_debuglink), or by the build ID
#   copyright        the licences of all that is in it, which go wherever it goes; copyright-rust.html has those of Rust's
#                    standard library
#   SHA256SUMS       of all of them
#
# Paths of the checkout, the target folder, cargo's home and the toolchain are replaced in the first two, so
# that two checkouts of one commit give the same bytes with the same toolchain, wherever they lie.
# TARGET is a Rust target, by default x86_64-unknown-linux-musl, which is to be installed (rustup target add);
# for that one musl-gcc (musl-tools) compiles the codecs. Needs objcopy and readelf (binutils), and what licences.py
# does. CROSS is the prefix of the tools for another architecture than this machine's, such as aarch64-linux-gnu-.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
dist=$(realpath -m "${1:-$root/target/dist}")
cd "$root"

triple=${TARGET:-x86_64-unknown-linux-musl}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
home=$(realpath "${CARGO_HOME:-$HOME/.cargo}")
sysroot=$(rustc --print sysroot)
commit=$(rustc -vV | sed -n 's/^commit-hash: //p')

rust=(-Ctarget-feature=+crt-static "-Clink-arg=-Wl,--build-id")
c=()
cross=${CROSS:-}
if [[ -n "$cross" ]]; then
    name=$(tr a-z- A-Z_ <<< "$triple")
    export "CARGO_TARGET_${name}_LINKER=${cross}gcc" "CC_${triple//-/_}=${cross}gcc"
fi
map() {
    rust+=("--remap-path-prefix=$1=$2")
    c+=("-ffile-prefix-map=$1=$2")
}
# Of several prefixes that match, the last one counts.
map "$PWD" /memfold
map "$target" /memfold/target
map "$home" /cargo
map "$sysroot/lib/rustlib/src/rust" "/rustc/$commit"

mkdir -p "$dist"
packaging/licences.py "$triple" > "$dist/copyright"
install -m 644 "$sysroot/share/doc/rust/COPYRIGHT-library.html" "$dist/copyright-rust.html"

# Given a target, cargo passes these flags to what is built for it alone: procedural macros are shared
# libraries, which cannot be linked statically.
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && echo -n "${rust[*]}") CFLAGS="${c[*]}" \
    CARGO_TARGET_DIR=$target \
    cargo build --release --locked --package memfold-cli --target "$triple"

built=$target/$triple/release/memfold
"${cross}objcopy" --only-keep-debug --compress-debug-sections=zlib "$built" "$dist/memfold.debug"
"${cross}objcopy" --strip-all --add-gnu-debuglink="$dist/memfold.debug" "$built" "$dist/memfold"

fail() {
    echo "release.sh: $dist/memfold $*" >&2
    exit 1
}
for path in "$PWD" "$target" "$home" "$sysroot/lib/rustlib"; do
    if grep --quiet --binary-files=text --fixed-strings "$path" "$dist/memfold"; then
        fail "contains the build path $path"
    fi
done
headers=$(readelf --file-header --program-headers --dynamic --notes --wide "$dist/memfold")
# (Rust links static programs of aarch64 to a fixed address.)
[[ $headers == *"DYN ("* || $triple == aarch64-* ]] || fail "is not position-independent"
[[ $headers != *INTERP* && $headers != *NEEDED* ]] || fail "is not static"
[[ $headers == *"Build ID"* ]] || fail "has no build ID"
(cd "$dist" && sha256sum memfold memfold.debug copyright copyright-rust.html | tee SHA256SUMS)
stat --printf '%s bytes %n\n' "$built" "$dist/memfold" "$dist/memfold.debug"
