/* Forks in a loop, and in the handler of a signal that comes at any moment of such a fork. Each child verifies what it
 * inherited.
 *
 *   alarmfork MEGABYTES FORKS
 *   alarmfork under PROGRAM [ARGUMENT...]  executes PROGRAM under a filter that forbids it nothing that it needs
 *
 * MISMATCH on stdout, and a status that is not 0, where a child lacks memory. */
#define _GNU_SOURCE
#include "filter.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

/* Microseconds that a fork takes, about. */
#define LONGEST 1500
/* Pages that a child looks at. */
#define LOOKS 16

static size_t pages;
static uint64_t *memory;

static void fork_and_verify(const char *who)
{
    pid_t child = fork();
    if (child == 0) {
        for (size_t look = 0; look < LOOKS; look++) {
            size_t page = look * pages / LOOKS;
            verify_pages(who, memory, page, page + 1, 1);
        }
        _exit(0);
    }
    int status = -1;
    if (child > 0)
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
    if (status != 0) {
        say("MISMATCH the child of %s ended with status %x\n", who, status);
        _exit(1);
    }
}

static void on_alarm(int signal)
{
    (void)signal;
    int before = errno;
    fork_and_verify("a handler");
    errno = before;
}

int main(int count, char **arguments)
{
    if (count > 2 && !strcmp(arguments[1], "under")) {
        static const int refused[] = {SYS_reboot};
        filter_system_calls(refused, 1, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW);
        execv(arguments[2], arguments + 2);
        return 2;
    }
    if (count != 3)
        return 2;
    pages = strtoul(arguments[1], NULL, 10) * 256;
    int forks = atoi(arguments[2]);
    memory = map_stamped(pages);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    must(sigaction(SIGALRM, &action, NULL), "sigaction");
    for (int i = 0; i < forks; i++) {
        struct itimerval once = {.it_value.tv_usec = 1 + i * LONGEST / forks};
        must(setitimer(ITIMER_REAL, &once, NULL), "setitimer");
        fork_and_verify("the loop");
    }
    say("alarmfork ok\n");
    return 0;
}
