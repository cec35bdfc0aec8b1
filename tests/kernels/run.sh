#!/bin/bash
# Boots a kernel in a virtual machine and runs a script there:
#
#   tests/kernels/run.sh [OPTION]... KERNEL SCRIPT [QEMU_ARGUMENT]...
#
# KERNEL is a folder with boot/vmlinuz-* and lib/modules/, as fetch.sh makes it. SCRIPT runs as root in
# an initramfs with busybox. Its output is printed, and its exit status is this one's; 124 if it takes too
# long, 125 if the machine cannot be started or ends without a status (the kernel's messages follow).
#
#   --arch ARCH        Debian's name of the kernel's architecture, of which programs are, too: amd64, arm64  [amd64]
#   --memory SIZE      of the machine, as QEMU has it                         [128M]
#   --cpus N           of the machine                     [2; by emulation, 1]
#   --seconds N        longest time, four times as long without KVM            [60]
#   --module NAME      load it, with what it needs, before the script (repeatable)
#   --program PATH     copy a program of this machine with its libraries to /bin (repeatable)
#   --file PATH        copy a file to / (repeatable)
#   --folder PATH      copy a folder with all that is in it to / (repeatable)
#   --set NAME=VALUE   an environment variable of the script (repeatable)
#   --host-root        (amd64 only) this machine's files, all of them, below /host: what the script writes there is in memory
#   --quiet-kernel     do not print the kernel's messages when the machine ends without a status
#
# Runs by emulation where KVM cannot be used. Needs qemu-system-x86, busybox and cpio; for arm64 qemu-system-arm, and
# for programs with libraries libc6-dev-arm64-cross.
set -euo pipefail
here="$(dirname "$(realpath "$0")")"
memory=128M cpus= seconds=60 quiet= arch=amd64
host=()
modules=() programs=() files=() folders=() variables=()
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --arch) arch="$2" ;;
        --memory) memory="$2" ;;
        --cpus) cpus="$2" ;;
        --seconds) seconds="$2" ;;
        --module) modules+=("$2") ;;
        --program) programs+=("$2") ;;
        --file) files+=("$2") ;;
        --folder) folders+=("$2") ;;
        --set) variables+=("$2") ;;
        --quiet-kernel) quiet=1; shift; continue ;;
        --host-root)
            modules+=(virtio_pci 9pnet_virtio 9p overlay)
            variables+=(HOST_ROOT=1)
            host=(-fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap
                -device virtio-9p-pci,fsdev=host,mount_tag=host)
            shift
            continue
            ;;
        *) echo "run.sh: unknown option $1" >&2; exit 125 ;;
    esac
    shift 2
done
kernel="$(realpath "${1:?the folder of a kernel}")"
script="${2:?the script}"
shift 2

failed() {
    echo "run.sh: $*" >&2
    exit 125
}
# The machine's firmware tells the kernel of the serial ports, in this order; the second one takes the script's output.
case "$arch" in
    amd64) qemu=(qemu-system-x86_64) console=ttyS0 output=ttyS1 port=isa-serial ;;
    arm64) qemu=(qemu-system-aarch64 -M virt) console=ttyAMA0 output=ttyS0 port=pci-serial ;;
    *) failed "no machine is known of the architecture $arch" ;;
esac
# The folder of another architecture's libraries.
own="$(dpkg --print-architecture)" libraries=
[[ "$arch" == "$own" ]] || libraries=/usr/aarch64-linux-gnu
for tool in "${qemu[0]}" busybox cpio; do
    command -v "$tool" > /dev/null || failed "$tool is missing"
done
image="$(echo "$kernel"/boot/vmlinuz-*)"
[[ -e "$image" ]] || failed "$kernel has no boot/vmlinuz-*; see fetch.sh"
tree="$(echo "$kernel"/lib/modules/*)"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
root="$work/root"
mkdir -p "$root"/{bin,dev,proc,sys,modules,lib64}
cp "$here/init" "$root/init"
cp "$script" "$root/script"
chmod +x "$root/init"
for file in ${files[@]+"${files[@]}"}; do cp "$file" "$root/"; done
for folder in ${folders[@]+"${folders[@]}"}; do cp -r "$folder" "$root/"; done

