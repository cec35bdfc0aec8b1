#!/bin/bash
# Runs a script under a limit: MEMFOLD_ACTION_SCRIPT is its text, MEMFOLD_ACTION_LIMIT the limit, and
# MEMFOLD_ACTION_OPTIONS are further words for `memfold run`. memfold is in PATH.
set -euo pipefail

script=$(mktemp --suffix .sh --tmpdir="$RUNNER_TEMP")
printf '%s\n' "$MEMFOLD_ACTION_SCRIPT" > "$script"
read -r -a options <<< "${MEMFOLD_ACTION_OPTIONS//$'\n'/ }"
limit=$MEMFOLD_ACTION_LIMIT
# The script sees the environment of a step.
unset MEMFOLD_ACTION_SCRIPT MEMFOLD_ACTION_LIMIT MEMFOLD_ACTION_OPTIONS
# As the runner starts a step's script.
exec memfold run --limit "$limit" "${options[@]}" -- bash --noprofile --norc -eo pipefail "$script"
