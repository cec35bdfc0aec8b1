# In a machine of run.sh: what memfold must do on every architecture. Programs of architecture.sh are in /bin; what is
# too slow by emulation (millions of pages) is not here.
failed() {
    echo "FAILED: $*"
    exit 1
}
# What memfold says of a process that it does not manage.
UNMANAGED='runs unmanaged\|is not under the limit\|process.* not under the limit'
ip link set lo up
memfold doctor || failed doctor
for program in verify verify-static; do
    memfold run --limit 16M -v -- "$program" 24 2 /tmp/result 2> /tmp/said || failed "$program: $?"
    cat /tmp/said
    # It was under the limit, and the limit took effect.
    grep -q "$program needed .*the limit of 16.0 MiB was kept" /tmp/said || failed "$program was not paged out"
    ! grep -q "$UNMANAGED" /tmp/said || failed "$program was not under the limit"
done
[ ! -s /tmp/result ] || failed "a page was wrong"

memfold run --limit 32M -v -- forktree 8 2> /tmp/said || failed "forktree: $?"
cat /tmp/said
! grep -q "$UNMANAGED" /tmp/said || failed "a fork was not under the limit"

memfold run --limit 24M -v -- torture --seconds "$SECONDS_OF_TORTURE" --megabytes 24 --threads 2 || failed "torture: $?"

# Programs that run already. A sleep goes on for what is left of it.
attach() {
    memfold attach --limit 16M -v "$1" 2> "/tmp/attached-$1" &
    tries=0
    until grep -qx memfold "/proc/$1/task/"*/comm; do
        tries=$((tries + 1))
        [ $tries -lt 60 ] || { cat "/tmp/attached-$1"; failed "no helper was attached"; }
        sleep 1
    done
}
verify 24 0 /tmp/result > /tmp/rounds &
victim=$!
began=$(cut -d. -f1 /proc/uptime)
sleep 20 &
sleeper=$!
attach $sleeper
attach $victim
wait $sleeper || failed "the sleep ended with $?"
slept=$(($(cut -d. -f1 /proc/uptime) - began))
echo "slept $slept s"
[ $slept -ge 19 ] && [ $slept -le 35 ] || failed "a sleep of 20 s took $slept s"
memfold stat
memfold detach $victim || failed "detach: $?"
rounds=$(wc -c < /tmp/rounds)
until [ "$(wc -c < /tmp/rounds)" -gt $((rounds + 1)) ]; do sleep 1; done
kill $victim || failed "the program did not run on"
[ ! -s /tmp/result ] || failed "a page was wrong after attaching"
cat /tmp/attached-*
echo "verify made $rounds rounds, attached"

# The library: faults in the thread itself, by a thread, and by protection. Then what it is built of.
for tests in /tests/*; do
    filter=
    case "$tests" in
        */memfold_sys) filter="tracee:: signal:: abi:: thread:: hello:: probe:: fork:: memory::" ;;
        */regions) filter="pages_survive_being pages_are_counted untouched_ what_is_mapped bad_requests system_calls several_limits" ;;
    esac
    # shellcheck disable=SC2086
    MEMFOLD_TEST_PATIENCE=10 "$tests" --test-threads 2 $filter > /tmp/said 2>&1 || { cat /tmp/said; failed "$tests"; }
    grep 'test result' /tmp/said
done
