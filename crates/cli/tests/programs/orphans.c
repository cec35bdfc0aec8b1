/* Forks children that fork a child of their own and end at once; that one verifies all memory.
 *
 *   orphans MEGABYTES ROUNDS
 *
 * Prints a dot a round; MISMATCH, and a status that is not 0, where an orphan finds something else or never says. */
#define _GNU_SOURCE
#include "filter.h"

#include <stdlib.h>
#include <sys/wait.h>

int main(int argc, char **argv)
{
    size_t pages = (argc > 1 ? strtoul(argv[1], NULL, 10) : 32) * 256;
    int rounds = argc > 2 ? atoi(argv[2]) : 10;
    uint64_t *memory = map_stamped(pages);
    for (int round = 0; round < rounds; round++) {
        int channel[2];
        must(pipe(channel), "pipe");
        pid_t child = fork();
        must(child < 0, "fork");
        if (child == 0) {
            pid_t orphan = fork();
            if (orphan == 0) {
                verify_pages("orphan", memory, 0, pages, 1);
                _exit(write(channel[1], "r", 1) != 1);
            }
            _exit(orphan < 0);
        }
        close(channel[1]);
        int status = -1;
        must(waitpid(child, &status, 0) != child || status != 0, "a child");
        char said = 0;
        if (read(channel[0], &said, 1) != 1 || said != 'r') {
            puts("MISMATCH: an orphan did not come to its end");
            return 1;
        }
        close(channel[0]);
        must(write(1, ".", 1) != 1, "write");
    }
    return 0;
}
