# In a machine of run.sh, with --host-root: memfold's end-to-end tests, as they were built on the other machine, with its
# compiler, Redis and all else. TESTS is their program, BINARY memfold's, FOLDER the crate's, FILTER names those that
# run (all if empty), CGROUPS=2 gives them version 2 of cgroups, and with CI=true none may be skipped. Without TESTS: what
# `doctor` and `run` say.
uname -r
[ -z "$CGROUPS" ] || mount -t cgroup2 cgroup2 /host/sys/fs/cgroup || exit 1
# Written to, they are in memory: the other machine may build them anew.
for file in "$TESTS" "$BINARY"; do
    [ -z "$file" ] || touch "/host/$file"
done
if [ -z "$TESTS" ]; then
    chroot /host "$BINARY" doctor --json
    echo "doctor: $?"
    chroot /host "$BINARY" run --limit 64M -- /bin/true
    echo "run: $?"
    exit 0
fi
cat > /host/tmp/tests <<END
cd "$FOLDER"
ulimit -n "\$(ulimit -Hn)"
export MEMFOLD_TEST_ROUNDS=1 MEMFOLD_TEST_PATIENCE="${EMULATED:+10}" CARGO_MANIFEST_DIR="$FOLDER"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec "$TESTS" --test-threads 1 --include-ignored $FILTER
END
chroot /host /bin/bash /tmp/tests
