/* A process that shares a program's memory (clone with CLONE_VM) outlives the program, says
 * so, and verifies that memory for as long as it lives.
 *
 *   sharer MEGABYTES
 *
 * MISMATCH on stdout where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>

static size_t pages;
static uint64_t *memory;

static int outlive(void *parent)
{
    while (kill(*(pid_t *)parent, 0) == 0)
        usleep(1000);
    say("alone\n");
    for (;;)
        verify_pages("alone", memory, 0, pages, 1);
    return 0;
}

int main(int count, char **arguments)
{
    static char stack[1 << 16] __attribute__((aligned(16)));
    static pid_t self;
    if (count != 2)
        return 2;
    pages = strtoul(arguments[1], NULL, 10) * 256;
    memory = map_pages(pages);
    stamp_pages(memory, 0, pages, 1);
    self = getpid();
    if (clone(outlive, stack + sizeof stack, CLONE_VM | SIGCHLD, &self) < 0)
        return 2;
    _exit(0);
}
