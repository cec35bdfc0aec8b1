# shellcheck shell=sh
# After removal: takes the device back, as no rule does any more. A group that is made later may get the
# same number.
if [ "$(stat --format %G /dev/userfaultfd 2> /dev/null)" = memfold ]; then
    chgrp root /dev/userfaultfd
    chmod 600 /dev/userfaultfd
fi
if [ -e /run/udev/control ]; then
    udevadm control --reload || echo "memfold: udev has not read its rules again; it does at the next boot" >&2
fi
# Folders of root's runs, which stay when a run has ended, and are empty then.
for folder in /run/memfold /var/lib/memfold /usr/local/lib/memfold; do
    [ ! -d "$folder" ] || rmdir --ignore-fail-on-non-empty "$folder"
done
