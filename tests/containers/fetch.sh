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
[ "${2:-}" != engines ] || [ -x usr/sbin/dockerd ] || unpack docker.io containerd runc libdevmapper1.02.1
