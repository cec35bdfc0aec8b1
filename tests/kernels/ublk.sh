# In a machine of run.sh whose kernel has ublk: memfold serve --ublk, with a file system on its block device,
# and then, with MEBIBYTES, swap for swap.sh's program. The machine's own memory holds the disk, too.
set -e
# What the disk is kept in must not be swapped out to the disk.
mkdir -p /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/memfold
echo 0 > /sys/fs/cgroup/memfold/memory.swap.max
(echo 0 > /sys/fs/cgroup/memfold/cgroup.procs && exec memfold serve --ublk --size 512M --limit "${LIMIT:-64M}" --stats /tmp/stats 2> /tmp/said) &
server=$!
for _ in $(seq 100); do
    [ -b /dev/ublkb0 ] && break
    sleep 0.1
done
cat /tmp/said
cat /sys/block/ublkb0/queue/rotational /sys/block/ublkb0/queue/discard_max_bytes
mkfs.ext4 -q -F /dev/ublkb0
mount -t ext4 /dev/ublkb0 /mnt
dd if=/dev/urandom of=/mnt/noise bs=64k count=160 2> /dev/null
yes "memfold" | dd of=/mnt/text bs=64k count=160 iflag=fullblock 2> /dev/null
(cd /mnt && sha256sum noise text > /tmp/sums)
umount /mnt
mount -t ext4 /dev/ublkb0 /mnt
(cd /mnt && sha256sum -c /tmp/sums)
rm /mnt/noise
fstrim -v /mnt
umount /mnt
e2fsck -f -n /dev/ublkb0
[ -z "$MEBIBYTES" ] || DEVICE=ublkb0 sh /swap.sh
kill $server
wait $server
[ ! -e /dev/ublkb0 ]
cat /tmp/stats
