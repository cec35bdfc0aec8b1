#!/bin/bash
# PostgreSQL's own regression tests (217 of version 15) with a server of their own, for beside-zram.sh:
#   crates/cli/benches/postgres-regress.sh prepare FOLDER
#   crates/cli/benches/beside-zram.sh 100 5 crates/cli/benches/postgres-regress.sh run FOLDER
# Needs root, as the server runs as the user postgres, a C compiler, and Debian's packages postgresql-15 and
# postgresql-server-dev-15. Fails if a test does.
set -euo pipefail
action="$1" folder="$(realpath -m "$2")"
version="${POSTGRES_VERSION:-15}"
installed="/usr/lib/postgresql/$version"

if [[ "$action" == prepare ]]; then
    release="$("$installed/bin/postgres" --version | grep -oE '[0-9]+\.[0-9]+' | head -1)"
    mkdir -p "$folder"
    curl -fsS "http://deb.debian.org/debian/pool/main/p/postgresql-$version/postgresql-${version}_$release.orig.tar.bz2" \
        | tar -xj -C "$folder" --strip-components=1 --wildcards '*/src/test/regress/*' '*/src/include/*'
    cd "$folder/src/test/regress"
    include="${POSTGRES_INCLUDE:-/usr/include/postgresql}"
    cc -O2 -w -fPIC -shared -I../../include "-I$include/$version/server" "-I$include/internal" -o regress.so regress.c
    ln -s "$installed"/lib/{refint,autoinc}.so .
    chown -R postgres: "$folder"
    exit
fi
cd "$folder/src/test/regress"
rm -rf "$folder/instance" "$folder/output"
mkdir "$folder/output"
chown postgres: "$folder/output" "$folder"
exec setpriv --reuid postgres --regid postgres --clear-groups \
    "$installed/lib/pgxs/src/test/regress/pg_regress" --inputdir=. --dlpath=. --outputdir="$folder/output" \
    --temp-instance="$folder/instance" --bindir="$installed/bin" --schedule=parallel_schedule
