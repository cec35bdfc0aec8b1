/* Accesses ALL MiB of memory, most of which compresses, mostly in its first HOT MiB:
   hot ALL HOT ACCESSES PART WORK, where one access in PART goes anywhere, and WORK random numbers
   are drawn for each. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    size_t all = (size_t)atol(arguments[1]) << 20, hot = (size_t)atol(arguments[2]) << 20;
    long accesses = atol(arguments[3]), part = atol(arguments[4]);
    long work = atol(arguments[5]);
    uint64_t *memory = malloc(all);
    if (!memory)
        return 1;
    for (size_t at = 0; at < all / 8; at++)
        memory[at] = at % 16 ? at / 512 : next();
    uint64_t sum = 0;
    for (long access = 0; access < accesses; access++) {
        size_t range = next() % (uint64_t)part ? hot : all;
        size_t at = next() % (range / 8);
        sum += memory[at];
        memory[at] ^= (uint64_t)access;
        for (long step = 0; step < work; step++)
            sum += next();
    }
    printf("%llu\n", (unsigned long long)sum);
    return 0;
}
