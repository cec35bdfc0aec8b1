/* Two processes that call themselves by the same number, each in a pid namespace of its own.
 *
 *   namespaces managed|unmanaged MEGABYTES
 *
 * The first gives back all that it inherited, or executes a program that is not managed; then the
 * second verifies what it inherited.  Prints one line, the same in every run; MISMATCH, and a status
 * that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

static uint64_t *memory;
static size_t pages;
/* Its writing end is closed once the first process is as the second must not be. */
static int ready[2];

static _Noreturn void be_another_managed(void)
{
    munmap(memory, pages * PAGE);
    close(ready[1]);
    for (;;)
        pause();
}

static _Noreturn void be_another_unmanaged(void)
{
    char *arguments[] = {"sleep", "600", NULL}, *environment[] = {NULL};
    execve("/bin/sleep", arguments, environment);
    _exit(2);
}

static _Noreturn void verify(void)
{
    verify_pages("inherited", memory, 0, pages, 1);
    _exit(0);
}

/* Makes a process that lives as number 1 of a namespace; returns the parent of that. */
static pid_t make(void (*live)(void))
{
    pid_t maker = fork();
    if (maker < 0)
        _exit(2);
    if (maker > 0)
        return maker;
    if (unshare(CLONE_NEWPID)) {
        say("FAILED: no pid namespace can be made\n");
        _exit(2);
    }
    pid_t first = fork();
    if (first < 0)
        _exit(2);
    if (first == 0) {
        if (getpid() != 1)
            _exit(2);
        live();
    }
    close(ready[1]);
    int status;
    if (waitpid(first, &status, 0) != first || status != 0)
        _exit(1);
    _exit(0);
}

/* Ends what `make` made; its number is not known here. */
static void end(pid_t maker)
{
    char path[64];
    int first, status;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)maker, (int)maker);
    FILE *children = fopen(path, "r");
    if (!children || fscanf(children, "%d", &first) != 1)
        _exit(2);
    fclose(children);
    kill(first, SIGKILL);
    waitpid(maker, &status, 0);
}

int main(int count, char **arguments)
{
    if (count != 3 || pipe2(ready, O_CLOEXEC))
        return 2;
    int managed = strcmp(arguments[1], "managed") == 0;
    pages = strtoul(arguments[2], NULL, 10) * 256;
    memory = map_stamped(pages);
    pid_t other = make(managed ? be_another_managed : be_another_unmanaged);
    close(ready[1]);
    char byte;
    if (read(ready[0], &byte, 1) != 0)
        return 2;
    pid_t second = make(verify);
    int status, ended = waitpid(second, &status, 0) == second;
    end(other);
    if (!ended || status != 0) {
        say("MISMATCH the second process: status %x\n", status);
        return 1;
    }
    verify_pages("parent's", memory, 0, pages, 1);
    say("namespaces ok\n");
    return 0;
}
