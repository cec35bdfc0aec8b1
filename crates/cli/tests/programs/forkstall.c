/* Forks beside a program that keeps the page states of its own children waiting.
 *
 *   forkstall stall MEGABYTES        forks for ever; threads move memory without a pause once there is a child
 *   forkstall fork MEGABYTES FORKS   forks, and says how long that took at most, in milliseconds
 *
 * MISMATCH on stdout, and a status that is not 0, where a child lacks memory or a fork fails. */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>

#define MOVERS 4
/* Seconds. */
#define STALL 3.0
#define PIECE (16 * PAGE)
/* Pages that a child looks at. */
#define LOOKS 16

static size_t pages;
static uint64_t *memory;
static atomic_int forking;

/* Keeps those that move from the CPU in the midst of it. */
static void *spin(void *unused)
{
    for (;;)
        if (!atomic_load(&forking))
            usleep(100);
    return unused;
}

/* Moves as soon as there is a child, which is before that has its page states. */
static void *move(void *piece)
{
    char *at = piece, *other = (char *)map_pages(PIECE / PAGE);
    for (;;) {
        siginfo_t none;
        if (!atomic_load(&forking)) {
            usleep(100);
            continue;
        }
        if (waitid(P_ALL, 0, &none, WEXITED | WNOHANG | WNOWAIT))
            continue;
        if (mremap(at, PIECE, PIECE, MREMAP_MAYMOVE | MREMAP_FIXED, other) == MAP_FAILED)
            _exit(3);
        char *before = at;
        at = other;
        other = before;
    }
    return NULL;
}

static void begin(void)
{
    atomic_store(&forking, 1);
}

/* Others are free for other programs. */
static void on_cpu(int cpu, void *(*what)(void *), void *argument)
{
    pthread_attr_t attributes;
    pthread_t thread;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_attr_init(&attributes);
    pthread_attr_setaffinity_np(&attributes, sizeof one, &one);
    if (pthread_create(&thread, &attributes, what, argument))
        _exit(2);
}

static void stall(void)
{
    int cpu = sched_getcpu();
    on_cpu(cpu, spin, NULL);
    for (int i = 0; i < MOVERS; i++)
        on_cpu(cpu, move, (char *)memory + i * 2 * PIECE);
    pthread_atfork(begin, NULL, NULL);
    for (;;) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        double began = seconds_now();
        while (seconds_now() < began + STALL)
            usleep(10000);
        atomic_store(&forking, 0);
        if (child > 0)
            waitpid(child, NULL, 0);
        usleep(20000);
    }
}

int main(int count, char **arguments)
{
    if (count < 3)
        return 2;
    pages = strtoul(arguments[2], NULL, 10) * 256;
    memory = map_stamped(pages);
    /* Long enough to be taken under management. */
    usleep(300000);
    if (!strcmp(arguments[1], "stall"))
        stall();
    double longest = 0;
    for (int left = count > 3 ? atoi(arguments[3]) : 1; left > 0; left--) {
        double began = seconds_now();
        pid_t child = fork();
        if (child == 0) {
            for (size_t look = 0; look < LOOKS; look++) {
                size_t page = look * pages / LOOKS;
                verify_pages("inherited", memory, page, page + 1, 1);
            }
            _exit(0);
        }
        int status = -1;
        if (child > 0)
            waitpid(child, &status, 0);
        if (status != 0) {
            say("MISMATCH a fork failed, or its child, with status %x\n", status);
            return 1;
        }
        double took = seconds_now() - began;
        longest = took > longest ? took : longest;
        usleep(50000);
    }
    say("%ld\n", (long)(longest * 1000));
    return 0;
}
