#!/bin/bash
# Builds everything that people install on a clean root filesystem, and installs and uses it on others:
# packaging/clean.sh [FOLDER], by default target/clean, in which dist/, packages/, crates/ and wheels/
# are then.
#
# As root; needs what roots.sh and test.sh do, the network, and some 15 GB. HEAD is built; the Rust toolchain and what cargo
# has downloaded are this machine's. SUITE is what is built on (default: this machine's). Wheels are tried on OLDER as well.
# shellcheck disable=SC2034 # BOUND and NAMED are for roots.sh.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${1:-$root/target/clean}")
cd "$root"
. packaging/roots.sh

suite=${SUITE:-$(own_suite)}
older=${OLDER:-bullseye}
mkdir -p "$out"
work=$(mktemp -d --tmpdir="$out")
trap 'rm -rf --one-file-system "$work"' EXIT
cargo_home=$(realpath "${CARGO_HOME:-$HOME/.cargo}")
rustup_home=$(realpath "${RUSTUP_HOME:-$HOME/.rustup}")

fail() {
    echo "clean.sh: $*" >&2
    exit 1
}

# A root filesystem whose programs reach the network as this machine's do.
connected() {
    make_root "$1" "$2" "$3"
    cp -L /etc/resolv.conf "$1/etc/resolv.conf"
    mkdir -p "$1/etc/ssl/certs"
    cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$1/etc/ssl/certs/ca-certificates.crt"
}
certificates=/etc/ssl/certs/ca-certificates.crt
network=(HOME=/root SSL_CERT_FILE="$certificates" PIP_CERT="$certificates" PIP_ROOT_USER_ACTION=ignore)
for name in http_proxy https_proxy no_proxy PIP_INDEX_URL; do
    [[ -z "${!name:-}" ]] || network+=("$name=${!name}")
done

echo "== build: $suite"
builder=$work/builder
connected "$builder" "$suite" binutils,ca-certificates,gcc,libc6-dev,make,musl-tools,python3,python3-venv,rpm,xz-utils
mkdir "$work/source"
git archive HEAD | tar --extract --directory "$work/source"
for manifest in Cargo.toml bindings/python/Cargo.toml; do cargo fetch --locked --quiet --manifest-path "$manifest"; done
rm -rf "$out"/{packages,crates,wheels}
mkdir "$out"/{packages,crates,wheels}
BOUND=("$work/source:/src/memfold" "$out:/out" "$(rustc --print sysroot):/opt/rust:ro"
    "$cargo_home/registry:/root/.cargo/registry")
# (Paths of the build are looked for in what is built: none may be what release.sh puts in their place.)
NAMED=("${network[@]}" PATH=/opt/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_TARGET_DIR=/build/target
    MEMFOLD_COMMIT="$(git rev-parse --short HEAD)" SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)")
within "$builder" bash -euc 'cd /src/memfold
    packaging/build.sh /out/packages
    CARGO_NET_OFFLINE=true packaging/crates.sh /out/crates
    packaging/wheel.sh /out/wheels'
rm -rf "$out/dist"
mv "$work/source/target/dist" "$out/dist"
BOUND=() NAMED=()

echo "== packages and image"
"$work/source/packaging/test.sh" "$out/packages"

for name in "$suite" "$older"; do
    echo "== wheel: $name"
    root=$work/wheel-$name
    connected "$root" "$name" ca-certificates,python3,python3-venv
    BOUND=("$out/wheels:/wheels" "$work/source/bindings/python:/python")
    NAMED=("${network[@]}")
    within "$root" bash -euc 'python3 -m venv /venv
        /venv/bin/pip install --quiet /wheels/memfold-*.whl
        cd / && /venv/bin/python -m unittest discover /python/tests'
    BOUND=() NAMED=()
done

echo "== action"
root=$work/action
connected "$root" "$suite" ca-certificates,curl,mount
cp "$out/dist/memfold" "$root/memfold"
BOUND=("$work/source:/src/memfold")
within "$root" /src/memfold/packaging/action/test.sh /memfold
BOUND=()

# In Podman's storage of its own. Optimised less: what is tried is whether the recipe works.
echo "== image, compiled by its recipe"
with_podman "$work" '
    work=$1 cargo_home=$2 rustup_home=$3 rust=$4
    toolchain=/usr/local
    # One variable each: Podman takes the rest of the line for its value.
    tar --directory "$work/builder" --exclude ./build --exclude ./root/.cargo --create . | engine import --quiet \
        --change "ENV PATH=$toolchain/cargo/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        --change "ENV RUSTUP_HOME=$toolchain/rustup" --change "ENV CARGO_HOME=$toolchain/cargo" \
        --change "ENV RUSTUP_TOOLCHAIN=$rust" - builder > /dev/null
    engine build --quiet --network host --layers=false "${limits[@]}" --build-arg BUILDER=localhost/builder \
        --env CARGO_PROFILE_RELEASE_LTO=off --env CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
        --volume "$rustup_home:$toolchain/rustup" --volume "$cargo_home/bin:$toolchain/cargo/bin:ro" \
        --volume "$cargo_home/registry:$toolchain/cargo/registry" \
        --file "$work/source/packaging/container/Containerfile" --tag memfold "$work/source" > /dev/null
    engine run --rm --network none "${limits[@]}" --device /dev/userfaultfd memfold doctor' \
    "$work" "$cargo_home" "$rustup_home" "$(rustup show active-toolchain | cut -d " " -f 1)" > "$work/log" || { cat "$work/log"; fail "the image"; }

echo "passed: $(cd "$out" && echo packages/* crates/* wheels/*)"
