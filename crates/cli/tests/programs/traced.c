/* A program that is stopped at every system call of each of its threads by a tracer that needs its own
 * memory before it lets it go on: as under strace.
 *
 *   traced MEGABYTES OWN
 *
 * The program touches MEGABYTES, the tracer OWN. Prints one line, the same in every run; MISMATCH, and
 * a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define AT_EACH_STOP 4

static size_t pages_of(const char *megabytes)
{
    return strtoul(megabytes, NULL, 10) * 256;
}

static int be_traced(size_t pages)
{
    uint64_t *memory = map_stamped(pages);
    for (unsigned round = 0; round < 2; round++)
        for (size_t page = 0; page < pages; page++) {
            verify_pages("traced", memory, page, page + 1, 1);
            syscall(SYS_getppid);
        }
    say("traced ok\n");
    return 0;
}

/* The signal that a stopped thread is to get when it goes on. */
static int signal_of(int status)
{
    int signal = WSTOPSIG(status);
    return signal == SIGSTOP || (signal & 0x7f) == SIGTRAP ? 0 : signal;
}

static int trace(pid_t program, size_t pages)
{
    uint64_t *memory = map_stamped(pages);
    size_t next = 0;
    int status;
    if (waitpid(program, &status, 0) != program || !WIFSTOPPED(status) ||
        ptrace(PTRACE_SETOPTIONS, program, NULL,
               PTRACE_O_EXITKILL | PTRACE_O_TRACECLONE | PTRACE_O_TRACESYSGOOD) ||
        ptrace(PTRACE_SYSCALL, program, NULL, NULL))
        return 2;
    for (;;) {
        pid_t thread = waitpid(-1, &status, __WALL);
        if (thread < 0)
            return 2;
        if (!WIFSTOPPED(status)) {
            if (thread == program)
                return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
            continue;
        }
        for (unsigned i = 0; i < AT_EACH_STOP; i++, next = (next + 1) % pages)
            verify_pages("tracing", memory, next, next + 1, 1);
        ptrace(PTRACE_SYSCALL, thread, NULL, signal_of(status));
    }
}

int main(int count, char **arguments)
{
    if (count == 2)
        return be_traced(pages_of(arguments[1]));
    if (count != 3)
        return 2;
    pid_t program = fork();
    if (program < 0)
        return 2;
    if (program == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        execl("/proc/self/exe", "traced", arguments[1], NULL);
        _exit(2);
    }
    return trace(program, pages_of(arguments[2]));
}
