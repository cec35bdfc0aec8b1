#!/bin/bash
# Installs a release of memfold on a CI runner, and grants it what it needs there.
#
#   MEMFOLD_VERSION   the release
#   MEMFOLD_SHA256    the checksum of its binary; if empty, that of the release's SHA256SUMS
#   MEMFOLD_RELEASES  where releases are (default: the repository's)
#   RUNNER_TEMP, GITHUB_PATH  as the runner sets them
#
# A runner is a machine of one user, to whom the device is given.
set -euo pipefail

fail() {
    echo "::error::memfold: $*"
    exit 1
}

[[ $(uname -sm) == "Linux x86_64" ]] || fail "needs a Linux runner on x86-64, this is $(uname -sm)"
releases=${MEMFOLD_RELEASES:-https://github.com/memfold/memfold/releases/download}
from=$releases/v$MEMFOLD_VERSION
folder=$RUNNER_TEMP/memfold-$MEMFOLD_VERSION
mkdir -p "$folder"
# Verified before it takes the place of one that an earlier step has installed.
download=$(mktemp -p "$folder")
trap 'rm -f "$download"' EXIT
curl --fail --silent --show-error --location --retry 3 --output "$download" "$from/memfold" \
    || fail "cannot download $from/memfold"
if [[ -z "${MEMFOLD_SHA256:-}" ]]; then
    sums=$(curl --fail --silent --show-error --location --retry 3 "$from/SHA256SUMS") \
        || fail "cannot download $from/SHA256SUMS"
    MEMFOLD_SHA256=$(awk '$2 == "memfold" { print $1 }' <<< "$sums")
fi
found=$(sha256sum "$download" | cut -d ' ' -f 1)
[[ $found == "$MEMFOLD_SHA256" ]] || fail "$from/memfold has the checksum $found, not ${MEMFOLD_SHA256:-any}"
chmod 755 "$download"
mv -f "$download" "$folder/memfold"
echo "$folder" >> "$GITHUB_PATH"

# On a runner of one's own the user may have the permission already, or need none: kernels before Linux 6.1 have no such
# device, and root needs it less. What is missing then, the doctor says.
device=/dev/userfaultfd
if [[ -e $device && ! (-r $device && -w $device) ]]; then
    sudo chown "$(id -u)" "$device" || echo "memfold: cannot give $device to $(id -un)"
fi
"$folder/memfold" doctor || fail "this runner does not let memfold run programs; the lines above say why"
