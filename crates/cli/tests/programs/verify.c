/* Holds memory and verifies it for ever, or for a number of rounds.
 *
 *   verify MEGABYTES ROUNDS RESULT_FILE
 *
 * Appends MISMATCH to RESULT_FILE if a page is ever wrong (and exits 1); writes
 * one byte a round to stdout.  ROUNDS 0: until killed.  A third of the pages is
 * rewritten in every round.  With FORKS it forks in every round, and the child
 * verifies some pages. */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>

/* Fails if a child that is forked now finds what no page of this round has. */
static int fork_and_verify(uint64_t *memory, size_t pages, unsigned long round)
{
    pid_t child = fork();
    if (child == 0) {
        for (size_t page = 0; page < pages; page += 64) {
            uint64_t generation = 1 + (round + page) / 3 - page / 3;
            if (check_page(memory + page * WORDS, page + 1, generation) >= 0)
                _exit(1);
        }
        _exit(0);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0 ? 0 : -1;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    unsigned long rounds = strtoul(arguments[2], NULL, 10);
    int result = open(arguments[3], O_WRONLY | O_CREAT | O_APPEND, 0600);
    uint64_t *memory = map_pages(pages);
    if (result < 0)
        return 2;
    stamp_pages(memory, 0, pages, 1);
    for (unsigned long round = 1; rounds == 0 || round <= rounds; round++) {
        for (size_t page = 0; page < pages; page++) {
            /* The generation of a page changes in every third round. */
            uint64_t generation = 1 + (round + page) / 3 - page / 3;
            uint64_t before = 1 + (round - 1 + page) / 3 - page / 3;
            if (check_page(memory + page * WORDS, page + 1, before) >= 0) {
                report_page("verify", memory + page * WORDS, page + 1, before);
                if (write(result, "MISMATCH\n", 9) != 9)
                    return 3;
                return 1;
            }
            if (generation != before)
                stamp_page(memory + page * WORDS, page + 1, generation);
        }
#ifdef FORKS
        if (fork_and_verify(memory, pages, round) != 0) {
            if (write(result, "MISMATCH in a child\n", 20) != 20)
                return 3;
            return 1;
        }
#else
        (void)fork_and_verify;
#endif
        if (write(1, ".", 1) != 1)
            return 3;
    }
    return 0;
}
