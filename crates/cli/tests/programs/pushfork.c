/* Forks by a system call whose number comes from the stack, as code that is made to be small does.
 *
 *   pushfork MEGABYTES ROUNDS
 *
 * Parent and child verify their memory.  Prints "pushfork ok". */
#define _GNU_SOURCE
#include "filter.h"

#include <stdlib.h>
#include <sys/wait.h>

static pid_t push_fork(void)
{
    long result;
    __asm__ volatile("push $57\n\tpop %%rax\n\tsyscall" : "=a"(result) : : "rcx", "r11", "memory");
    return result;
}

int main(int argc, char **argv)
{
    size_t pages = (argc > 1 ? strtoul(argv[1], NULL, 10) : 32) * 256;
    int rounds = argc > 2 ? atoi(argv[2]) : 4;
    uint64_t *memory = map_stamped(pages);
    for (int round = 0; round < rounds; round++) {
        pid_t child = push_fork();
        verify_pages(child ? "parent" : "child", memory, 0, pages, 1);
        if (child == 0)
            _exit(0);
        int status = -1;
        must(waitpid(child, &status, 0) != child || status != 0, "a child");
    }
    puts("pushfork ok");
    return 0;
}
