/* One thread reads zeros in order, up to where another gives its memory up just then, so that zeros
 * brought in ahead of the first reach into what the second has dropped.  Others keep the lock on the
 * mappings busy, for which the second has to wait between telling of it and doing it.
 *
 *   ahead SECONDS
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a
 * page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>

#define PART 64UL
#define PARTS 64UL
#define OTHER_PAGES 8192UL

static uint64_t *shared_area;
static size_t part;
static volatile int stopping;
static pthread_barrier_t together;

static void drop(size_t which)
{
    if (madvise(shared_area + which * PART * WORDS, PART * PAGE, MADV_DONTNEED)) {
        say("FAILED madvise\n");
        _exit(2);
    }
}

static void *drop_behind(void *unused)
{
    for (;;) {
        pthread_barrier_wait(&together);
        if (stopping)
            return unused;
        size_t behind = part + 1;
        double until = seconds_now() + (double)(mix(behind) % 20) * 1e-6;
        while (seconds_now() < until)
            ;
        drop(behind);
        pthread_barrier_wait(&together);
        verify_pages("dropped beside a reader", shared_area, behind * PART, (behind + 1) * PART, 0);
        pthread_barrier_wait(&together);
    }
}

static void *change_mappings(void *unused)
{
    uint64_t *memory = map_pages(3);
    while (!stopping)
        if (mprotect(memory, PAGE, PROT_READ) || mprotect(memory, PAGE, PROT_READ | PROT_WRITE))
            _exit(2);
    return unused;
}

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    double end = seconds_now() + strtod(arguments[1], NULL);
    shared_area = map_pages(PART * PARTS);
    uint64_t *others = map_pages(OTHER_PAGES);
    pthread_t threads[3];
    pthread_barrier_init(&together, NULL, 2);
    if (pthread_create(&threads[0], NULL, drop_behind, NULL) ||
        pthread_create(&threads[1], NULL, change_mappings, NULL) ||
        pthread_create(&threads[2], NULL, change_mappings, NULL))
        return 2;
    for (uint64_t generation = 1; seconds_now() < end; generation++) {
        /* Swapped out, a page is a hole once it was dropped. */
        stamp_pages(shared_area, 0, PART * PARTS, generation);
        stamp_pages(others, 0, OTHER_PAGES, generation);
        verify_pages("others", others, 0, OTHER_PAGES, generation);
        for (part = 0; part < PARTS; part += 2) {
            drop(part);
            pthread_barrier_wait(&together);
            verify_pages("dropped", shared_area, part * PART, (part + 1) * PART, 0);
            pthread_barrier_wait(&together);
            pthread_barrier_wait(&together);
        }
    }
    stopping = 1;
    pthread_barrier_wait(&together);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    say("ahead ok\n");
    return 0;
}
