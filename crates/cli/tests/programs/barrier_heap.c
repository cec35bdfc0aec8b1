/* Processes that find their own writes by mprotect, as some garbage collectors do.
 *
 *   barrier_heap PROCESSES MEGABYTES CYCLES
 *
 * Each forks from one heap. In each cycle it makes the heap read-only, reads all of it, counts in
 * memory beside it for each page, and writes to some blocks, which a handler of SIGSEGV makes
 * writable. Prints one line, the same
 * in every run; MISMATCH, and a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { BLOCK = 16, SCRATCH = 128 };

static size_t pages;
static uint64_t *memory;
static volatile sig_atomic_t writes;

static void allow_writes(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)context;
    char *block = (char *)((uintptr_t)info->si_addr & -(uintptr_t)(BLOCK * PAGE));
    writes++;
    if (mprotect(block, BLOCK * PAGE, PROT_READ | PROT_WRITE) != 0)
        _exit(2);
}

static void collect(uint64_t number, uint64_t cycles)
{
    struct sigaction action = { .sa_sigaction = allow_writes, .sa_flags = SA_SIGINFO | SA_NODEFER };
    sigaction(SIGSEGV, &action, NULL);
    size_t blocks = pages / BLOCK;
    uint64_t *generations = calloc(pages, sizeof *generations);
    for (size_t page = 0; page < pages; page++)
        generations[page] = 1;
    uint64_t *scratch = map_pages(SCRATCH);
    for (uint64_t cycle = 1; cycle <= cycles; cycle++) {
        if (mprotect(memory, pages * PAGE, PROT_READ) != 0)
            _exit(2);
        for (size_t page = 0; page < pages; page++) {
            verify_stamp("process", memory + page * WORDS, page + 1, generations[page]);
            scratch[page * 37 % SCRATCH * WORDS]++;
        }
        for (size_t block = number % 3; block < blocks; block += 3) {
            size_t page = block * BLOCK + cycle % BLOCK;
            generations[page] = 1000 * number + cycle;
            stamp_page(memory + page * WORDS, page + 1, generations[page]);
        }
    }
    if (!writes)
        _exit(2);
    _exit(0);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    uint64_t processes = strtoul(argv[1], NULL, 10), cycles = strtoul(argv[3], NULL, 10);
    pages = strtoul(argv[2], NULL, 10) * 256;
    memory = map_stamped(pages);
    for (uint64_t number = 1; number <= processes; number++) {
        pid_t child = fork();
        if (child < 0)
            return 2;
        if (child == 0)
            collect(number, cycles);
    }
    for (uint64_t number = 1; number <= processes; number++) {
        int status;
        if (wait(&status) < 0 || status != 0) {
            say("MISMATCH a process ended with status %x\n", status);
            return 1;
        }
    }
    say("%lu processes ok\n", (unsigned long)processes);
    return 0;
}
