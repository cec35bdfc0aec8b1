/* Executes itself with so few descriptors that no helper starts, raises that limit, and has a child, which fills so much
 * memory, fork: refusedfork MEGABYTES */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, FORKS = 4 };

static void check(const char *memory, size_t pages)
{
    for (size_t page = 0; page < pages; page++)
        if (*(const size_t *)(memory + page * PAGE) != page + 1)
            _exit(3);
}

/* Whether a child does this without an error. */
static int ends_well(pid_t child)
{
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static void fill_and_fork(size_t pages)
{
    char *memory = malloc(pages * PAGE);
    if (memory == NULL)
        _exit(2);
    for (size_t page = 0; page < pages; page++)
        *(size_t *)(memory + page * PAGE) = page + 1;
    for (int round = 0; round < FORKS; round++) {
        check(memory, pages);
        pid_t child = fork();
        if (child == 0) {
            check(memory, pages);
            _exit(0);
        }
        if (!ends_well(child))
            _exit(4);
    }
    _exit(0);
}

/* The loader needs one, a helper five. */
enum { STANDARD = 3, FEW = STANDARD + 1, MOST = 4096 };

static int execute_with_few(char **argv, struct rlimit limit)
{
    for (int descriptor = STANDARD; descriptor < MOST; descriptor++)
        close(descriptor);
    limit.rlim_cur = FEW;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 2;
    execl("/proc/self/exe", argv[0], argv[1], "with few", NULL);
    return 2;
}

int main(int argc, char **argv)
{
    struct rlimit limit;
    if (argc < 2 || getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 2;
    if (argc == 2)
        return execute_with_few(argv, limit);
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 2;
    pid_t child = fork();
    if (child == 0)
        fill_and_fork(strtoul(argv[1], NULL, 10) * 256);
    if (!ends_well(child))
        return 1;
    puts("refusedfork ok");
    return 0;
}
