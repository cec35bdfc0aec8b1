/* A program whose /proc/PID/maps is far longer than its memory:
 *
 *   long_maps FOLDER DEPTH MAPPINGS MEGABYTES SECONDS
 *
 * It maps a file that lies as deep below the folder, in folders with the longest names there are, as often as said, and
 * rewrites memory of its own for some seconds. At the end it says the most memory, in KiB, that its grandparent had. */
#define _GNU_SOURCE
#include "filter.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { LONGEST_NAME = 255 };

static long number_in(const char *path, const char *name)
{
    char line[256];
    long number = -1;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name)))
            number = atol(line + strlen(name));
    if (file)
        fclose(file);
    return number;
}

static long grandparents_peak(void)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/status", getppid());
    snprintf(path, sizeof path, "/proc/%ld/status", number_in(path, "PPid:"));
    return number_in(path, "VmHWM:");
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    char name[LONGEST_NAME + 1];
    memset(name, 'n', LONGEST_NAME);
    name[LONGEST_NAME] = 0;
    int depth = atoi(arguments[2]);
    must(chdir(arguments[1]), "the folder");
    for (int level = 0; level < depth; level++) {
        must(mkdir(name, 0700), "mkdir");
        must(chdir(name), "chdir");
    }
    int file = open("file", O_RDWR | O_CREAT, 0600);
    must(file < 0 || ftruncate(file, PAGE), "the file");
    int mappings = atoi(arguments[3]);
    char *place = mmap(NULL, (size_t)mappings * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(place == MAP_FAILED, "room");
    for (int number = 0; number < mappings; number++) {
        void *at = place + (size_t)number * PAGE;
        must(mmap(at, PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED, "mmap");
    }
    size_t pages = strtoul(arguments[4], NULL, 10) * 256;
    uint64_t *memory = map_stamped(pages);
    double end = seconds_now() + atof(arguments[5]);
    for (uint64_t generation = 1; seconds_now() < end; generation++) {
        verify_pages("rewritten", memory, 0, pages, generation);
        stamp_pages(memory, 0, pages, generation + 1);
    }
    say("peak %ld\n", grandparents_peak());
    unlink("file");
    for (int level = 0; level < depth; level++) {
        must(chdir(".."), "up");
        rmdir(name);
    }
    return 0;
}
