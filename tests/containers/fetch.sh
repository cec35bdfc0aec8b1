#!/bin/sh
# Unpacks what containers are tested with, as Debian packages it, into a folder: the seccomp profile of containers-common,
# usr/share/containers/seccomp.json there; by `fetch.sh FOLDER engines` Docker and containerd, too, with what they need.
# Nothing is installed.
set -eu
folder="$1"
mkdir -p "$folder"
cd "$folder"
unpack() {
    apt-get download -qq "$@"
    for package in *.deb; do
        dpkg -x "$package" .
    done
    rm ./*.deb
}
[ -f usr/share/containers/seccomp.json ] || unpack golang-github-containers-common
if [ "${2:-}" = engines ] && [ ! -e engines ]; then
    # Debian 13 has Docker's client apart.
    client="$(apt-cache pkgnames docker-cli | grep -x docker-cli || true)"
    unpack docker.io containerd runc libdevmapper1.02.1 ${client:+"$client"}
    touch engines
fi
