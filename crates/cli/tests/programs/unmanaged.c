/* Memory that can be paged out beside memory that cannot.
 *
 *   unmanaged MEGABYTES CHILD_MEGABYTES SECONDS
 *
 * Forks a child past the C library, which fills memory of its own for good, and verifies its own memory again and again. Prints
 * how much of that is resident at the end, in KiB. */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static void require(int is_right, const char *what)
{
    if (!is_right) {
        perror(what);
        _exit(2);
    }
}

static pid_t fork_with(size_t others, const uint64_t *memory, size_t pages)
{
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    require(child >= 0, "clone");
    if (child > 0)
        return child;
    /* Its faults show whose they are. */
    verify_pages("inherited", memory, 0, pages, 1);
    const uint64_t *other = map_stamped(others);
    for (;;) {
        sleep(1);
        verify_pages("child", other, 0, others, 1);
    }
}

/* Of the pages, as the kernel shows them. */
static size_t resident(const uint64_t *memory, size_t pages)
{
    size_t present = 0;
    int file = open("/proc/self/pagemap", O_RDONLY);
    for (size_t page = 0; page < pages; page++) {
        uint64_t entry = 0;
        off_t place = (off_t)((uintptr_t)(memory + page * WORDS) / PAGE * sizeof entry);
        require(pread(file, &entry, sizeof entry, place) == sizeof entry, "pagemap");
        present += entry >> 63;
    }
    close(file);
    return present;
}

int main(int count, char **arguments)
{
    if (count < 4)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256, others = strtoul(arguments[2], NULL, 10) * 256;
    double seconds = strtod(arguments[3], NULL);
    const uint64_t *memory = map_stamped(pages);
    pid_t child = fork_with(others, memory, pages);
    size_t verified = 0;
    for (double began = seconds_now(); seconds_now() - began < seconds; verified++) {
        size_t page = verified % pages;
        verify_pages("own", memory, page, page + 1, 1);
    }
    size_t present = resident(memory, pages);
    require(waitpid(child, NULL, WNOHANG) == 0, "the child");
    kill(child, SIGKILL);
    say("%zu\n", present * PAGE / 1024);
    return 0;
}
