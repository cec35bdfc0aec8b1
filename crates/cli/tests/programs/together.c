/* Programs that grow at the same time, each more than its share of the limit.
 *
 *   together PROGRAMS MEGABYTES ROUNDS
 *
 * Executes itself PROGRAMS times.  Once all of them have mapped their memory, each
 * fills it and checks it ROUNDS times, with a pause before, and rewrites a third.
 * Prints how many threads named reclaim-N the parent process has in the end:
 * under memfold run those that help its reclaimer. */
#define _GNU_SOURCE
#include "stamp.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/wait.h>

/* The start is a pipe that hangs up, once each has written to the other one. */
static int one(int start, int ready, size_t pages, unsigned long rounds)
{
    char byte = 0;
    uint64_t *memory = map_pages(pages);
    if (write(ready, &byte, 1) != 1 || read(start, &byte, 1) != 0)
        return 2;
    stamp_pages(memory, 0, pages, 1);
    for (unsigned long round = 1; round <= rounds; round++) {
        usleep(100000);
        for (size_t page = 0; page < pages; page++) {
            uint64_t before = 1 + (round - 1 + page) / 3 - page / 3;
            uint64_t generation = 1 + (round + page) / 3 - page / 3;
            if (check_page(memory + page * WORDS, page + 1, before) >= 0) {
                report_page("together", memory + page * WORDS, page + 1, before);
                return 1;
            }
            if (generation != before)
                stamp_page(memory + page * WORDS, page + 1, generation);
        }
    }
    return 0;
}

static int helping_threads(void)
{
    char path[300], name[16];
    int found = 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)getppid());
    DIR *tasks = opendir(path);
    if (!tasks)
        return 0;
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/comm", (int)getppid(), entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        if (fgets(name, sizeof name, file) && strncmp(name, "reclaim-", 8) == 0)
            found++;
        fclose(file);
    }
    closedir(tasks);
    return found;
}

int main(int count, char **arguments)
{
    if (count == 6)
        return one(atoi(arguments[4]), atoi(arguments[5]), strtoul(arguments[2], NULL, 10) * 256,
                   strtoul(arguments[3], NULL, 10));
    int start[2], ready[2], status, failed = 0;
    if (count != 4 || pipe(start) != 0 || pipe(ready) != 0)
        return 2;
    unsigned long programs = strtoul(arguments[1], NULL, 10);
    for (unsigned long number = 0; number < programs; number++) {
        pid_t child = fork();
        if (child < 0)
            return 2;
        if (child == 0) {
            char reads[12], writes[12];
            snprintf(reads, sizeof reads, "%d", start[0]);
            snprintf(writes, sizeof writes, "%d", ready[1]);
            close(start[1]);
            execl("/proc/self/exe", "together", "one", arguments[2], arguments[3], reads, writes, NULL);
            _exit(127);
        }
    }
    close(start[0]);
    close(ready[1]);
    for (char byte; programs > 0 && read(ready[0], &byte, 1) == 1; programs--)
        ;
    /* All wait for the start; memfold has time to look at them. */
    usleep(500000);
    close(start[1]);
    while (wait(&status) > 0)
        failed += status != 0;
    printf("%d failed, %d threads helped\n", failed, helping_threads());
    return failed != 0;
}
