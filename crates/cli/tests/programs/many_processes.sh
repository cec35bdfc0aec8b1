#!/bin/bash
# A shell with much data of its own runs hundreds of short pipelines: each of them
# forks the shell while most of its memory may be out, and executes small programs.
# Usage: many_processes.sh ROUNDS.  Prints one checksum, the same in every run.
set -euo pipefail
rounds=${1:-40}

data=$(seq 1 900000)
declare -a table
for ((i = 0; i < 150000; i++)); do
    table[i]="entry $i of the table, number $((i * 7919 % 104729))"
done

total=""
for ((i = 1; i <= rounds; i++)); do
    sum=$(printf '%s' "${data:$((i * 9973)):3000}" | tr 0-9 a-j | sed 's/ab*/X/g' | cksum)
    inner=$( (echo "${table[$((i * 997 % 150000))]}"; (echo "${#data} ${#table[@]}")) | sort | cksum)
    total=$(echo "$total $sum $inner" | cksum)
done
echo "data $(echo "$data" | cksum) table $(printf '%s\n' "${table[@]}" | cksum)"
echo "total $total"
