/* Threads that touch nothing of their own between a long sleep and their end.
 *
 *   thread_end MEGABYTES            on the C library's stacks
 *   thread_end MEGABYTES regions    on stacks side by side in one mapping, with guard regions
 *                                   between them, as the C library makes them from glibc 2.42 on
 *
 * Meanwhile the main thread goes round through so much memory that all else is cold.  The kernel
 * tells a joining thread that a thread is gone by a word beside that thread's stack, which it writes
 * without waiting for a page; prints "joined 8" if all eight came through. */
#define _GNU_SOURCE
#include "stamp.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 8, SECONDS = 2, STACK = 64 * PAGE };

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

static struct timespec nap = {SECONDS, 0};

static void *sleep_and_end(void *unused)
{
    (void)unused;
    /* Not a byte of the stack is read or written between the two calls. */
    __asm__ volatile("syscall\n\t"
                     "mov %[leave], %%eax\n\t"
                     "xor %%edi, %%edi\n\t"
                     "syscall\n\t"
                     "ud2"
                     :
                     : "a"(SYS_nanosleep), "D"(&nap), "S"(0L), [leave] "i"(SYS_exit)
                     : "rcx", "r11", "memory");
    __builtin_unreachable();
}

/* Where thread i's stack begins, with its guard. */
static char *stacks;

static void make_stacks(void)
{
    stacks = mmap(NULL, THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stacks == MAP_FAILED)
        exit(2);
    for (int i = 0; i < THREADS; i++) {
        if (madvise(stacks + i * STACK, PAGE, MADV_GUARD_INSTALL)) {
            printf("no guard regions\n");
            exit(0);
        }
    }
}

static int start_on(pthread_t *thread, int i)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (stacks && pthread_attr_setstack(&attributes, stacks + i * STACK + PAGE, STACK - PAGE))
        return 1;
    return pthread_create(thread, &attributes, sleep_and_end, NULL);
}

/* Whether the kernel still refuses to read the guards. */
static int guards_are_there(void)
{
    int channel[2];
    if (pipe(channel))
        exit(2);
    for (int i = 0; stacks && i < THREADS; i++)
        if (write(channel[1], stacks + i * STACK, 1) != -1 || errno != EFAULT)
            return 0;
    return 1;
}

int main(int count, char **arguments)
{
    if (count != 2 && count != 3)
        return 2;
    if (count == 3)
        make_stacks();
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    uint64_t *memory = map_pages(pages);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        if (start_on(&threads[i], i))
            return 2;
    struct timespec now, end;
    clock_gettime(CLOCK_REALTIME, &end);
    for (uint32_t round = 1;; round++) {
        for (size_t page = 0; page < pages; page++)
            stamp_page(memory + page * WORDS, page, round);
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec > end.tv_sec + SECONDS)
            break;
    }
    now.tv_sec += 20;
    int joined = 0;
    for (int i = 0; i < THREADS; i++)
        joined += pthread_timedjoin_np(threads[i], NULL, &now) == 0;
    printf("joined %d%s\n", joined, guards_are_there() ? "" : ", but a guard is gone");
    return joined != THREADS;
}
