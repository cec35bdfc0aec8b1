/* Uses more memory than the machine has, and checks all of it: swapped MEBIBYTES ROUNDS SEED
 *
 * Fills it in order, then in each round checks every page in a random order, and rewrites a
 * quarter of them.  Prints how long that took. */
#define _GNU_SOURCE
#include "stamp.h"
#include <stdlib.h>

static uint64_t *memory;
static uint32_t *generations;

static void verify(size_t page)
{
    verify_stamp("swapped", memory + page * WORDS, page, generations[page]);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size_t pages = strtoul(argv[1], NULL, 10) * 256;
    unsigned rounds = (unsigned)strtoul(argv[2], NULL, 10);
    uint64_t random = mix(strtoul(argv[3], NULL, 10));
    memory = map_pages(pages);
    generations = (uint32_t *)map_pages(pages * sizeof *generations / PAGE + 1);
    double began = seconds_now();
    for (size_t page = 0; page < pages; page++) {
        generations[page] = 1;
        stamp_page(memory + page * WORDS, page, 1);
    }
    double filled = seconds_now();
    for (unsigned round = 0; round < rounds; round++) {
        for (size_t step = 0; step < pages; step++) {
            random = mix(random);
            size_t page = random % pages;
            verify(page);
            if (step % 4 == 0)
                stamp_page(memory + page * WORDS, page, ++generations[page]);
        }
    }
    for (size_t page = 0; page < pages; page++)
        verify(page);
    double done = seconds_now();
    printf("verified %zu pages, filled in %.2f s, checked in %.2f s\n", pages, filled - began, done - filled);
    return 0;
}
