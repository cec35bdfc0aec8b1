/* Drops its memory and writes it anew, over and over, as allocators do that give memory back, beside
 * more than may stay.
 *
 *   refill MEGABYTES TIMES
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a
 * page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

#define OTHER_PAGES 8192UL

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    unsigned long times = strtoul(arguments[2], NULL, 10);
    uint64_t *others = map_stamped(OTHER_PAGES);
    uint64_t *memory = map_stamped(pages);
    verify_pages("others", others, 0, OTHER_PAGES, 1);
    for (uint64_t generation = 2; generation < 2 + times; generation++) {
        if (madvise(memory, pages * PAGE, MADV_DONTNEED))
            return 2;
        stamp_pages(memory, 0, pages, generation);
        verify_pages("refilled", memory, 0, pages, generation);
    }
    verify_pages("others", others, 0, OTHER_PAGES, 1);
    say("refill ok\n");
    return 0;
}
