#!/bin/sh
# Builds the wheel in a virtual environment of its own, installs it, and runs the tests and the
# small form of the example.  Needs python3 with venv, and PyPI for numpy and maturin.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# The workspace's own folder: what its tests have built of other crates serves here too.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$here/../../target}"
environment="$CARGO_TARGET_DIR/python"
test -x "$environment/bin/pip" || python3 -m venv "$environment"
PATH="$environment/bin:$PATH"
pip install --quiet --disable-pip-version-check "maturin>=1.7,<2" "numpy>=1.21"
# A debug build of the library takes a third of the time; its dependencies are optimised.
export MATURIN_PEP517_ARGS="${MATURIN_PEP517_ARGS---profile dev --locked}"
pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --force-reinstall "$here"
cargo fmt --check --manifest-path "$here/Cargo.toml"
cd /
python -m unittest discover "$here/tests"
