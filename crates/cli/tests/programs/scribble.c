/* Writes random words over the memory that it shares with the supervisor, while more memory is in
 * use than may stay.
 *
 *   scribble SECONDS MEGABYTES SEED
 *
 * SEED % 3 also says how long the pauses are: a program whose helper hangs meets nothing more.
 *
 * What becomes of it does not matter. Built with the layout of that memory:
 *
 *   CHANNEL_BYTES  its size
 *   FORK           where the requests of forks begin
 *   FATAL_1, FATAL_2  words that end the program at once, by most of their values: the last part of the time writes to these
 */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>

static volatile uint32_t *channel;
static double end;

static void find_channel(void)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && strstr(line, " rw-s ") && to - from == CHANNEL_BYTES)
            channel = (volatile uint32_t *)from;
    }
    if (maps)
        fclose(maps);
}

/* All words, and more often those at the front (counters, the gate, what is asked for), and around the fork's. */
static size_t any_word(uint64_t random)
{
    switch (random % 4) {
    case 0:
        return (random >> 8) % (CHANNEL_BYTES / 4);
    case 1:
        return FORK / 4 + (random >> 8) % 32;
    default:
        return (random >> 8) % 32;
    }
}

static void *scribble(void *seed)
{
    uint64_t random = (uint64_t)seed;
    useconds_t pause = (useconds_t[]){3000, 0, 100}[random % 3];
    double fatal_from = seconds_now() + (end - seconds_now()) * 3 / 4;
    for (;;) {
        random = mix(random);
        size_t word = any_word(random);
        static const uint32_t few[] = {0, 1, 1U << 29, 1U << 30, 1U << 31, 3U << 29, ~0U};
        uint32_t value = (uint32_t)(random >> 32);
        if ((word != FATAL_1 / 4 && word != FATAL_2 / 4) || seconds_now() > fatal_from)
            channel[word] = random & 4 ? few[value % 7] : channel[word] + (random & 8 ? 1 : value);
        if (pause || !(random & 0x3f0))
            usleep(pause + (random >> 60));
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    end = seconds_now() + strtod(arguments[1], NULL);
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
