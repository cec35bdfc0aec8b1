#!/bin/bash
# Boots Debian's kernel, which has no UFFDIO_MOVE (6.1), and runs carry.sh there:
# tests/kernels/without-move.sh MEMFOLD [SECONDS]
#
# SECONDS of torture, by default 20. Needs what run.sh needs, a C compiler and Redis.
set -euo pipefail
cd "$(dirname "$0")/../.."
memfold="${1:?the binary}" seconds="${2:-20}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
sources=crates/cli/tests/programs
cc -O2 -pthread -o "$work/verify" $sources/verify.c
cc -O2 -pthread -o "$work/forktree" $sources/forktree.c
cc -O2 -pthread -o "$work/torture" $sources/torture.c $sources/torture_owner.c $sources/torture_threads.c
strip -o "$work/memfold" "$memfold"
kernel="$(tests/kernels/fetch.sh "${CARGO_TARGET_DIR:-target}/tmp/kernels")"
programs=()
for program in memfold verify forktree torture; do programs+=(--program "$work/$program"); done
tests/kernels/run.sh --memory 1G --seconds 600 "${programs[@]}" --program redis-server --program redis-cli \
    --set SECONDS_OF_TORTURE="$seconds" "$kernel" tests/kernels/carry.sh
