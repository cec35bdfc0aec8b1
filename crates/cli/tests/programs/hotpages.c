/* A program that writes to the same few pages before each of its forks, and children that look how many of the pages they
 * share they could write to without anyone knowing.
 *
 *   hotpages MEGABYTES WRITTEN_PAGES FORKS
 *
 * Prints the largest number that a child found once the fork was a while ago, but for that of the first child. Another child
 * lives all the time, so that the program's writes copy pages. */
#include "stamp.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#define MAPPED_ONCE (1ULL << 56)
#define PROTECTED (1ULL << 57)
#define PRESENT (1ULL << 63)

static unsigned unprotected(const uint64_t *memory, size_t pages)
{
    int pagemap = open("/proc/self/pagemap", O_RDONLY);
    uint64_t *entries = malloc(pages * sizeof *entries);
    size_t bytes = pages * sizeof *entries;
    if (pagemap < 0 || pread(pagemap, entries, bytes, (uintptr_t)memory / PAGE * sizeof *entries) != (ssize_t)bytes)
        _exit(100);
    unsigned found = 0;
    for (size_t i = 0; i < pages; i++)
        found += (entries[i] & (PRESENT | MAPPED_ONCE | PROTECTED)) == PRESENT;
    close(pagemap);
    free(entries);
    return found;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    size_t pages = strtoul(argv[1], NULL, 10) << 8, written = strtoul(argv[2], NULL, 10);
    unsigned most = 0;
    uint64_t *memory = map_stamped(pages);
    pid_t relative = fork();
    if (relative == 0)
        for (;;)
            pause();
    for (int fork_number = 0; fork_number < atoi(argv[3]); fork_number++) {
        for (size_t i = 0; i < written; i++)
            stamp_page(memory + i * WORDS, i + 1, fork_number);
        int channel[2];
        if (pipe(channel))
            return 2;
        pid_t child = fork();
        if (child == 0) {
            usleep(100000);
            unsigned found = unprotected(memory, pages);
            _exit(write(channel[1], &found, sizeof found) != sizeof found);
        }
        unsigned found;
        int status;
        if (read(channel[0], &found, sizeof found) != sizeof found || waitpid(child, &status, 0) != child || status)
            return 1;
        if (fork_number > 0 && found > most)
            most = found;
        close(channel[0]);
        close(channel[1]);
    }
    kill(relative, SIGKILL);
    waitpid(relative, NULL, 0);
    say("%u\n", most);
    return 0;
}
