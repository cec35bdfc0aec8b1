/* Gives parts of its memory up and writes to them again, in a circle, as allocators do.
 *
 *   reuse MEGABYTES ROUNDS free|dontneed
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

#define PART 256UL

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    uint64_t rounds = strtoul(arguments[2], NULL, 10);
    int advice = strcmp(arguments[3], "free") == 0 ? MADV_FREE : MADV_DONTNEED;
    uint64_t *memory = map_stamped(pages);
    for (uint64_t round = 2; round < 2 + rounds; round++)
        for (size_t page = 0; page < pages; page += PART) {
            verify_pages("reused", memory, page, page + PART, round - 1);
            if (madvise(memory + page * WORDS, PART * PAGE, advice))
                return 2;
            for (size_t again = page; again < page + PART; again++)
                stamp_page(memory + again * WORDS, again + 1, round);
        }
    verify_pages("reused", memory, 0, pages, rounds + 1);
    say("reuse ok\n");
    return 0;
}
