/* Verifies the last pages that a program can have, among others, while other threads give
 * memory up again and again.
 *
 *   last_pages SECONDS MEGABYTES
 *
 * Prints one line, the same in every run. */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>

#define LAST 16UL
#define END 0x7ffffffff000UL

static volatile int stopping;

static void *give_up(void *unused)
{
    uint64_t *memory = map_pages(256);
    for (uint64_t generation = 1; !stopping; generation++) {
        stamp_pages(memory, 0, 256, generation);
        madvise(memory, 256 * PAGE, MADV_DONTNEED);
    }
    return unused;
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    double end = seconds_now() + strtod(arguments[1], NULL);
    size_t pages = strtoul(arguments[2], NULL, 10) * 256;
    uint64_t *last = mmap((void *)(END - LAST * PAGE), LAST * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (last == MAP_FAILED) {
        say("taken\n");
        return 0;
    }
    stamp_pages(last, 0, LAST, 1);
    uint64_t *memory = map_pages(pages);
    stamp_pages(memory, 0, pages, 1);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, give_up, NULL);
    while (seconds_now() < end) {
        verify_pages("the last pages", last, 0, LAST, 1);
        verify_pages("the others", memory, 0, pages, 1);
    }
    stopping = 1;
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    say("last_pages ok\n");
    return 0;
}
