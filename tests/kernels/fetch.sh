#!/bin/bash
# Downloads a kernel of this machine's distribution and unpacks it, without installing it:
# tests/kernels/fetch.sh FOLDER [PACKAGE]
#
# PACKAGE is an image, or what depends on the newest one: by default linux-image-amd64 (Debian) or
# linux-image-virtual (Ubuntu). Prints the folder with boot/ and lib/modules/, below FOLDER, for run.sh.
# What is there already is used again.
set -euo pipefail
folder="$(realpath -m "${1:?the folder to keep kernels in}")"
package="${2:-}"
if [[ -z "$package" ]]; then
    package=linux-image-amd64
    apt-cache show "$package" > /dev/null 2>&1 || package=linux-image-virtual
fi

# The packages of this name pattern that one depends on, without versions.
needs() {
    apt-cache depends --no-recommends --no-suggests "$1" | sed -n "s/^ *Depends: \($2.*\)/\1/p"
}

image="$package"
[[ "$image" =~ ^linux-image-[0-9] ]] || image="$(needs "$package" 'linux-image-[0-9]' | head -n 1)"
[[ -n "$image" ]] || { echo "fetch.sh: $package names no kernel; run apt-get update" >&2; exit 1; }
kernel="$folder/$image"
if [[ ! -e "$kernel/complete" ]]; then
    rm -rf "$kernel"
    mkdir -p "$kernel"
    packages=("$image")
    mapfile -t -O 1 packages < <(needs "$image" 'linux-modules-[0-9]')
    (cd "$kernel" && apt-get download -q "${packages[@]}" >&2)
    for file in "$kernel"/*.deb; do
        dpkg-deb --extract "$file" "$kernel"
        rm "$file"
    done
    # Where /lib is /usr/lib.
    [[ -d "$kernel/lib/modules" ]] || mv "$kernel/usr/lib" "$kernel/lib"
    version="$(basename "$kernel"/lib/modules/*)"
    busybox depmod -b "$kernel" "$version"
    touch "$kernel/complete"
fi
echo "$kernel"
