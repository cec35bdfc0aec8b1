#!/bin/bash
# The tests of Go's own runtime, as a static program: under `memfold run`, then attached and detached again and again,
# from their start to their end, until that was done CYCLES times or MINUTES have passed:
#
#   tests/go/runtime.sh MEMFOLD [LIMIT [CYCLES [MINUTES]]]
#
# Needs root, and Go with the sources of its runtime's tests (https://go.dev/dl/, or Debian's golang-src). The tests take
# one to four minutes on two CPUs each time, by default until 100 cycles or 20 minutes; those that run then are not cut
# short. Prints how often the program was detached; fails if a test does, or if it was detached fewer than ten times.
set -euo pipefail
memfold="$(realpath "$1")"
limit="${2:-600M}"
wanted="${3:-100}"
minutes="${4:-20}"
source="$(go env GOROOT)/src/runtime"
[[ -e "$source/malloc_test.go" ]] || { echo "$source has no tests: install golang-src" >&2; exit 1; }
folder="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT

cd "$source"
CGO_ENABLED=0 go test -c -o "$folder/runtime.test" .
echo "== run"
"$memfold" run --limit "$limit" -- "$folder/runtime.test" -test.short

# Runs the tests once, attached and detached until they end; adds to `cycles`.
cycles=0
runs() { [[ "$(ps -o stat= -p "$program")" == [^Z]* ]]; }
attach_and_detach() {
    "$folder/runtime.test" -test.short > "$folder/output" 2>&1 &
    program=$!
    while runs; do
        "$memfold" attach "$program" --limit "$limit" --quiet 2> "$folder/attach" &
        local attach=$! tries=0
        sleep 1
        # On a busy machine it may not be attached yet.
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
    local status=0
    wait "$program" || status=$?
    tail -n 1 "$folder/output"
    if ((status != 0)); then
        grep -E -A20 -- '--- FAIL|^panic|^fatal' "$folder/output" >&2 || true
        echo "status $status after $cycles cycles of at least $wanted" >&2
        exit 1
    fi
}

echo "== attach and detach"
began=$SECONDS
while ((cycles < wanted && SECONDS - began < minutes * 60)); do
    attach_and_detach
done
echo "detached $cycles times, of $wanted that were wanted, in $((SECONDS - began)) s"
((cycles >= 10))
