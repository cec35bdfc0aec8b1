/* A program that changes its mappings without a pause, and one that waits for its own pages beside it.
 *
 *   churn_beside churn MEGABYTES SECONDS   threads drop, unmap, move and map memory that memfold manages
 *   churn_beside steady MEGABYTES SECONDS  touches pages that are out, and prints the longest and the 99th
 *                                          percentile of these touches in microseconds */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>

enum { THREADS = 12, PIECE = 64, TOUCHES_MOST = 1 << 20 };

static double end;

static void *churn(void *number)
{
    unsigned seed = (unsigned)(uintptr_t)number;
    while (seconds_now() < end) {
        char *piece = (char *)map_pages(PIECE);
        for (size_t page = 0; page < PIECE; page++)
            piece[page * PAGE] = 1;
        for (int step = 0; step < 30; step++) {
            size_t page = rand_r(&seed) % (PIECE - 8);
            madvise(piece + page * PAGE, 8 * PAGE, MADV_DONTNEED);
            piece[page * PAGE] = 1;
        }
        char *moved = mremap(piece, PIECE * PAGE, PIECE * PAGE, MREMAP_MAYMOVE);
        if (moved == MAP_FAILED || munmap(moved, PIECE * PAGE) != 0)
            _exit(2);
    }
    return NULL;
}

static int ascending(const void *a, const void *b)
{
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static void steady(size_t pages)
{
    double *touches = calloc(TOUCHES_MOST, sizeof *touches);
    uint64_t *memory = map_stamped(pages);
    size_t count = 0;
    unsigned seed = 1;
    while (count < TOUCHES_MOST && seconds_now() < end) {
        size_t page = (size_t)rand_r(&seed) % pages;
        double before = seconds_now();
        uint64_t found = *(volatile uint64_t *)(memory + page * WORDS);
        double took = seconds_now() - before;
        if (found != page_word(page + 1, 1, 0))
            verify_pages("steady", memory, page, page + 1, 1);
        /* The others were in memory. */
        if (took > 5e-6)
            touches[count++] = took;
    }
    qsort(touches, count, sizeof *touches, ascending);
    if (count < 100)
        _exit(2);
    say("steady %zu: %.0f %.0f\n", count, touches[count - 1] * 1e6, touches[count * 99 / 100] * 1e6);
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    size_t pages = strtoul(arguments[2], NULL, 10) * 256;
    end = seconds_now() + atof(arguments[3]);
    if (!strcmp(arguments[1], "steady")) {
        steady(pages);
        return 0;
    }
    uint64_t *memory = map_stamped(pages);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, churn, (void *)i) != 0)
            return 2;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    verify_pages("churn", memory, 0, pages, 1);
    say("churn: ok\n");
    return 0;
}
