/* Holds memory and verifies it for ever, or for a number of rounds.
 *
 *   verify MEGABYTES ROUNDS RESULT_FILE
 *
 * Appends MISMATCH to RESULT_FILE if a page is ever wrong (and exits 1); writes
 * one byte a round to stdout.  ROUNDS 0: until killed.  A third of the pages is
 * rewritten in every round. */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/prctl.h>

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    unsigned long rounds = strtoul(arguments[2], NULL, 10);
    int result = open(arguments[3], O_WRONLY | O_CREAT | O_APPEND, 0600);
    uint64_t *memory = map_pages(pages);
    /* A debugger may look at it. */
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
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
        if (write(1, ".", 1) != 1)
            return 3;
    }
    return 0;
}
