/* A heap that grows by 132 KiB at a time, as malloc's does, beside MAPPINGS mappings that
 * cannot become one, and verified in the end.
 *
 *   grow MEGABYTES MICROSECONDS MAPPINGS
 *
 * Prints how many mappings the heap is in the end. Others are memfold's: its stage is many where pages are taken away by
 * mremap. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

#define STEP 33UL

static long count_mappings(uint64_t *heap)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long start, end, first = (uintptr_t)heap, last = (uintptr_t)sbrk(0);
    long found = 0;
    while (fscanf(maps, "%lx-%lx%*[^\n]", &start, &end) == 2)
        found += start < last && end > first;
    fclose(maps);
    return found;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256 / STEP * STEP;
    useconds_t pause = strtoul(arguments[2], NULL, 10);
    long own = strtol(arguments[3], NULL, 10);
    for (long made = 0; made < own; made++)
        if (mmap(NULL, PAGE, made & 1 ? PROT_NONE : PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
            return 3;
    uint64_t *heap = (uint64_t *)(((uintptr_t)sbrk(0) + PAGE - 1) & ~(PAGE - 1));
    if (brk(heap))
        return 3;
    for (size_t done = 0; done < pages; done += STEP) {
        if (sbrk(STEP * PAGE) == (void *)-1) {
            say("FAILED after %lu pages, with %ld mappings\n", done, count_mappings(heap));
            return 1;
        }
        stamp_pages(heap, done, done + STEP, 1);
        if (pause)
            usleep(pause);
    }
    verify_pages("growing", heap, 0, pages, 1);
    say("%ld\n", count_mappings(heap));
    return 0;
}
