#!/bin/bash
# Packages the crates as they would be published, and installs the command from these packages without a
# network: packaging/crates.sh [FOLDER], by default target/crates, which then holds the .crate files.
#
# What `cargo install memfold-cli` will do is tried in an empty cargo home, with no other sources than the
# packages and a folder of their dependencies. Needs the dependencies in cargo's cache (cargo fetch).
# The build is unoptimised: what is tried is whether it builds, not how fast it runs.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${1:-$root/target/crates}")
cd "$root"

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
# At the same place each time, or cargo would build the dependencies again.
work=$target/crates-build
rm -rf "${work:?}"/{source,home,installed,package}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# What is published: all that a published crate is built from, and nothing that says `publish = false`.
crates=(zsmalloc memfold-swap memfold-sys memfold-pager memfold-remote memfold memfold-capi memfold-disk memfold-cli)

packages=()
for crate in "${crates[@]}"; do packages+=(--package "$crate"); done
# Each is built from its package further down.
cargo package --locked --no-verify --allow-dirty --target-dir "$work" "${packages[@]}"
mkdir -p "$out"
for crate in "${crates[@]}"; do rm -f "$out/$crate"-[0-9]*.crate; done
cp "$work"/package/*.crate "$out"

# A source of all the dependencies that the workspace's lock file names, and of the packages.
source=$work/source
cargo vendor --locked --offline --quiet "$source" > /dev/null
for crate in "${crates[@]}"; do
    file=$out/$crate-$version.crate
    tar --extract --gzip --file "$file" --directory "$source"
    sum=$(sha256sum "$file" | cut -d ' ' -f 1)
    echo "{\"files\":{},\"package\":\"$sum\"}" > "$source/$crate-$version/.cargo-checksum.json"
    for licence in LICENSE-MIT LICENSE-APACHE; do
        [[ -s $source/$crate-$version/$licence ]] || { echo "crates.sh: $crate has no $licence" >&2; exit 1; }
    done
done

export CARGO_HOME=$work/home
mkdir -p "$CARGO_HOME"
cat > "$CARGO_HOME/config.toml" << TOML
[source.crates-io]
replace-with = "packages"
[source.packages]
directory = "$source"
TOML
# The libraries that the command has no need of.
for crate in memfold memfold-capi; do
    rm -rf "${work:?}/$crate"
    cp -r "$source/$crate-$version" "$work/$crate"
    (cd "$work/$crate" && CARGO_TARGET_DIR=$work cargo build --offline --lib)
done
# From outside the repository, whose configuration and sources are not to be found.
cd /
CARGO_TARGET_DIR=$work MEMFOLD_COMMIT=packaged \
    cargo install --offline --locked --debug --root "$work/installed" --version "$version" memfold-cli
installed=$work/installed/bin/memfold
"$installed" -V
if ! "$installed" doctor > "$work/doctor"; then
    cat "$work/doctor"
    echo "crates.sh: this host does not let memfold run programs; nothing was run" >&2
    [[ -z "${CI:-}" ]]
else
    expected=$(seq 400000 | sort -rn | sha256sum)
    found=$(seq 400000 | "$installed" run --limit 24M -- sort -rn -S 1G --parallel=1 | sha256sum)
    [[ $found == "$expected" ]] || { echo "crates.sh: the installed memfold gave other bytes" >&2; exit 1; }
fi
ls -l "$out"
