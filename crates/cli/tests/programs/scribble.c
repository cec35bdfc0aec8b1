/* Writes random words over the memory that it shares with the supervisor, while more memory is in
 * use than may stay.
 *
 *   scribble SECONDS MEGABYTES SEED
 *
 * What becomes of it does not matter. */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>

static uint32_t *channel;

static void find_channel(void)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx rw-s", &start, &end) == 2 && strstr(line, "rw-s") && end - start == 2 * PAGE)
            channel = (uint32_t *)start;
    }
    fclose(maps);
}

static void *scribble(void *seed)
{
    uint64_t random = (uint64_t)seed;
    for (;;) {
        random = mix(random);
        /* All words, and more often those at the front: counters and the gate. */
        size_t words = random & 3 ? 16 : 2 * PAGE / 4;
        size_t word = (random >> 8) % words;
        static const uint32_t few[] = {0, 1, 1U << 29, 1U << 30, 1U << 31, 3U << 29, ~0U};
        uint32_t value = (uint32_t)(random >> 32);
        channel[word] = random & 4 ? few[value % 7] : channel[word] + (random & 8 ? 1 : value);
        if (!(random & 0x3f0))
            usleep(random >> 60);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    double end = seconds_now() + strtod(arguments[1], NULL);
    size_t pages = strtoul(arguments[2], NULL, 10) * 256;
    uint64_t *memory = map_pages(pages);
    stamp_pages(memory, 0, pages, 1);
    find_channel();
    if (!channel)
        return 3;
    pthread_t thread;
    pthread_create(&thread, NULL, scribble, (void *)strtoul(arguments[3], NULL, 10));
    say("scribbling\n");
    for (uint64_t round = 1; seconds_now() < end; round++) {
        for (size_t page = round % 7; page < pages; page += 3)
            memory[page * WORDS + round % WORDS]++;
        madvise(memory + (round % 16) * pages / 16 * WORDS, pages / 32 * PAGE, MADV_DONTNEED);
        uint64_t *piece = map_pages(64);
        piece[0] = 1;
        munmap(piece, 64 * PAGE);
        if (round % 8 == 0 && fork() == 0) {
            for (size_t page = 0; page < pages; page += 5)
                memory[page * WORDS]++;
            _exit(0);
        }
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
    }
    _exit(0);
}
