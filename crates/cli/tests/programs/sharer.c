/* A process that nothing but a userfaultfd is known of kills memfold, which started its program, says so, and verifies the
 * memory for as long as it lives.
 *
 *   sharer MEGABYTES          shares the program's memory (clone with CLONE_VM), and outlives the program
 *   sharer MEGABYTES forked   was forked past the C library just now
 *
 * MISMATCH on stdout where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>

static size_t pages;
static uint64_t *memory;
static pid_t memfold;

/* What it needs was used just now, and is resident. */
static void verify_without_memfold(void)
{
    say("alone %d\n", (int)syscall(SYS_getpid));
    syscall(SYS_kill, memfold, SIGKILL);
    for (;;)
        verify_pages("alone", memory, 0, pages, 1);
}

static int outlive(void *program)
{
    while (kill(*(pid_t *)program, 0) == 0)
        usleep(1000);
    verify_without_memfold();
    return 0;
}

static void fork_past_the_library(void)
{
    pid_t child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child < 0)
        _exit(2);
    if (child == 0)
        verify_without_memfold();
    for (;;)
        pause();
}

int main(int count, char **arguments)
{
    static char stack[1 << 16] __attribute__((aligned(16)));
    static pid_t self;
    if (count < 2)
        return 2;
    pages = strtoul(arguments[1], NULL, 10) * 256;
    memory = map_pages(pages);
    stamp_pages(memory, 0, pages, 1);
    memfold = getppid();
    self = getpid();
    if (count > 2)
        fork_past_the_library();
    if (clone(outlive, stack + sizeof stack, CLONE_VM | SIGCHLD, &self) < 0)
        return 2;
    _exit(0);
}
