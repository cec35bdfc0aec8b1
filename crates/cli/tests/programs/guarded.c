/* Lays guard regions over memory that it uses, and takes them away again.
 *
 *   guarded MEGABYTES
 *
 * The pages under a guard region are gone without an event.  Prints how many of them read zeros
 * afterwards. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#define GUARDED 64UL

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256, zeros = 0;
    uint64_t *memory = map_stamped(pages);
    /* Those that were touched last are in memory. */
    uint64_t *last = memory + (pages - GUARDED) * WORDS;
    if (madvise(last, GUARDED * PAGE, MADV_GUARD_INSTALL) || madvise(last, GUARDED * PAGE, MADV_GUARD_REMOVE)) {
        say("no guard regions\n");
        return 3;
    }
    for (size_t page = 0; page < GUARDED; page++)
        zeros += check_page(last + page * WORDS, 0, 0) < 0;
    verify_pages("beside", memory, 0, pages - GUARDED, 1);
    say("%s\n", zeros > GUARDED / 2 ? "zeros" : "no zeros");
    return 0;
}
