/* Forks past the C library, where memfold prepares forks: the child lacks what is managed, and must not read zeros there.
 *
 *   rawclone MEGABYTES
 *
 * It forks through the C library, too.  Prints how many children ended by SIGSEGV, and
 * how many had everything; fails if one read anything else than was written. */
#define _GNU_SOURCE
#include "filter.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>

int main(int argc, char **argv)
{
    size_t pages = (argc > 1 ? strtoul(argv[1], NULL, 10) : 32) * 256;
    uint64_t *memory = map_stamped(pages);
    verify_pages("before", memory, 0, pages, 1);
    int lacking = 0, complete = 0;
    for (int round = 0; round < 10; round++) {
        pid_t prepared = fork();
        if (prepared == 0) {
            verify_pages("prepared child", memory, 0, pages, 1);
            _exit(0);
        }
        int status = -1;
        must(waitpid(prepared, &status, 0) != prepared || status != 0, "a prepared child");
        /* Nothing of the C library's may run in this one. */
        pid_t raw = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (raw == 0) {
            for (size_t page = 0; page < pages; page++)
                if (check_page(memory + page * WORDS, page + 1, 1) >= 0)
                    syscall(SYS_exit_group, 3);
            syscall(SYS_exit_group, 0);
        }
        must(waitpid(raw, &status, 0) != raw, "waitpid");
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV)
            lacking++;
        else if (status == 0)
            complete++;
        else
            must(1, "a raw child read what was never written");
    }
    verify_pages("after", memory, 0, pages, 1);
    printf("%d lack memory, %d are complete\n", lacking, complete);
    return 0;
}
