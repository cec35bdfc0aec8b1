#!/bin/sh
# Runs a program that prints something now and then until it has printed, then has less than 24 MiB in memory, and then
# has printed more, and ends it by a signal: its status is 143 then.  After 60 seconds it is 1.
printed=$(mktemp) || exit 1
trap 'rm -f "$printed"' EXIT
"$@" > "$printed" &
program=$!
tries=600
# Waits until a command succeeds.
await() {
    until "$@"; do
        tries=$((tries - 1))
        if [ $tries -le 0 ]; then
            kill -KILL $program
            exit 1
        fi
        sleep 0.1
    done
}
has_printed() {
    [ "$(wc -c < "$printed")" -gt "$1" ]
}
is_out() {
    [ "$(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$program/status")" -lt 24576 ]
}
await has_printed 0
await is_out
await has_printed "$(wc -c < "$printed")"
kill -TERM $program
wait $program
