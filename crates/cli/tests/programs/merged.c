/* Says which kinds of memory the kernel may merge with other pages of a process that asked for
 * that: before it executed this program ("exec") or in it ("call").
 *
 *   merged exec|call MEGABYTES
 *
 * Prints whether the stage is one, having used more memory than may stay. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>
#include <sys/prctl.h>

#define SET_MEMORY_MERGE 67
#define STAGE_KIB 8192

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    if (strcmp(arguments[1], "now")) {
        if (prctl(SET_MEMORY_MERGE, 1, 0, 0, 0)) {
            say("no merging\n");
            return 0;
        }
        if (!strcmp(arguments[1], "exec"))
            execl("/proc/self/exe", arguments[0], "now", arguments[2], NULL);
    }
    size_t pages = strtoul(arguments[2], NULL, 10) * 256;
    uint64_t *memory = map_pages(pages);
    for (int round = 0; round < 20; round++)
        for (size_t page = 0; page < pages; page++)
            memory[page * WORDS + 1] = page % 3;
    char line[512];
    long size = 0, stages = 0, merged = 0;
    FILE *smaps = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, smaps)) {
        sscanf(line, "Size: %ld", &size);
        if (!strncmp(line, "VmFlags:", 8) && size == STAGE_KIB && strstr(line, " dc")) {
            stages++;
            merged += strstr(line, " mg") != NULL;
        }
    }
    say("%ld stages, %ld merged\n", stages, merged);
    return 0;
}
