#!/bin/bash
# Builds the Python wheel and tests it in a new virtual environment: packaging/wheel.sh [FOLDER], by default
# target/wheels. Needs python3 with venv, PyPI for maturin, zig, auditwheel and numpy, and what licences.py does.
#
# zig links with glibc 2.17, the oldest that Rust's standard library runs with, whatever glibc is here. maturin gives the
# wheel the tag of that, and auditwheel must find the same. MATURIN_OPTIONS are further options, such as "--profile dev".
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${1:-$root/target/wheels}")
cd "$root"

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
work=$(mktemp -d)
# pyproject.toml's license-files take these in.
notices=(bindings/python/LICENSE-THIRD-PARTY bindings/python/LICENSE-RUST.html)
trap 'cd "$root" && rm -rf "$work" "${notices[@]}"' EXIT
packaging/licences.py --python > "${notices[0]}"
install -m 644 "$(rustc --print sysroot)/share/doc/rust/COPYRIGHT-library.html" "${notices[1]}"
python3 -m venv "$work/build"
"$work/build/bin/pip" install --quiet "maturin[zig]>=1.9.4,<2" auditwheel
rm -f "$out"/memfold-*.whl
read -r -a options <<< "${MATURIN_OPTIONS:---release}"
PATH=$work/build/bin:$PATH CARGO_TARGET_DIR=$target \
    maturin build --locked --zig --compatibility manylinux2014 --auditwheel check --out "$out" "${options[@]}" \
    --manifest-path bindings/python/Cargo.toml
wheels=("$out"/memfold-*.whl)
[[ ${wheels[0]} == *-abi3-manylinux*_x86_64.whl ]] || { echo "wheel.sh: ${wheels[0]} is no manylinux wheel" >&2; exit 1; }
tag=$(grep --only-matching 'manylinux_[0-9]*_[0-9]*_x86_64' <<< "${wheels[0]}" | head -n 1)
shown=$("$work/build/bin/auditwheel" show "${wheels[0]}")
[[ $shown == *\"$tag\"* ]] || { echo "wheel.sh: auditwheel does not confirm $tag: $shown" >&2; exit 1; }

"$work/build/bin/python" -m zipfile --extract "${wheels[0]}" "$work/wheel"
for words in "LZ4 Library" "For Zstandard software" "The Rust Standard Library"; do
    grep --quiet --recursive --fixed-strings "$words" "$work"/wheel/memfold-*.dist-info/licenses \
        || { echo "wheel.sh: ${wheels[0]} has no notice with \"$words\"" >&2; exit 1; }
done

python3 -m venv "$work/test"
"$work/test/bin/pip" install --quiet "${wheels[0]}"
tests=$PWD/bindings/python/tests
cd "$work"
"$work/test/bin/python" -m unittest discover "$tests"
ls -l "$out"
