#!/bin/sh
# Runs a program until it has printed something and then has less than 24 MiB in memory, and ends it by a signal:
# its status is 143 then.  After 60 seconds it is 1.
printed=$(mktemp) || exit 1
trap 'rm -f "$printed"' EXIT
"$@" > "$printed" &
program=$!
tries=600
until [ -s "$printed" ] \
    && [ "$(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$program/status")" -lt 24576 ]; do
    tries=$((tries - 1))
    if [ $tries = 0 ]; then
        kill -KILL $program
        exit 1
    fi
    sleep 0.1
done
kill -TERM $program
wait $program
