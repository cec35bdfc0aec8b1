#!/bin/sh
# Builds the C library and installs it: install-c.sh [PREFIX]   (default /usr/local)
set -eu
prefix=${1:-/usr/local}
here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml" | head -n 1)
cargo build --release --locked -p memfold --lib --manifest-path "$here/Cargo.toml"
mkdir -p "$prefix/lib/pkgconfig" "$prefix/include"
cp "$target/release/libmemfold.so" "$target/release/libmemfold.a" "$prefix/lib/"
cp "$here/include/memfold.h" "$prefix/include/"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$here/memfold.pc.in" \
    > "$prefix/lib/pkgconfig/memfold.pc"
