/* Threads map memory, unmap the middle of it and map something else there, again and
 * again, and verify every page, while more memory is in use than may stay.
 *
 *   gaps SECONDS THREADS MEGABYTES
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a
 * page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>

#define PAGES 256UL
#define GAP 64UL

static volatile int stopping;

/* What is between two mappings of one kind is a gap for a moment, and no event reports what fills
 * it as long as nothing there was managed. */
static void *leave_gaps(void *argument)
{
    uint64_t random = (uint64_t)argument;
    const size_t first = (PAGES - GAP) / 2, end = first + GAP;
    for (uint64_t generation = 1; !stopping; generation++) {
        uint64_t *memory = map_pages(PAGES);
        stamp_pages(memory, 0, PAGES, generation);
        random = mix(random);
        usleep(random % 1500);
        if (munmap(memory + first * WORDS, GAP * PAGE)) {
            say("FAILED munmap\n");
            _exit(2);
        }
        double until = seconds_now() + (double)(random >> 32 & 127) * 1e-6;
        while (seconds_now() < until)
            ;
        if (mmap(memory + first * WORDS, GAP * PAGE, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
            say("FAILED mmap\n");
            _exit(2);
        }
        stamp_pages(memory, first, end, generation + 1);
        usleep(4000);
        verify_pages("around a gap", memory, 0, first, generation);
        verify_pages("in a gap", memory, first, end, generation + 1);
        verify_pages("behind a gap", memory, end, PAGES, generation);
        munmap(memory, PAGES * PAGE);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    double end = seconds_now() + strtod(arguments[1], NULL);
    unsigned long threads = strtoul(arguments[2], NULL, 10);
    size_t pages = strtoul(arguments[3], NULL, 10) * 256;
    if (threads > 32)
        return 2;
    uint64_t *memory = map_stamped(pages);
    pthread_t started[32];
    for (unsigned long i = 0; i < threads; i++)
        if (pthread_create(&started[i], NULL, leave_gaps, (void *)(i + 1)))
            return 2;
    while (seconds_now() < end)
        verify_pages("beside", memory, 0, pages, 1);
    stopping = 1;
    for (unsigned long i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    verify_pages("at the end", memory, 0, pages, 1);
    say("gaps ok\n");
    return 0;
}
