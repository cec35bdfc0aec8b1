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
#include <sys/mman.h>
#include <time.h>

#define PAGES 256UL
#define GAP 64UL

static volatile int stopping;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static uint64_t *map(void *at, size_t pages)
{
    int fixed = at ? MAP_FIXED : 0;
    uint64_t *memory = mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    if (memory == MAP_FAILED) {
        say("FAILED mmap\n");
        _exit(2);
    }
    return memory;
}

static void stamp(uint64_t *memory, size_t first, size_t end, uint64_t generation)
{
    for (size_t page = first; page < end; page++)
        stamp_page(memory + page * WORDS, page + 1, generation);
}

static void verify(const char *what, uint64_t *memory, size_t first, size_t end, uint64_t generation)
{
    for (size_t page = first; page < end; page++)
        if (check_page(memory + page * WORDS, page + 1, generation) >= 0) {
            report_page(what, memory + page * WORDS, page + 1, generation);
            _exit(1);
        }
}

/* What is between two mappings of one kind is a gap for a moment, and nobody is told what fills it
 * as long as nothing there was managed. */
static void *leave_gaps(void *argument)
{
    uint64_t random = (uint64_t)argument;
    const size_t first = (PAGES - GAP) / 2, end = first + GAP;
    for (uint64_t generation = 1; !stopping; generation++) {
        uint64_t *memory = map(NULL, PAGES);
        stamp(memory, 0, PAGES, generation);
        random = mix(random);
        usleep(random % 1500);
        if (munmap(memory + first * WORDS, GAP * PAGE)) {
            say("FAILED munmap\n");
            _exit(2);
        }
        double until = now() + (double)(random >> 32 & 127) * 1e-6;
        while (now() < until)
            ;
        map(memory + first * WORDS, GAP);
        stamp(memory, first, end, generation + 1);
        usleep(4000);
        verify("around a gap", memory, 0, first, generation);
        verify("in a gap", memory, first, end, generation + 1);
        verify("behind a gap", memory, end, PAGES, generation);
        munmap(memory, PAGES * PAGE);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    double end = now() + strtod(arguments[1], NULL);
    unsigned long threads = strtoul(arguments[2], NULL, 10);
    size_t pages = strtoul(arguments[3], NULL, 10) * 256;
    if (threads > 32)
        return 2;
    uint64_t *memory = map(NULL, pages);
    stamp(memory, 0, pages, 1);
    pthread_t started[32];
    for (unsigned long i = 0; i < threads; i++)
        if (pthread_create(&started[i], NULL, leave_gaps, (void *)(i + 1)))
            return 2;
    while (now() < end)
        verify("beside", memory, 0, pages, 1);
    stopping = 1;
    for (unsigned long i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    verify("at the end", memory, 0, pages, 1);
    say("gaps ok\n");
    return 0;
}
