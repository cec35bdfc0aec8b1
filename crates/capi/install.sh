#!/bin/sh
# Builds the C library and installs it with its header and memfold.pc:
#
#   crates/capi/install.sh [--profile PROFILE | --built FOLDER] [PREFIX]   (default: release, /usr/local)
#
# --built takes the libraries from a folder, where cargo has built them. DESTDIR is put before PREFIX where files are
# written. Programs that are linked with the shared library find it in /usr/local/lib once root has called ldconfig.
#
# Needs cargo and binutils. `cargo cinstall` (cargo-c, README.md) installs the same files, but its
# static library exports the symbols of LZ4, zstd and xxHash, too.
set -eu
profile=release
built=
case "${1:-}" in
--profile)
    profile=$2
    shift 2
    ;;
--built)
    built=$2
    shift 2
    ;;
esac
prefix=$(realpath -m "${1:-/usr/local}")
to=${DESTDIR:-}$prefix
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "$built" ]; then
    built=${CARGO_TARGET_DIR:-$here/../../target}/$(echo "$profile" | sed 's/^dev$/debug/')
    cargo build --profile "$profile" --locked -p memfold-capi --lib --manifest-path "$here/Cargo.toml"
fi

install -d "$to/lib/pkgconfig" "$to/include"
install -m 644 "$here/include/memfold.h" "$to/include/"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml" | head -n 1)
soname=$(readelf -d "$built/libmemfold_capi.so" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
install -m 755 "$built/libmemfold_capi.so" "$to/lib/libmemfold.so.$version"
ln -sf "libmemfold.so.$version" "$to/lib/$soname"
ln -sf "$soname" "$to/lib/libmemfold.so"

# One object with only the interface global: a program may have its own LZ4, zstd or xxHash, of
# another version.
symbols=$(nm -D --defined-only "$built/libmemfold_capi.so" | awk '{ print $3 }')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
object=$work/memfold.o
ld -r --gc-sections $(printf ' -u %s' $symbols) "$built/libmemfold_capi.a" -o "$object"
# (The bitcode that the Rust standard library carries is of no use once it is linked, and ar fails on it.)
objcopy -R .llvmbc -R .llvmcmd $(printf ' --keep-global-symbol=%s' $symbols) "$object"
ar rcs "$work/libmemfold.a" "$object"
install -m 644 "$work/libmemfold.a" "$to/lib/libmemfold.a"

cat > "$work/memfold.pc" << PC
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: memfold
Description: Memory larger than RAM for one program
Version: $version
Libs: -L\${libdir} -lmemfold
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
Cflags: -I\${includedir}
PC
install -m 644 "$work/memfold.pc" "$to/lib/pkgconfig/memfold.pc"
