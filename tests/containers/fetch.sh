#!/bin/sh
# Unpacks the seccomp profile of containers-common, as Debian packages it, into a folder: usr/share/containers/seccomp.json
# there. Nothing is installed.
set -eu
folder="$1"
mkdir -p "$folder"
cd "$folder"
[ -f usr/share/containers/seccomp.json ] && exit
apt-get download -qq golang-github-containers-common
dpkg -x golang-github-containers-common_*.deb .
rm golang-github-containers-common_*.deb
