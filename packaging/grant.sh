# shellcheck shell=sh
# After installation: makes the group, and has udev give it the device.
getent group memfold > /dev/null || groupadd --system memfold
if [ -e /run/udev/control ]; then
    udevadm control --reload
    udevadm trigger --action=change --subsystem-match=misc --sysname-match=userfaultfd
fi
