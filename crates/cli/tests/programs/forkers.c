/* Forks children that fork children, all of which live on with memory of their own.
 *
 *   forkers INHERITED OWN CHILDREN RESULT_FILE
 *
 * At the first byte from stdin it forks.  Each process has INHERITED megabytes that it inherited, and OWN of its own, of
 * which it rewrites a third in every round; a byte to stdout says that it has stamped its memory.
 * One child more executes this program anew, which holds no memory.  At the end of stdin all verify once more and
 * exit, with status 0 if every page was right; else RESULT_FILE has a line MISMATCH for each process. */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>

static size_t inherited_pages, own_pages;
static uint64_t *inherited, *own;
static int end_pipe[2], results;

static int has_ended(int patience)
{
    struct pollfd end = {.fd = end_pipe[0], .events = POLLIN};
    return poll(&end, 1, patience) > 0;
}

static void wrong(const char *who, const uint64_t *page, uint64_t identity, uint64_t generation)
{
    report_page(who, page, identity, generation);
    if (write(results, "MISMATCH\n", 9) != 9)
        _exit(3);
    _exit(1);
}

/* Looks at each page of one memory, and rewrites a third. */
static void look(const char *who, uint64_t *memory, size_t pages, uint64_t base, uint64_t round)
{
    for (size_t page = 0; page < pages; page++) {
        uint64_t generation = base + (page % 3 == 0 ? round : 0);
        if (check_page(memory + page * WORDS, page + 1, generation) >= 0)
            wrong(who, memory + page * WORDS, page + 1, generation);
        if (page % 3 == 0)
            stamp_page(memory + page * WORDS, page + 1, generation + 1);
    }
}

static void *wait_for_end(void *unused)
{
    while (!has_ended(1000))
        ;
    return unused;
}

static int wait_for(pid_t child)
{
    int status;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* The `level`-th generation below the program: 1 for its children. */
static int live(unsigned level)
{
    pid_t child = level < 2 ? fork() : -1;
    if (child == 0)
        _exit(live(level + 1));
    pthread_t thread;
    if (level == 2 && pthread_create(&thread, NULL, wait_for_end, NULL))
        return 2;
    own = map_pages(own_pages);
    stamp_pages(own, 0, own_pages, 10 * level);
    if (write(1, ".", 1) != 1)
        return 3;
    uint64_t round = 0;
    do {
        look("inherited", inherited, inherited_pages, 1, round);
        look("own", own, own_pages, 10 * level, round++);
    } while (!has_ended(20));
    look("inherited, at the end", inherited, inherited_pages, 1, round);
    look("own, at the end", own, own_pages, 10 * level, round);
    return child > 0 && !wait_for(child);
}

int main(int count, char **arguments)
{
    char byte;
    if (count == 2) {
        struct pollfd end = {.fd = atoi(arguments[1]), .events = POLLIN};
        return poll(&end, 1, -1) != 1;
    }
    if (count != 5)
        return 2;
    inherited_pages = strtoul(arguments[1], NULL, 10) * 256;
    own_pages = strtoul(arguments[2], NULL, 10) * 256;
    int children = atoi(arguments[3]);
    results = open(arguments[4], O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (results < 0 || pipe(end_pipe) || children > 16)
        return 2;
    inherited = map_stamped(inherited_pages);
    if (write(1, "!", 1) != 1 || read(0, &byte, 1) != 1)
        return 3;
    pid_t started[17];
    for (int number = 0; number <= children; number++) {
        started[number] = fork();
        if (started[number] != 0)
            continue;
        close(end_pipe[1]);
        if (number < children)
            _exit(live(1));
        char end[16];
        snprintf(end, sizeof end, "%d", end_pipe[0]);
        execl("/proc/self/exe", "forkers", end, (char *)NULL);
        _exit(127);
    }
    while (read(0, &byte, 1) == 1)
        ;
    close(end_pipe[1]);
    int right = 1;
    for (int number = 0; number <= children; number++)
        right &= wait_for(started[number]);
    verify_pages("the program itself", inherited, 0, inherited_pages, 1);
    return !right;
}
