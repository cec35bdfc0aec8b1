/* A forked child that touches nothing of what it inherits until it is told to, so that nobody has seen it by then. It runs
 * on memory that is shared, which memfold does not manage, and makes no system call but a read.
 *
 *   unseen MEGABYTES FILE [orphan]
 *
 * Half of the MEGABYTES is wiped at forks (MADV_WIPEONFORK). Once FILE exists the program forks and says "forked". With
 * "orphan" the child's parent has ended by then. When its standard input ends, the child reads both halves, and the
 * program prints "right". MISMATCH, and a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

static uint64_t *wiped, *kept;
static size_t pages;
static int is_orphan, report[2];

static void *shared_stack(void)
{
    size_t bytes = 64 * PAGE;
    char *stack = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED)
        _exit(2);
    memset(stack, 1, bytes);
    return stack + bytes;
}

static int look(void *unused)
{
    char byte;
    (void)unused;
    if (read(0, &byte, 1) != 0)
        _exit(3);
    verify_pages("wiped", wiped, 0, pages, 0);
    verify_pages("inherited", kept, 0, pages, 1);
    if (write(report[1], "r", 1) != 1)
        _exit(3);
    _exit(0);
}

static void fork_unseen(void)
{
    if (clone(look, shared_stack(), SIGCHLD, NULL) < 0)
        _exit(2);
}

int main(int count, char **arguments)
{
    if (count != 3 && count != 4)
        return 2;
    is_orphan = count == 4;
    pages = strtoul(arguments[1], NULL, 10) * 128;
    wiped = map_pages(pages);
    kept = map_pages(pages);
    if (madvise(wiped, pages * PAGE, MADV_WIPEONFORK) || pipe(report))
        return 2;
    stamp_pages(wiped, 0, pages, 1);
    stamp_pages(kept, 0, pages, 1);
    /* What the child calls is bound by now. */
    if (read(report[0], NULL, 0) != 0)
        return 2;
    while (access(arguments[2], F_OK))
        usleep(1000);
    pid_t middle = is_orphan ? fork() : -1;
    if (middle == 0) {
        fork_unseen();
        _exit(0);
    }
    if (is_orphan && waitpid(middle, NULL, 0) != middle)
        return 2;
    if (!is_orphan)
        fork_unseen();
    say("forked\n");
    close(report[1]);
    char byte = 0;
    if (read(report[0], &byte, 1) != 1 || byte != 'r') {
        say("MISMATCH: the child did not come to its end\n");
        return 1;
    }
    say("right\n");
    return 0;
}
