/* A program that is stopped, all threads of it, and read while it is, again and again: as by a
 * debugger, or by a check for leaks at its end.
 *
 *   debugged MEGABYTES ROUNDS
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a page is
 * wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define THREADS 64

static uint64_t *memory;
static size_t pages;

/* Stops all threads of a process; returns how many. */
static unsigned stop_all(pid_t process, pid_t *stopped)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)process);
    DIR *threads = opendir(path);
    if (!threads)
        _exit(2);
    unsigned count = 0;
    struct dirent *entry;
    while ((entry = readdir(threads)) && count < THREADS) {
        pid_t thread = atoi(entry->d_name);
        if (thread <= 0 || ptrace(PTRACE_SEIZE, thread, NULL, NULL))
            continue;
        int status;
        if (ptrace(PTRACE_INTERRUPT, thread, NULL, NULL) || waitpid(thread, &status, __WALL) != thread)
            _exit(2);
        stopped[count++] = thread;
    }
    closedir(threads);
    return count;
}

static _Noreturn void debug(pid_t process, unsigned rounds)
{
    static uint64_t copy[WORDS];
    munmap(memory, pages * PAGE);
    for (unsigned round = 0; round < rounds; round++) {
        pid_t stopped[THREADS];
        unsigned count = stop_all(process, stopped);
        if (count == 0)
            _exit(2);
        for (size_t page = 0; page < pages; page++) {
            struct iovec here = {copy, PAGE}, there = {memory + page * WORDS, PAGE};
            if (process_vm_readv(process, &here, 1, &there, 1, 0) != (ssize_t)PAGE) {
                say("FAILED: page %zu cannot be read\n", page);
                _exit(2);
            }
            verify_stamp("read from outside", copy, page + 1, 1);
        }
        while (count)
            ptrace(PTRACE_DETACH, stopped[--count], NULL, NULL);
        usleep(1000 + round * 777 % 9000);
    }
    _exit(0);
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    pages = strtoul(arguments[1], NULL, 10) * 256;
    memory = map_stamped(pages);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    pid_t self = getpid(), debugger = fork();
    if (debugger < 0)
        return 2;
    if (debugger == 0)
        debug(self, strtoul(arguments[2], NULL, 10));
    int status;
    pid_t ended;
    do {
        verify_pages("stopped now and then", memory, 0, pages, 1);
        ended = waitpid(debugger, &status, WNOHANG);
    } while (ended == 0 || (ended < 0 && errno == EINTR));
    if (ended != debugger || status != 0) {
        say("MISMATCH the debugger ended with status %x\n", status);
        return 1;
    }
    say("debugged ok\n");
    return 0;
}
