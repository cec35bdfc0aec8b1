#!/bin/sh
# Runs the library inside other languages' run times: run.sh go|jvm
# Needs a C compiler, pkg-config, and go (1.20 or later) or a JDK (17 or later).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$here/../install.sh" "$work"
export PKG_CONFIG_PATH="$work/lib/pkgconfig" LD_LIBRARY_PATH="$work/lib"
case ${1:-} in
go)
    cd "$here/go"
    go build -o "$work/host" .
    "$work/host"
    ;;
jvm)
    java_home=$(dirname "$(dirname "$(readlink -f "$(command -v javac)")")")
    javac -d "$work" "$here/jvm/Host.java"
    cc -shared -fPIC -O2 -I"$java_home/include" -I"$java_home/include/linux" \
        $(pkg-config --cflags memfold) "$here/jvm/host.c" \
        $(pkg-config --libs memfold) -o "$work/libhost.so"
    java -cp "$work" Host "$work/libhost.so"
    ;;
*)
    echo "usage: run.sh go|jvm" >&2
    exit 2
    ;;
esac
