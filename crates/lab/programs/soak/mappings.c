/* Replaces mappings of 256 KiB at random addresses, their number constant.
   Runs while the file named by its argument exists. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PIECES 192
#define PIECE (256 << 10)
#define PAGE 4096
/* Range of the addresses, in units of PIECE: 1 TiB to 101 TiB. */
#define LOWEST (UINT64_C(1) << 22)
#define SPREAD (UINT64_C(100) << 22)

static uint64_t state = 88172645463325252;

static uint64_t next(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static uint64_t stamp(const char *page) {
    return (uintptr_t)page * UINT64_C(0x9e3779b97f4a7c15);
}

static char *map(void) {
    for (;;) {
        void *wanted = (void *)((LOWEST + next() % SPREAD) * PIECE);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        char *piece = mmap(wanted, PIECE, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (piece == MAP_FAILED)
            continue;
        for (char *page = piece; page < piece + PIECE; page += PAGE)
            for (int word = 0; word < PAGE / 8; word += 1 + word % 3)
                ((uint64_t *)page)[word] = stamp(page) + word;
        return piece;
    }
}

static void check(char *piece) {
    for (char *page = piece; page < piece + PIECE; page += PAGE)
        for (int word = 0; word < PAGE / 8; word += 1 + word % 3)
            if (((uint64_t *)page)[word] != stamp(page) + word) {
                fprintf(stderr, "WRONG RESULT: %p\n", (void *)page);
                exit(3);
            }
}

int main(int count, char **arguments) {
    static char *pieces[PIECES];
    if (count != 2)
        return 2;
    for (int index = 0; index < PIECES; index++)
        pieces[index] = map();
    puts("ready");
    fflush(stdout);
    while (access(arguments[1], F_OK) == 0)
        for (int round = 0; round < 20; round++) {
            char **piece = &pieces[next() % PIECES];
            check(*piece);
            munmap(*piece, PIECE);
            *piece = map();
            usleep(2000);
        }
    return 0;
}
