/* How long a fork takes, and a fork with the child's exit, in microseconds: medians of some.
 *
 *   forkcost MEGABYTES FORKS */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 1000

static double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b)
{
    double one = *(const double *)a, other = *(const double *)b;
    return (one > other) - (one < other);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    size_t words = strtoul(argv[1], NULL, 10) << 17;
    int forks = atoi(argv[2]);
    uint64_t *memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || forks < 1 || forks > MOST)
        return 2;
    madvise(memory, words * 8, MADV_NOHUGEPAGE);
    uint64_t random = 1;
    for (size_t i = 0; i < words; i++) {
        random = random * 6364136223846793005UL + 1442695040888963407UL;
        memory[i] = i % 4 ? i / 512 : random;
    }
    usleep(200000);
    static double forked[MOST], gone[MOST];
    for (int i = 0; i < forks; i++) {
        double before = microseconds();
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        forked[i] = microseconds() - before;
        waitpid(child, NULL, 0);
        gone[i] = microseconds() - before;
        usleep(20000);
    }
    qsort(forked, forks, sizeof *forked, ascending);
    qsort(gone, forks, sizeof *gone, ascending);
    printf("fork %.0f us, until the child is gone %.0f us\n", forked[forks / 2], gone[forks / 2]);
    return 0;
}
