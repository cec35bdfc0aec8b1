# In a machine of run.sh: a program that fills MEBIBYTES of memory and checks them, in ROUNDS rounds, with
# swap on DEVICE (vda, or zram0 with SWAP_MEBIBYTES). Prints name and value, a line each.
set -e
if [ "$DEVICE" = zram0 ]; then
    echo "${ALGORITHM:-lz4}" > /sys/block/zram0/comp_algorithm
    echo "${SWAP_MEBIBYTES}M" > /sys/block/zram0/disksize
fi
# A virtio disk counts as rotational, and Linux discards freed swap slots on other disks only.
echo 0 > "/sys/block/$DEVICE/queue/rotational"
mkswap "/dev/$DEVICE" > /dev/null
swapon -d "/dev/$DEVICE"
cat /proc/swaps
/swapped "$MEBIBYTES" "$ROUNDS" "${SEED:-1}"
grep -E '^pswp(in|out) ' /proc/vmstat
if [ "$DEVICE" = zram0 ]; then
    echo "zram_peak_bytes $(awk '{ print $5 }' /sys/block/zram0/mm_stat)"
fi
# What is discarded is freed in the background.
sleep 1
swapoff "/dev/$DEVICE"
echo "swapoff done"
