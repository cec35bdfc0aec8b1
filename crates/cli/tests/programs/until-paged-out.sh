#!/bin/sh
# Runs a program until it has had 48 MiB in memory and then less than 24 MiB, and ends it by a signal: its status
# is 143 then.  After 30 seconds it is 1.
"$@" &
program=$!
kilobytes() {
    sed -n "s/^$1:[^0-9]*\([0-9]*\).*/\1/p" "/proc/$program/status"
}
tries=300
until [ "$(kilobytes VmHWM)" -gt 49152 ] && [ "$(kilobytes VmRSS)" -lt 24576 ]; do
    tries=$((tries - 1))
    if [ $tries = 0 ]; then
        kill -KILL $program
        exit 1
    fi
    sleep 0.1
done
kill -TERM $program
wait $program
