# In a machine of run.sh: memfold run, with programs that verify their pages, forks, and Redis, which saves in the
# background; with SHORT, only the first. memfold, verify, forktree, torture, redis-server and redis-cli are programs;
# held.sh runs it.
failed() {
    echo "FAILED: $*"
    cat /tmp/said
    exit 1
}
ip link set lo up
uname -r
memfold doctor > /tmp/said || failed doctor
case "$(uname -r)" in
    5.*|6.[0-7].*) way='userfaultfd-move.*mremap' ;;
    *) way='userfaultfd-move.*a page was moved' ;;
esac
grep "$way" /tmp/said || failed "doctor does not say how pages are taken away"

memfold run --limit 16M -v -- verify 24 2 /tmp/result 2> /tmp/said || failed "verify: $?"
# By emulation, pages are used faster than they can be taken away: the limit may be exceeded.
: "${MEMFOLD_TRACK_ACCESSES:=}"
[ -z "$MEMFOLD_TRACK_ACCESSES" ] || ! grep "track-accesses has no effect" /tmp/said || failed "accesses are not tracked"
grep "verify needed .* and ran in 1[0-9]" /tmp/said || failed "verify was not paged out"
[ ! -s /tmp/result ] || failed "a page was wrong"

[ -z "$SHORT" ] || exit 0

memfold run --limit 32M -v -- forktree 4 2> /tmp/said || failed "forktree: $?"
tail -n 2 /tmp/said
memfold run --limit 24M -v -- torture --seconds "${SECONDS_OF_TORTURE:-20}" --megabytes 24 --threads 2 2> /tmp/said ||
    failed "torture: $?"
tail -n 3 /tmp/said

memfold run --limit 16M --stats /tmp/stats -v -- redis-server --port 7000 --save "" --dir /tmp \
    --enable-debug-command yes > /tmp/redis 2> /tmp/said &
server=$!
ask() { redis-cli -p 7000 "$@"; }
for _ in $(seq 120); do
    [ "$(ask ping 2> /dev/null)" != PONG ] || break
    sleep 1
done
ask debug populate 9000 key 1000 || failed "Redis takes no keys"
before="$(ask debug digest)"
ask bgsave
for _ in $(seq 240); do
    ask info persistence | grep -q rdb_bgsave_in_progress:1 || break
    sleep 1
done
ask info persistence | grep rdb_last_bgsave_status:ok || failed "the background save"
after="$(ask debug digest)"
[ "$before" = "$after" ] && [ ${#before} -ge 40 ] || failed "keys changed: $before $after"
# What was saved is what is there.
ask debug reload || failed "what was saved cannot be loaded"
[ "$before" = "$(ask debug digest)" ] || failed "what was saved differs"
ask shutdown nosave
wait $server || failed "Redis: $?"
tail -n 2 /tmp/said
echo "Redis kept its keys"