# The libraries that a program names, and the loader, whose path is absolute.
needed() {
    if [[ -z "$libraries" ]]; then
        ldd "$1" 2> /dev/null | grep -o '/[^ ]*'
        return
    fi
    readelf --program-headers --dynamic --wide "$1" |
        sed -n 's|.*program interpreter: /lib/\(.*\)\]|\1|p; s|.*(NEEDED).*\[\(.*\)\]|\1|p' | sed 's|^|/lib/|'
}
busybox=busybox
[[ ! -e "$kernel/bin/busybox" ]] || busybox="$kernel/bin/busybox"
for program in "$busybox" ${programs[@]+"${programs[@]}"}; do
    found="$(command -v "$program")" || failed "$program is missing"
    cp -L "$found" "$root/bin/"
    while read -r library; do
        mkdir -p "$root/$(dirname "$library")"
        cp -L "$libraries$library" "$root/$library"
    done < <(needed "$found")
done

# The modules that one needs first, then itself, each once. What is built in needs none.
: > "$root/modules/order"
with_needs() {
    local name="${1//-/_}" line file
    line="$(sed 's/-/_/g; s/\.ko[^: ]*//g' "$tree/modules.dep" | grep -n -m 1 -E "(^|/)$name:" | cut -d: -f1 || true)"
    if [[ -z "$line" ]]; then
        # (`grep -q` would end before `sed` has written everything, which fails then.)
        sed 's/-/_/g' "$tree/modules.builtin" | grep "/$name.ko$" > /dev/null || failed "this kernel has no module $1"
        return
    fi
    # modules.dep names what is to be loaded last first.
    for file in $(sed -n "${line}s/://p" "$tree/modules.dep" | tr ' ' '\n' | tac); do
        local plain
        plain="$(basename "$file")"
        plain="${plain%.xz}" plain="${plain%.zst}" plain="${plain%.gz}"
        grep -qx "$plain" "$root/modules/order" && continue
        echo "$plain" >> "$root/modules/order"
        case "$file" in
            *.xz) xz -dc "$tree/$file" ;;
            *.zst) zstd -dcq "$tree/$file" ;;
            *.gz) gzip -dc "$tree/$file" ;;
            *) cat "$tree/$file" ;;
        esac > "$root/modules/$plain"
    done
}
for module in ${modules[@]+"${modules[@]}"}; do with_needs "$module"; done

# Nothing that the script prints can be taken for its status.
mark="status-$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
{
    echo "MARK=$mark"
    for variable in ${variables[@]+"${variables[@]}"}; do
        printf 'export %s=%q\n' "${variable%%=*}" "${variable#*=}"
    done
} > "$root/environment"
# Without the processor's own virtualization (as in some virtual machines), KVM runs no kernel but its own.
if [[ "$arch" == "$own" && -r /dev/kvm && -w /dev/kvm ]] &&
    { [[ "$arch" == arm64 ]] || grep -qwE 'vmx|svm' /proc/cpuinfo; }; then
    accelerator=(-accel kvm -cpu host)
    timers=
else
    accelerator=(-accel tcg -cpu max)
    # (The signatures of pointers as the architecture has them take most of the time.)
    [[ "$arch" != arm64 ]] || accelerator=(-accel tcg -cpu max,pauth-impdef=on)
    # On a busy host a machine with two processors, or with timers of nanoseconds, does nothing else than to
    # serve their interrupts.
    cpus="${cpus:-1}" timers=" highres=off"
    seconds=$((4 * seconds))
    echo "export EMULATED=1" >> "$root/environment"
    echo "run.sh: by emulation, as KVM cannot be used here" >&2
fi
(cd "$root" && find . | cpio --quiet -o -H newc -R 0:0) > "$work/initramfs"
status=0
timeout "$seconds" "${qemu[@]}" -nodefaults -no-user-config -display none -no-reboot \
    "${accelerator[@]}" -m "$memory" -smp "${cpus:-2}" -kernel "$image" -initrd "$work/initramfs" \
    -append "console=$console OUTPUT=/dev/$output panic=-1 loglevel=5$timers" \
    -serial "file:$work/kernel" -chardev "file,id=output,path=$work/output" -device "$port,chardev=output" ${host[@]+"${host[@]}"} "$@" &
machine=$!
# The machine goes with this.
trap 'kill "$machine" 2> /dev/null || true; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT
wait "$machine" || status=$?
touch "$work/output" "$work/kernel"
grep -v "^$mark " "$work/output" || true
((status != 124)) || { echo "run.sh: not done after $seconds s" >&2; tail -n 20 "$work/kernel" >&2; exit 124; }
result="$(sed -n "s/^$mark \([0-9]*\)$/\1/p" "$work/output")"
if [[ -z "$result" ]]; then
    [[ -n "$quiet" ]] || tail -n 40 "$work/kernel" >&2
    failed "the machine ended without a status (QEMU's: $status)"
fi
exit "$result"
