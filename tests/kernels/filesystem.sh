# In a machine of run.sh: a file system on /dev/vda. STEP is `fill` (made, filled, half of it deleted),
# or `trim` (what is left is checked, and what is free discarded).
set -e
sums() { (cd /mnt && sha256sum -c /mnt/sums > /tmp/checked) || { cat /tmp/checked; exit 1; }; }
case "$STEP" in
    fill)
        mkfs.ext4 -q -F /dev/vda
        mount -t ext4 /dev/vda /mnt
        mkdir /mnt/keep /mnt/delete
        i=0
        while [ $i -lt "$FILES" ]; do
            for folder in keep delete; do
                # A MiB that does not compress, and half a MiB of text.
                dd if=/dev/urandom of=/mnt/$folder/noise$i bs=64k count=16 2> /dev/null
                yes "$folder $i" | dd of=/mnt/$folder/text$i bs=64k count=8 iflag=fullblock 2> /dev/null
            done
            i=$((i + 1))
        done
        (cd /mnt && find . -type f ! -name sums | sort | xargs sha256sum > sums)
        umount /mnt
        mount -t ext4 /dev/vda /mnt
        sums
        rm -r /mnt/delete
        sed -i '/delete/d' /mnt/sums
        ;;
    trim)
        mount -t ext4 /dev/vda /mnt
        sums
        fstrim -v /mnt
        sums
        ;;
esac
umount /mnt
e2fsck -f -n /dev/vda
mount -t ext4 -o ro /dev/vda /mnt
sums
wc -l < /mnt/sums
umount /mnt
