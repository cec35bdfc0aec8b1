/* One process changes its mappings without a pause, so that a change is in progress nearly always;
 * another one reads more memory than it may keep, and says how long a read took at most.
 *
 *   restless SECONDS THREADS [idle]
 *
 * With idle, the threads hardly ever get a CPU, and changes stay half done for long. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define MIB (1UL << 20)

static int threads = 6;
static int is_idle;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static volatile char *filled(size_t bytes)
{
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    for (size_t i = 0; i < bytes; i += 64)
        *(uint64_t *)(memory + i) = i * 0x9e3779b97f4a7c15UL;
    return memory;
}

static void *move_for_ever(void *unused)
{
    (void)unused;
    struct sched_param none = {0};
    if (is_idle && sched_setscheduler(0, SCHED_IDLE, &none))
        abort();
    size_t size = 2 * MIB;
    char *memory = (char *)filled(size);
    for (;;) {
        char *target = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = mremap(memory, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, target);
        if (memory == MAP_FAILED)
            abort();
        for (size_t i = 0; i < size; i += PAGE)
            memory[i]++;
    }
}

static void *spin(void *unused)
{
    (void)unused;
    for (;;)
        ;
    return NULL;
}

static void starve(void)
{
    filled(24 * MIB);
    pthread_t thread;
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread, NULL, move_for_ever, NULL))
            abort();
    /* They are managed, and move, before they starve. */
    usleep(300000);
    for (int i = 0; is_idle && i < 3; i++)
        if (pthread_create(&thread, NULL, spin, NULL))
            abort();
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    double lasts = argc > 1 ? atof(argv[1]) : 2;
    threads = argc > 2 ? atoi(argv[2]) : threads;
    is_idle = argc > 3;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    if (is_idle && sched_setaffinity(0, sizeof one, &one))
        abort();
    pid_t starved = fork();
    if (starved == 0)
        starve();
    usleep(500000);
    size_t size = 32 * MIB;
    volatile char *memory = filled(size);
    double longest = 0, began = seconds();
    uint64_t sum = 0, random = 1;
    while (seconds() - began < lasts) {
        random = random * 6364136223846793005UL + 1442695040888963407UL;
        size_t at = (random >> 20) % (size / PAGE) * PAGE;
        double before = seconds();
        sum += memory[at];
        double took = seconds() - before;
        longest = took > longest ? took : longest;
    }
    kill(starved, SIGKILL);
    waitpid(starved, NULL, 0);
    printf("longest %.0f ms\n", longest * 1e3);
    return sum == 1;
}
