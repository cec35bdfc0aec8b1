#!/bin/sh
# Builds the wheel in a virtual environment of its own, installs it, checks the types, and runs the
# tests.  Needs python3 with venv, and PyPI for numpy, maturin, mypy and pandas.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# The workspace's folder, for the crates that its tests have built.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$here/../../target}"
environment="$CARGO_TARGET_DIR/python"
test -x "$environment/bin/pip" || python3 -m venv "$environment"
PATH="$environment/bin:$PATH"
pip install --quiet --disable-pip-version-check "maturin>=1.9.4,<2" "numpy>=1.21" mypy pandas
# A debug build of the library takes a third of the time; its dependencies are optimised.
export MATURIN_PEP517_ARGS="${MATURIN_PEP517_ARGS---profile dev --locked}"
pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --force-reinstall "$here"
cargo fmt --check --manifest-path "$here/Cargo.toml"
(cd "$here" && mypy --cache-dir "$environment/mypy" python/memfold tests/typing_check.py)
cd /
python -m mypy.stubtest --mypy-config-file "$here/pyproject.toml" memfold._memfold
python -m unittest discover "$here/tests"
