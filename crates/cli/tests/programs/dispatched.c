/* A thread whose system calls the kernel dispatches to the program, as those of Windows programs under Wine.
 *
 *   dispatched blocks    runs for two seconds, in which no system call of its own is allowed, and makes one then
 *   dispatched allows    sleeps meanwhile, and until it has a helper, as calls are allowed just then
 *
 * One line on stdout. */
#define _GNU_SOURCE
#include "has_helper.h"
#include "stamp.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#endif

enum { ALLOW, BLOCK, PAGES = 2048 };

static volatile char selector = ALLOW;
static volatile int dispatched;

static void on_call(int signal)
{
    (void)signal;
    selector = ALLOW;
    dispatched++;
}

int main(int count, char **arguments)
{
    if (count < 2)
        return 2;
    int blocks = !strcmp(arguments[1], "blocks");
    signal(SIGSYS, on_call);
    uint64_t *memory = map_pages(PAGES);
    if (prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0, 0, &selector)) {
        say("MISMATCH the kernel dispatches nothing\n");
        return 1;
    }
    selector = blocks ? BLOCK : ALLOW;
    stamp_pages(memory, 0, PAGES, 1);
    if (blocks) {
        for (double began = seconds_now(); seconds_now() - began < 2;)
            continue;
    } else {
        int wait = 0;
        do
            sleep(2);
        while (++wait < MOST_WAITS && !has_helper());
    }
    selector = BLOCK;
    syscall(SYS_getppid);
    if (dispatched != 1) {
        say("MISMATCH %d calls were dispatched\n", dispatched);
        return 1;
    }
    verify_pages("dispatched", memory, 0, PAGES, 1);
    say("%s ok\n", arguments[1]);
    return 0;
}
