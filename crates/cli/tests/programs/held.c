/* A program that waits to be looked at by a debugger.
 *
 *   held MEGABYTES [forked]
 *
 * Fills memory, prints where it is, waits for SIGUSR1, and looks whether it is as before. Page N holds N
 * in its first word, and N modulo 251 in each byte behind. MISMATCH where a page is wrong. The debugger may
 * turn all bits of first words: how many it turned is printed. With a child, which does nothing. */
#define _GNU_SOURCE
#include "stamp.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

static void fill(uint64_t *page, uint64_t number)
{
    memset(page, (int)(number % 251), PAGE);
    page[0] = number;
}

int main(int count, char **arguments)
{
    if (count != 2 && count != 3)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGUSR1);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    if (count == 3 && fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    uint64_t *memory = map_pages(pages);
    for (size_t page = 0; page < pages; page++)
        fill(memory + page * WORDS, page);
    say("%d %lx\n", (int)getpid(), (unsigned long)memory);
    int signal;
    sigwait(&awaited, &signal);
    size_t turned = 0;
    for (size_t page = 0; page < pages; page++) {
        uint64_t expected[WORDS];
        fill(expected, page);
        if (memory[page * WORDS] == ~page) {
            expected[0] = ~page;
            turned++;
        }
        if (memcmp(expected, memory + page * WORDS, PAGE)) {
            say("MISMATCH page %zu\n", page);
            return 1;
        }
    }
    if (turned > 0)
        say("%zu turned\n", turned);
    say("held ok\n");
    return 0;
}
