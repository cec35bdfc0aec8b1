#!/bin/bash
# The tests of Go's own runtime, as a static program: under `memfold run`, then attached and detached again and again
# until they are over:
#
#   tests/go/runtime.sh MEMFOLD [LIMIT]
#
# Needs root, and Go with the sources of its runtime's tests (https://go.dev/dl/, or Debian's golang-src). Takes about
# eight minutes on two CPUs. Prints how often the program was detached; fails if a test does.
set -euo pipefail
memfold="$(realpath "$1")"
limit="${2:-600M}"
source="$(go env GOROOT)/src/runtime"
[[ -e "$source/malloc_test.go" ]] || { echo "$source has no tests: install golang-src" >&2; exit 1; }
folder="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT

cd "$source"
CGO_ENABLED=0 go test -c -o "$folder/runtime.test" .
echo "== run"
"$memfold" run --limit "$limit" -- "$folder/runtime.test" -test.short

echo "== attach and detach"
"$folder/runtime.test" -test.short > "$folder/output" 2>&1 &
program=$!
cycles=0
runs() { [[ "$(ps -o stat= -p "$program")" == [^Z]* ]]; }
while runs; do
    "$memfold" attach "$program" --limit "$limit" --quiet 2> "$folder/attach" &
    attach=$!
    sleep 1
    # On a busy machine it may not be attached yet.
    tries=0
    until "$memfold" detach "$program" > "$folder/detach" 2>&1; do
        runs || break 2
        if ((++tries == 20)); then
            cat "$folder/attach" "$folder/detach" >&2
            exit 1
        fi
        sleep 0.5
    done
    cycles=$((cycles + 1))
    wait "$attach" || true
done
status=0
wait "$program" || status=$?
tail -n 1 "$folder/output"
echo "detached $cycles times"
if ((status != 0 || cycles < 10)); then
    grep -E -A20 -- '--- FAIL|^panic|^fatal' "$folder/output" >&2 || true
    exit 1
fi
