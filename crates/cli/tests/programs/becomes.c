/* A program whose loader takes long, and, built with -DBEFORE, static ones that it is executed by.
 *
 *   becomes                           says how often memfold's library is mapped
 *   before executes DELAY PROGRAM     executes PROGRAM after DELAY microseconds
 *   before spawns DELAY PROGRAM       the same in 20 children by vfork, one after the other, and says its own number then
 *
 * Numbers on stdout, a line each. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>
#include <sys/wait.h>

static int copies(void)
{
    static char line[8192];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long offset = 1;
        sscanf(line, "%*s %*s %lx", &offset);
        found += offset == 0 && strstr(line, "/libmemfold");
    }
    return found;
}

#ifdef BEFORE

static void become(char **arguments)
{
    usleep((unsigned)atoi(arguments[2]));
    execv(arguments[3], arguments + 3);
    _exit(1);
}

int main(int count, char **arguments)
{
    if (count < 4)
        return 2;
    if (!strcmp(arguments[1], "executes"))
        become(arguments);
    for (int child = 0; child < 20; child++) {
        int status;
        pid_t pid = vfork();
        if (pid == 0)
            become(arguments);
        if (waitpid(pid, &status, 0) != pid || status != 0)
            return 1;
    }
    say("%d\n", copies());
    return 0;
}

#else

/* Before the constructor of any library. */
static void wait_for_some_time(void)
{
    usleep(300000);
}

__attribute__((section(".preinit_array"), used)) static void (*const before_all)(void) = wait_for_some_time;

int main(void)
{
    say("%d\n", copies());
    return 0;
}

#endif
