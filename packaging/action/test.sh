#!/bin/bash
# Runs what action.yml runs, as a runner would: packaging/action/test.sh BINARY. As root.
set -euo pipefail
umask 022
binary=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "action/test.sh: $*" >&2
    exit 1
}

export RUNNER_TEMP=$work/temp GITHUB_PATH=$work/path MEMFOLD_VERSION=9.9.9
export MEMFOLD_RELEASES=file://$work/releases
release=$work/releases/v$MEMFOLD_VERSION
mkdir -p "$RUNNER_TEMP" "$release"
cp "$binary" "$release/memfold"
(cd "$release" && sha256sum memfold > SHA256SUMS)

"$here/install.sh" > "$work/log" || { cat "$work/log"; fail "install.sh failed"; }
PATH=$(< "$GITHUB_PATH"):$PATH
[[ $(command -v memfold) == "$RUNNER_TEMP"/* ]] || fail "memfold is not in PATH"
# Another binary than the release's: it replaces nothing, and is not kept.
echo "echo wrong" > "$release/memfold"
for sum in "" 00; do
    if MEMFOLD_SHA256=$sum "$here/install.sh" > "$work/log"; then fail "a wrong checksum was accepted"; fi
    grep --quiet '^::error::.*checksum' "$work/log" || fail "the checksum is not named: $(< "$work/log")"
done
cmp "$binary" "$(command -v memfold)" || fail "a rejected download is in PATH"
[[ $(ls -A "$RUNNER_TEMP"/*) == memfold ]] || fail "a rejected download was kept: $(ls -A "$RUNNER_TEMP"/*)"
cp "$binary" "$release/memfold"
if MEMFOLD_VERSION=0 "$here/install.sh" > "$work/log" 2>&1; then fail "a missing release was installed"; fi

# Without the device, as before Linux 6.1 and in containers: root needs none, and others read what the doctor says.
chmod 755 "$work"
install -d -o 65534 -g 65534 "$RUNNER_TEMP/other"
# What runs as root is in there.
writable=$(find "$work" -user root ! -type l -perm /022)
[[ -z $writable ]] || fail "other users may write to $writable"
install -m 755 "$here/install.sh" "$work"
without_device() { # COMMAND...: with a sudo that fails
    unshare --mount bash -ec 'mkdir "$1/dev" "$1/bin" && mount -t tmpfs dev "$1/dev"
        cp -a /dev/{null,zero,random,urandom} "$1/dev" && ln -s /proc/self/fd "$1/dev/fd"
        echo "echo called sudo; exit 1" > "$1/bin/sudo" && chmod 755 "$1/bin/sudo"
        mount --bind "$1/dev" /dev && PATH=$1/bin:$PATH && shift && exec "$@"' \
        bash "$(mktemp -d -p "$work")" "$@" > "$work/log" 2>&1
}
without_device "$work/install.sh" || fail "install.sh failed without the device: $(< "$work/log")"
if without_device env GITHUB_ACTIONS=true GITHUB_PATH=/dev/null RUNNER_TEMP="$RUNNER_TEMP/other" \
    setpriv --reuid 65534 --regid 65534 --clear-groups "$work/install.sh"; then
    fail "install.sh succeeded without the device and root: $(< "$work/log")"
fi
grep --quiet '^::error::.*lines above' "$work/log" || fail "the doctor was not asked: $(< "$work/log")"
if grep --quiet 'called sudo' "$work/log"; then fail "sudo was called: $(< "$work/log")"; fi

step() { # SCRIPT
    MEMFOLD_ACTION_SCRIPT=$1 MEMFOLD_ACTION_LIMIT=24M MEMFOLD_ACTION_OPTIONS=$'--summary always\n' \
        "$here/run.sh" > "$work/output" 2> "$work/errors"
}
step $'seq 600000 | sort -rn -S 1G --parallel=1 | sha256sum\nenv | grep -c "^MEMFOLD_ACTION" || true' \
    || { cat "$work/errors"; fail "the step failed"; }
expected=$(seq 600000 | sort -rn | sha256sum; echo 0)
[[ $(< "$work/output") == "$expected" ]] || fail "the step printed $(< "$work/output")"
grep --quiet 'spent on swapping' "$work/errors" || fail "nothing was paged out: $(< "$work/errors")"

# The first command that fails ends the step with its status, also in a pipe.
status=0
step $'(exit 7) | cat\necho "went on"' || status=$?
((status == 7)) || fail "status $status instead of 7"
[[ ! -s $work/output ]] || fail "the step went on"

# The two calls are what action.yml makes.
for script in install run; do
    grep --quiet --fixed-strings "\$GITHUB_ACTION_PATH/packaging/action/$script.sh" "$here/../../action.yml" \
        || fail "action.yml does not call $script.sh"
done
echo "passed"
