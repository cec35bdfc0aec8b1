/* Makes every thirty-second page of its memory read-only, as garbage collectors do, and forks: both
 * verify all of it again and again.
 *
 *   barrier MEGABYTES ROUNDS
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a page is
 * wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>
#include <sys/wait.h>

static void verify_for(unsigned long rounds, const char *who, const uint64_t *memory, size_t pages)
{
    for (unsigned long round = 0; round < rounds; round++) {
        verify_pages(who, memory, 0, pages, 1);
        usleep(200000);
    }
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    unsigned long rounds = strtoul(arguments[2], NULL, 10);
    uint64_t *memory = map_stamped(pages);
    /* All of it is managed by then. */
    verify_for(2, "before", memory, pages);
    for (size_t page = 7; page < pages; page += 32)
        if (mprotect(memory + page * WORDS, PAGE, PROT_READ))
            return 2;
    pid_t child = fork();
    if (child < 0)
        return 2;
    verify_for(rounds, child ? "parent" : "child", memory, pages);
    if (!child)
        _exit(0);
    int status;
    if (waitpid(child, &status, 0) != child || status)
        return 1;
    say("barrier ok\n");
    return 0;
}
