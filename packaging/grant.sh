# shellcheck shell=sh
# After installation: makes the group, and has udev give it the device.
getent group memfold > /dev/null || groupadd --system memfold
# In a container udev may be absent, or may not ask the kernel.
if [ -e /run/udev/control ] && ! { udevadm control --reload \
    && udevadm trigger --action=change --subsystem-match=misc --sysname-match=userfaultfd; }; then
    echo "memfold: udev could not give /dev/userfaultfd to the group memfold; after a boot, or on the container's host," \
        "it may: memfold doctor" >&2
fi
