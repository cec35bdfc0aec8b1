#!/bin/bash
# Writes the root filesystem of an image as a tar archive to the standard output: image.sh FOLDER FILE..., with busybox, a
# user root, and these programs in /usr/bin with their libraries. FOLDER is made and removed again.
set -eu
root="$1"
shift
mkdir -p "$root/usr/bin" "$root/etc" "$root/run" "$root/tmp" "$root/proc" "$root/sys" "$root/dev"
chmod 1777 "$root/tmp"
ln -s usr/bin "$root/bin"
echo 'root:x:0:0::/root:/bin/sh' > "$root/etc/passwd"
cp "$(command -v busybox)" "$root/usr/bin/busybox"
for name in sh cat grep id ls mkdir rm sed seq sleep sort true; do
    ln -s busybox "$root/usr/bin/$name"
done
for file in "$@"; do
    # The last one of a name counts: a program is not replaced by an applet.
    cp -L --remove-destination "$file" "$root/usr/bin/"
    for library in $(ldd "$file" 2> /dev/null | grep -o '/[^ ]*'); do
        mkdir -p "$root${library%/*}"
        cp -L "$library" "$root$library"
    done
done
tar -C "$root" --owner=0 --group=0 -c .
rm -rf "$root"
