#!/bin/bash
# Downloads a kernel of this machine's distribution and unpacks it, without installing it:
# tests/kernels/fetch.sh [--suite SUITE [--arch ARCH]] FOLDER [PACKAGE]
#
# SUITE is another one of Debian's, such as bookworm-backports; this machine's own sources stay as they are. ARCH is
# Debian's name of an architecture, by default amd64; of another one busybox comes along. PACKAGE is an image, or what
# depends on the newest one: by default linux-image-ARCH (Debian) or linux-image-virtual (Ubuntu). Prints the folder with
# boot/ and lib/modules/, below FOLDER, for run.sh. What is there already is used again.
set -euo pipefail
suite= arch=amd64
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --suite) suite="${2:?a suite of Debian}" ;;
        --arch) arch="${2:?an architecture of Debian}" ;;
        *) echo "fetch.sh: unknown option $1" >&2; exit 1 ;;
    esac
    shift 2
done
[[ -n "$suite" || "$arch" == amd64 ]] || { echo "fetch.sh: --arch needs --suite" >&2; exit 1; }
folder="$(realpath -m "${1:?the folder to keep kernels in}")"
package="${2:-}"
if [[ -n "$suite" ]]; then
    lists="$folder/apt/$suite-$arch"
    mkdir -p "$lists"/{lists,cache/archives}/partial
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [[ -e "$keys" ]] || { echo "fetch.sh: $keys is missing; install debian-archive-keyring" >&2; exit 1; }
    # Backports have not all that they are installed beside.
    for one in "$suite" "${suite%-backports}"; do
        echo "deb [arch=$arch signed-by=$keys] http://deb.debian.org/debian $one main"
    done | uniq > "$lists/list"
    cat > "$lists/configuration" <<END
Dir::Etc::sourcelist "$lists/list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$lists/lists";
Dir::Cache "$lists/cache";
APT::Default-Release "$suite";
APT::Architecture "$arch";
APT::Architectures { "$arch"; };
END
    export APT_CONFIG="$lists/configuration"
    package="${package:-linux-image-$arch}"
    apt-cache show "$package" > /dev/null 2>&1 || apt-get update -qq >&2
fi
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
    [[ "$arch" == amd64 ]] || packages+=(busybox-static)
    (cd "$kernel" && apt-get download -q "${packages[@]}" >&2)
    for file in "$kernel"/*.deb; do
        dpkg-deb --extract "$file" "$kernel"
        rm "$file"
    done
    # Where /lib is /usr/lib.
    [[ -d "$kernel/lib/modules" ]] || mv "$kernel/usr/lib" "$kernel/lib"
    # Of these busybox reads nothing, so no module would need another one.
    find "$kernel/lib/modules" -name '*.ko.zst' -exec zstd -dq --rm {} +
    version="$(basename "$kernel"/lib/modules/*)"
    busybox depmod -b "$kernel" "$version"
    touch "$kernel/complete"
fi
echo "$kernel"
