#!/bin/bash
# Boots a kernel without this machine's files, and runs held-inside.sh there: tests/kernels/held.sh MEMFOLD [SECONDS [KERNEL]]
#
# SECONDS of torture, by default 20. KERNEL is a folder as fetch.sh makes it, by default Debian 12's (6.1), which has no
# UFFDIO_MOVE. With SHORT in the environment, torture, forks and Redis are left out; MEMFOLD_TRACK_ACCESSES is passed on. Needs
# what run.sh needs, a C compiler, and Redis.
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
kernel="${3:-$(tests/kernels/fetch.sh --suite bookworm "${CARGO_TARGET_DIR:-target}/tmp/kernels")}"
programs=()
for program in memfold verify forktree torture; do programs+=(--program "$work/$program"); done
[[ -n "${SHORT:-}" ]] || programs+=(--program redis-server --program redis-cli)
tests/kernels/run.sh --memory 1G --seconds 600 "${programs[@]}" --set SECONDS_OF_TORTURE="$seconds" \
    --set SHORT="${SHORT:-}" --set MEMFOLD_TRACK_ACCESSES="${MEMFOLD_TRACK_ACCESSES:-}" "$kernel" tests/kernels/held-inside.sh
