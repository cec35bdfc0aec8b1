/* Forks three levels deep; every process verifies what it inherited, changes its
 * own copy, and verifies again while its relatives do the same.
 *
 *   forktree MEGABYTES [count]
 *
 * With "count" it says how many pages were out that descendants had written themselves, and not read again yet.
 *
 * In the middle a child executes this program anew, and one outlives its parent:
 * it is waited for through a pipe.  Prints one line, the same in every run. */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>

#define LEVELS 3
#define CHILDREN 2

static size_t pages;
static uint64_t *memory;
static int orphan_pipe[2];
/* Shared by all processes; NULL where nothing is counted. */
static atomic_ulong *own_pages_out;

/* Generation of `page` for a process: its last writer in the line of ancestors. */
static uint64_t generation(const unsigned *line, unsigned level, size_t page)
{
    for (unsigned l = level; l > 0; l--)
        if (page % (LEVELS + 3) == l)
            return line[l];
    return 1;
}

static void verify(const unsigned *line, unsigned level, const char *when)
{
    for (size_t page = 0; page < pages; page++) {
        uint64_t expected = generation(line, level, page);
        verify_stamp(when, memory + page * WORDS, page + 1, expected);
    }
}

/* Whether the kernel has nothing where a page was written. */
static int is_out(int pagemap, size_t page)
{
    uint64_t entry;
    off_t at = (off_t)(((uintptr_t)memory / PAGE + page) * sizeof entry);
    if (pread(pagemap, &entry, sizeof entry, at) != sizeof entry) {
        say("pagemap cannot be read\n");
        _exit(2);
    }
    return !(entry >> 63);
}

static void count_own_pages_out(unsigned level)
{
    if (!own_pages_out || level == 0)
        return;
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (size_t page = level; page < pages; page += LEVELS + 3)
        if (is_out(pagemap, page))
            atomic_fetch_add(own_pages_out, 1);
    close(pagemap);
}

static void wait_for(pid_t child)
{
    int status;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        say("MISMATCH a child of %d ended with status %x\n", (int)getpid(), status);
        _exit(1);
    }
}

static void live(unsigned *line, unsigned level);

static pid_t spawn(unsigned *line, unsigned level, unsigned number)
{
    pid_t child = fork();
    if (child < 0) {
        say("fork failed\n");
        _exit(2);
    }
    if (child == 0) {
        /* Numbers differ between all processes of a level: cousins must not be confused. */
        line[level + 1] = 2 + line[level] * 16 + number;
        verify(line, level, "inherited");
        live(line, level + 1);
        _exit(0);
    }
    return child;
}

/* A child whose parent ends first: it verifies the snapshot after that. */
static void leave_orphan(unsigned *line, unsigned level)
{
    pid_t middle = fork();
    if (middle == 0) {
        if (fork() == 0) {
            for (int tries = 0; getppid() == middle && tries < 100; tries++)
                usleep(10000);
            usleep(50000);
            verify(line, level, "orphan");
            if (write(orphan_pipe[1], "o", 1) != 1)
                _exit(3);
        }
        _exit(0);
    }
    wait_for(middle);
}

static void execute_anew(void)
{
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "forktree", "leaf", (char *)NULL);
        _exit(127);
    }
    wait_for(child);
}

static void live(unsigned *line, unsigned level)
{
    pid_t children[CHILDREN];
    for (size_t page = 0; page < pages; page++)
        if (level > 0 && page % (LEVELS + 3) == level)
            stamp_page(memory + page * WORDS, page + 1, line[level]);
    if (level < LEVELS) {
        for (unsigned number = 0; number < CHILDREN; number++)
            children[number] = spawn(line, level, number);
        verify(line, level, "while children run");
        if (level == 1)
            execute_anew();
        if (level == 1)
            leave_orphan(line, level);
        for (unsigned number = 0; number < CHILDREN; number++)
            wait_for(children[number]);
    }
    count_own_pages_out(level);
    verify(line, level, "at the end");
}

int main(int count, char **arguments)
{
    if (count == 2 && !strcmp(arguments[1], "leaf")) {
        pages = 1024;
    } else if (count == 2 || (count == 3 && !strcmp(arguments[2], "count"))) {
        pages = strtoul(arguments[1], NULL, 10) * 256;
    } else {
        return 2;
    }
    if (count == 3) {
        own_pages_out = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (own_pages_out == MAP_FAILED)
            return 2;
    }
    memory = map_pages(pages);
    if (pipe(orphan_pipe))
        return 2;
    stamp_pages(memory, 0, pages, 1);
    unsigned line[LEVELS + 2] = {1};
    if (!strcmp(arguments[1], "leaf")) {
        verify(line, 0, "executed anew");
        return 0;
    }
    live(line, 0);
    /* Two processes of level 1 each leave an orphan behind. */
    close(orphan_pipe[1]);
    char byte;
    int orphans = 0;
    while (read(orphan_pipe[0], &byte, 1) == 1)
        orphans++;
    if (orphans != CHILDREN) {
        say("MISMATCH %d orphans reported instead of %d\n", orphans, CHILDREN);
        return 1;
    }
    if (own_pages_out)
        say("%lu pages that descendants wrote were out\n", atomic_load(own_pages_out));
    say("forktree ok: %d levels, %d orphans\n", LEVELS, orphans);
    return 0;
}
