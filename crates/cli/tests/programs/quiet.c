/* Fills its memory, forbids itself a system call that it does not need, and leaves a child that touches
 * nothing and only waits.
 *
 *   quiet MEGABYTES
 */
#define _GNU_SOURCE
#include "filter.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    map_stamped(strtoul(arguments[1], NULL, 10) * 256);
    const int refused[] = {SYS_reboot};
    filter_system_calls(refused, 1, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW);
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    say(child < 0 ? "" : ".");
    return child < 0 || waitpid(child, NULL, 0) != child;
}
