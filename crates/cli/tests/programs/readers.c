/* Children that only read the memory of their parent, and each write to all of what they share with it by mmap.
 *
 *   readers MEGABYTES CHILDREN PASSES [MAPPED_SHARED_MEGABYTES] */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS 512

/* One word of each cache line. */
static uint64_t sum(const uint64_t *memory, size_t pages)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < pages * WORDS; i += 8)
        sum += memory[i];
    return sum;
}

static void touch(volatile uint64_t *memory, size_t pages)
{
    for (size_t i = 0; i < pages * WORDS; i += WORDS)
        memory[i] = i;
}

int main(int argc, char **argv)
{
    if (argc != 4 && argc != 5)
        return 2;
    size_t pages = strtoul(argv[1], NULL, 10) << 8;
    int children = atoi(argv[2]), passes = atoi(argv[3]);
    uint64_t *memory =
        mmap(NULL, pages * WORDS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 2;
    size_t shared_pages = argc == 5 ? strtoul(argv[4], NULL, 10) << 8 : 1;
    volatile uint64_t *shared =
        mmap(NULL, shared_pages * WORDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 2;
    uint64_t random = 1;
    for (size_t i = 0; i < pages * WORDS; i++) {
        random = random * 6364136223846793005UL + 1442695040888963407UL;
        memory[i] = i % 4 ? i / WORDS : random;
    }
    uint64_t expected = sum(memory, pages);
    for (int child = 0; child < children; child++)
        if (fork() == 0) {
            for (int pass = 0; pass < passes; pass++)
                if (sum(memory, pages) != expected)
                    _exit(1);
                else
                    touch(shared, shared_pages);
            usleep(100000);
            _exit(0);
        }
    int status, wrong = 0;
    while (wait(&status) > 0)
        wrong += status != 0;
    printf("%d children read wrong\n", wrong);
    return wrong != 0;
}
