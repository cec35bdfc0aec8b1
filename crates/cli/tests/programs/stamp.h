/* Stamped pages: every page says whose it is, and can be checked word by word.
 *
 * The contents follow from an identity (unique in the process, it moves with the
 * page when its mapping moves) and a generation (how often it was rewritten).  So
 * lost, stale, mixed-up and zeroed pages are all noticed, and the report can say
 * which of these it was.  The kinds of contents differ in how they compress. */
#ifndef STAMP_H
#define STAMP_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define STAMP_KEY 0x5bd1e995a7f3c6d1UL

/* New memory; ends the process, as one that was used wrongly, where there is none. */
static inline uint64_t *map_pages(size_t pages)
{
    void *start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        _exit(2);
    return start;
}

static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15UL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9UL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebUL;
    return x ^ (x >> 31);
}

/* The first word of a stamped page; reversible, for reports. */
static inline uint64_t stamp_word(uint64_t identity, uint64_t generation)
{
    return ((identity << 24) | (generation & 0xffffff)) ^ STAMP_KEY;
}

/* Word `i` of the page.  A quarter each: repeated text, noise, one repeated word,
 * nearly empty; one page in 16 is all zero. */
static inline uint64_t expected_word(uint64_t identity, uint64_t generation, unsigned i)
{
    uint64_t first = stamp_word(identity, generation);
    uint64_t seed = mix(first);
    if (seed % 16 == 0)
        return 0;
    if (i == 0)
        return first;
    switch ((seed >> 8) % 4) {
    case 0:
        return i % 4 == 3 ? mix(seed + i) : 0x6f77206f6c6c6568UL + (seed & 0xff) + i % 32;
    case 1:
        return mix(seed + i);
    case 2:
        return first;
    default:
        return i % 64 == 5 ? seed + i : 0;
    }
}

/* Generation 0 is memory as the kernel gives it: zeros. */
static inline uint64_t page_word(uint64_t identity, uint64_t generation, unsigned i)
{
    return generation == 0 ? 0 : expected_word(identity, generation, i);
}

static inline void stamp_page(volatile uint64_t *page, uint64_t identity, uint64_t generation)
{
    for (unsigned i = 0; i < WORDS; i++)
        page[i] = page_word(identity, generation, i);
}

/* Index of the first word that is wrong, or -1. */
static inline int check_page(const volatile uint64_t *page, uint64_t identity, uint64_t generation)
{
    for (unsigned i = 0; i < WORDS; i++)
        if (page[i] != page_word(identity, generation, i))
            return (int)i;
    return -1;
}

/* Prints without stdio: usable in a forked child of a threaded program. */
static inline void say(const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 1)
        length = sizeof line - 1;
    if (write(1, line, (size_t)length) < 0)
        _exit(3);
}

/* Reports a wrong page: what, where, how much of it, and what is there instead. */
static inline void report_page(const char *who, const volatile uint64_t *page, uint64_t identity,
                               uint64_t generation)
{
    unsigned wrong = 0, zero = 0, first = WORDS;
    for (unsigned i = 0; i < WORDS; i++) {
        if (page[i] != page_word(identity, generation, i)) {
            wrong++;
            if (first == WORDS)
                first = i;
        }
        zero += page[i] == 0;
    }
    if (first == WORDS) {
        say("MISMATCH %s: page %p pid %d was wrong when first read, and is right now\n", who,
            (void *)page, (int)getpid());
        return;
    }
    uint64_t found = page[0] ^ STAMP_KEY;
    say("MISMATCH %s: pid %d address %p word %u: expected %016lx found %016lx\n", who, (int)getpid(),
        (void *)(page + first), first, page_word(identity, generation, first), page[first]);
    say("  expected identity %lx generation %lu; %u of %lu words wrong, %u zero\n", identity, generation,
        wrong, WORDS, zero);
    if (zero == WORDS)
        say("  the page is all zero\n");
    else
        say("  as a stamp, word 0 is identity %lx generation %lu%s\n", found >> 24, found & 0xffffff,
            (found >> 24) == identity ? " (this page, another time)" : "");
}

/* Ends the process, with a report, if a page is not as it was stamped. */
static inline void verify_stamp(const char *who, const volatile uint64_t *page, uint64_t identity,
                                uint64_t generation)
{
    if (check_page(page, identity, generation) >= 0) {
        report_page(who, page, identity, generation);
        _exit(1);
    }
}

/* Stamps pages of a mapping by their places in it. */
static inline void stamp_pages(uint64_t *memory, size_t first, size_t end, uint64_t generation)
{
    for (size_t page = first; page < end; page++)
        stamp_page(memory + page * WORDS, page + 1, generation);
}

/* New memory, stamped for the first time. */
static inline uint64_t *map_stamped(size_t pages)
{
    uint64_t *memory = map_pages(pages);
    stamp_pages(memory, 0, pages, 1);
    return memory;
}

/* Ends the process at the first page that is not as `stamp_pages` left it. */
static inline void verify_pages(const char *who, const uint64_t *memory, size_t first, size_t end,
                                uint64_t generation)
{
    for (size_t page = first; page < end; page++)
        verify_stamp(who, memory + page * WORDS, page + 1, generation);
}

/* Seconds of a clock that is never set. */
static inline double seconds_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

#endif
