#!/bin/bash
# Downloads a kernel of this machine's distribution and unpacks it, without installing it:
# tests/kernels/fetch.sh [[--ubuntu] --suite SUITE [--arch ARCH]] FOLDER [PACKAGE]
#
# SUITE is another one of Debian's, such as bookworm-backports, or with --ubuntu of Ubuntu's, such as focal-updates; this
# machine's own sources stay as they are. ARCH is Debian's name of an architecture, by default amd64; of another one
# busybox comes along. PACKAGE is an image, or what depends on the newest one: by default linux-image-ARCH (Debian) or
# linux-image-virtual (Ubuntu). Prints the folder with boot/ and lib/modules/, below FOLDER, for run.sh. What is there
# already is used again.
set -euo pipefail
# Of the package of Ubuntu 22.04 with the keys of its archive.
UBUNTU_KEYRING=0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f
suite= arch=amd64 distribution=debian archive=http://deb.debian.org/debian
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --ubuntu) distribution=ubuntu archive=http://archive.ubuntu.com/ubuntu; shift; continue ;;
        --suite) suite="${2:?a suite}" ;;
        --arch) arch="${2:?an architecture of Debian}" ;;
        *) echo "fetch.sh: unknown option $1" >&2; exit 1 ;;
    esac
    shift 2
done
[[ -n "$suite" || "$arch" == amd64 ]] || { echo "fetch.sh: --arch needs --suite" >&2; exit 1; }
folder="$(realpath -m "${1:?the folder to keep kernels in}")"
package="${2:-}"
if [[ -n "$suite" ]]; then
    lists="$folder/apt/$distribution-$suite-$arch"
    mkdir -p "$lists"/{lists,cache/archives}/partial
    keys="/usr/share/keyrings/$distribution-archive-keyring.gpg"
    if [[ "$distribution" == ubuntu && ! -e "$keys" ]]; then
        # No package of Debian's has them.
        deb="$folder/apt/ubuntu-keyring.deb" keys="$folder/apt/ubuntu/usr/share/keyrings/ubuntu-archive-keyring.gpg"
        if [[ ! -e "$keys" ]]; then
            curl -sSf -o "$deb" "$archive/pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb"
            echo "$UBUNTU_KEYRING $deb" | sha256sum --check --quiet >&2
            dpkg-deb --extract "$deb" "$folder/apt/ubuntu"
        fi
    fi
    [[ -e "$keys" ]] || { echo "fetch.sh: $keys is missing; install $distribution-archive-keyring" >&2; exit 1; }
    # Backports have not all that they are installed beside.
    for one in "$suite" "${suite%-backports}"; do
        echo "deb [arch=$arch signed-by=$keys] $archive $one main"
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
    # Newer packages have the kernel itself beside its modules, and their lists in a third package.
    mapfile -t -O 1 packages < <(needs "$image" 'linux-\(base\|binary\|modules\)-[0-9]')
    [[ "$arch" == amd64 ]] || packages+=(busybox-static)
    (cd "$kernel" && apt-get download -q "${packages[@]}" >&2)
    for file in "$kernel"/*.deb; do
        dpkg-deb --extract "$file" "$kernel"
        rm "$file"
    done
    # Where /lib is /usr/lib.
    [[ -d "$kernel/lib/modules" ]] || mv "$kernel/usr/lib" "$kernel/lib"
    version="$(basename "$kernel"/lib/modules/*)"
    [[ ! -e "$kernel/lib/modules/$version/vmlinuz" ]] || install -D -m 644 "$kernel/lib/modules/$version/vmlinuz" \
        "$kernel/boot/vmlinuz-$version"
    # Of these busybox reads nothing, so no module would need another one.
    find "$kernel/lib/modules" -name '*.ko.zst' -exec zstd -dq --rm {} +
    busybox depmod -b "$kernel" "$version"
    touch "$kernel/complete"
fi
echo "$kernel"
