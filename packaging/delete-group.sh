# shellcheck shell=sh
if getent group memfold > /dev/null; then
    groupdel memfold || echo "memfold: the group memfold is kept: a user has it as primary group" >&2
fi
