/* Both sides of a fork write to all they share, at once and as fast as they can.
 *
 *   copies MEGABYTES ROUNDS
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a
 * page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>
#include <sys/wait.h>

static size_t pages;
static uint64_t *memory;

/* Every odd one: writes in no order. */
static void stamp_scattered(uint64_t generation)
{
    for (size_t step = 0; step < pages; step++) {
        size_t page = step * 7919 % pages;
        if (page % 2)
            stamp_page(memory + page * WORDS, page + 1, generation);
    }
}

static void verify(const char *who, uint64_t even, uint64_t odd)
{
    for (size_t page = 0; page < pages; page++) {
        uint64_t expected = page % 2 ? odd : even;
        verify_stamp(who, memory + page * WORDS, page + 1, expected);
    }
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    uint64_t rounds = strtoul(argv[2], NULL, 10);
    pages = strtoul(argv[1], NULL, 10) * 256;
    memory = map_stamped(pages);
    for (uint64_t round = 1; round <= rounds; round++) {
        uint64_t parents = 2 * round, childs = 100 + round;
        pid_t child = fork();
        if (child < 0)
            return 2;
        if (child == 0) {
            stamp_scattered(childs);
            verify("child", 2 * (round - 1) + (round == 1), childs);
            stamp_pages(memory, 0, pages, childs);
            verify("child, later", childs, childs);
            _exit(0);
        }
        stamp_pages(memory, 0, pages, parents);
        verify("parent", parents, parents);
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) {
            say("MISMATCH child %d ended with status %x\n", (int)child, status);
            return 1;
        }
        verify("parent, later", parents, parents);
    }
    say("copies ok\n");
    return 0;
}
