/* Programs that grow at the same time, each more than its share of the limit.
 *
 *   together PROGRAMS MEGABYTES ROUNDS
 *
 * Executes itself PROGRAMS times.  Once all of them have started, each fills its
 * memory and checks it ROUNDS times, with a pause before, and rewrites a third.
 * Prints how many threads named reclaim-N the parent process has in the end:
 * under memfold run those that help its reclaimer. */
#define _GNU_SOURCE
#include "stamp.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/wait.h>

/* The start is a pipe that hangs up. */
static int one(int start, size_t pages, unsigned long rounds)
{
    char byte;
    uint64_t *memory = map_pages(pages);
    if (read(start, &byte, 1) != 0)
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
    if (count == 5)
        return one(atoi(arguments[4]), strtoul(arguments[2], NULL, 10) * 256, strtoul(arguments[3], NULL, 10));
    int start[2], status, failed = 0;
    if (count != 4 || pipe(start) != 0)
        return 2;
    unsigned long programs = strtoul(arguments[1], NULL, 10);
    for (unsigned long number = 0; number < programs; number++) {
        pid_t child = fork();
        if (child < 0)
            return 2;
        if (child == 0) {
            char descriptor[12];
            snprintf(descriptor, sizeof descriptor, "%d", start[0]);
            close(start[1]);
            execl("/proc/self/exe", "together", "one", arguments[2], arguments[3], descriptor, NULL);
            _exit(127);
        }
    }
    close(start[0]);
    /* All are started by then, if not each has read as yet. */
    usleep(300000);
    close(start[1]);
    while (wait(&status) > 0)
        failed += status != 0;
    printf("%d failed, %d threads helped\n", failed, helping_threads());
    return failed != 0;
}
