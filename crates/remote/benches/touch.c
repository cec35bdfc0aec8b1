/* Fills memory with pages that compress about 2:1, then reads a word of random
 * pages, and times each read: touch MEBIBYTES READS.  Prints the pages filled a
 * second, and of the reads that faulted the number a second, p50 and p99. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE 4096
#define WORDS (PAGE / 8)
/* A read that takes longer has faulted. */
#define FAULT_NS 1500

static uint64_t state = 88172645463325252ull;

static uint64_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static int compare(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    size_t reads = strtoul(arguments[2], NULL, 10);
    uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t *times = malloc(reads * sizeof *times);
    if (memory == MAP_FAILED || !times)
        return 2;
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    uint64_t began = now();
    for (size_t page = 0; page < pages; page++)
        for (size_t word = 0; word < WORDS; word++)
            memory[page * WORDS + word] = word % 2 ? page : next_random();
    double fill = (now() - began) / 1e9;
    size_t faults = 0;
    uint64_t sum = 0;
    began = now();
    for (size_t read = 0; read < reads; read++) {
        size_t page = next_random() % pages;
        uint64_t start = now();
        uint64_t word = *(volatile uint64_t *)(memory + page * WORDS + 1);
        uint64_t time = now() - start;
        if (word != page)
            return 1;
        sum += word;
        if (time > FAULT_NS)
            times[faults++] = time;
    }
    double took = (now() - began) / 1e9;
    qsort(times, faults, sizeof *times, compare);
    printf("%.0f %.0f %.0f %.0f\n", pages / fill, faults / took,
           faults ? times[faults / 2] / 1e3 : 0, faults ? times[faults * 99 / 100] / 1e3 : 0);
    return sum == 1;
}
