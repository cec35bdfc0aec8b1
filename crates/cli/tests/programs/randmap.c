/* Maps pieces at random addresses and unmaps the oldest, as allocators do that hide
 * where they put things, and verifies each piece before it goes.
 *
 *   randmap SECONDS PIECES
 *
 * Prints one line, the same in every run. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

#define PAGES 64UL

static uint64_t *map_somewhere(uint64_t *random)
{
    for (;;) {
        *random = mix(*random);
        uintptr_t place = ((*random % 0x7000000) + 0x100000) << 20;
        void *start = mmap((void *)place, PAGES * PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (start != MAP_FAILED)
            return start;
    }
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    double end = seconds_now() + strtod(arguments[1], NULL);
    size_t pieces = strtoul(arguments[2], NULL, 10);
    uint64_t **live = calloc(pieces, sizeof *live);
    uint64_t random = 1;
    for (uint64_t made = 0; seconds_now() < end; made++) {
        uint64_t **piece = &live[made % pieces];
        if (*piece) {
            verify_pages("a piece", *piece, 0, PAGES, made - pieces + 1);
            munmap(*piece, PAGES * PAGE);
        }
        *piece = map_somewhere(&random);
        stamp_pages(*piece, 0, PAGES, made + 1);
    }
    say("randmap ok\n");
    return 0;
}
