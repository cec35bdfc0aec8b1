// Reads memory that was never written, then writes all of it: `zeros MIB before|after`. Under a limit it is read before
// or after there is more in memory than the limit allows. From the end to the start, so that no reader ahead helps.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, FILLER = 64 << 20 };

static unsigned char *map(size_t length) {
    void *start = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || madvise(start, length, MADV_NOHUGEPAGE) != 0) {
        perror("mmap");
        exit(2);
    }
    return start;
}

static void read_all(volatile unsigned char *start, size_t length) {
    for (size_t at = length; at >= PAGE; at -= PAGE)
        if (start[at - PAGE] != 0) {
            puts("not zero");
            exit(1);
        }
}

int main(int count, char **arguments) {
    if (count < 3)
        return 2;
    size_t length = (size_t)atoi(arguments[1]) << 20;
    volatile unsigned char *start = map(length);
    if (strcmp(arguments[2], "after") == 0)
        memset(map(FILLER), 7, FILLER);
    read_all(start, length);
    for (size_t at = length; at >= PAGE; at -= PAGE)
        start[at - PAGE] = (unsigned char)(at / PAGE % 251);
    for (size_t at = length; at >= PAGE; at -= PAGE)
        if (start[at - PAGE] != (unsigned char)(at / PAGE % 251))
            return 1;
    puts("zeros ok");
    return 0;
}
