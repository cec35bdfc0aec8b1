/* Fills its memory, waits until half of it is paged out, forbids itself a system call that it does not need, and leaves a
 * child that touches nothing and only waits.
 *
 *   quiet MEGABYTES
 */
#define _GNU_SOURCE
#include "filter.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* 0 if that is not known. */
static unsigned long resident_pages(void)
{
    unsigned long resident = 0;
    FILE *sizes = fopen("/proc/self/statm", "r");
    if (sizes == NULL || fscanf(sizes, "%*u %lu", &resident) != 1)
        resident = 0;
    if (sizes != NULL)
        fclose(sizes);
    return resident;
}

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    map_stamped(pages);
    /* Else its child has everything, and needs memfold no more. */
    while (resident_pages() > pages / 2)
        usleep(10000);
    const int refused[] = {SYS_reboot};
    filter_system_calls(refused, 1, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW);
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    say(child < 0 ? "" : ".");
    return child < 0 || waitpid(child, NULL, 0) != child;
}
