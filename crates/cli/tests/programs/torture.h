/* Shared by the parts of the torture program; see torture.c. */
#ifndef TORTURE_H
#define TORTURE_H

#define _GNU_SOURCE
#include "stamp.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Linux 5.14; musl before 1.2.4 lacks them. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define REGIONS 4
#define MAX_VERIFIERS 32

/* What is known of one page: the generation now in it (0: zeros), and the last ever used. */
struct page_record {
    uint32_t current;
    uint32_t last;
};

/* A mapping owned by one verifier thread.  Only its owner touches it; a forked child
 * reads the snapshot, and leaves out what `busy` and `writing` say was in flux. */
struct region {
    uint64_t *at;
    size_t pages, least, most;
    uint64_t identity;
    struct page_record *record;
    volatile int busy;
    volatile int wiped_on_fork;
};

struct verifier {
    struct region regions[REGIONS];
    uint64_t random;
    struct region *volatile writing_region;
    volatile size_t writing_page;
    int number;
    int pipe[2];
    uint64_t *scratch;
    unsigned long verified, rewritten, disturbed;
} __attribute__((aligned(128)));

/* Disturbances that can be chosen with --disturb. */
enum disturbance {
    GROW, SHRINK, MOVE, PART, DONTUNMAP, DONTNEED, FREE, READONLY, NOACCESS, UNMAP, FIXED,
    SYSCALLS, LOCK, ADVICE, WIPE,
    LAST_OF_OWNER = WIPE,
    CHURN, SPARSE, BRK, FORK, SPAWN, SIGNALS, THREADS,
    DISTURBANCES
};

extern struct verifier verifiers[MAX_VERIFIERS];
extern int verifier_count;
extern unsigned disturbances_on;
extern atomic_int stopping;

static inline int is_on(enum disturbance which)
{
    return (disturbances_on >> which) & 1;
}

static inline uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15UL;
    return mix(*state);
}

/* Keeps stores from being moved over the in-flux markers, as a fork's snapshot is to be
 * a prefix of them: by the compiler on x86-64, whose CPUs keep them in order, elsewhere
 * by the CPU as well. */
static inline void in_order(void)
{
#ifdef __x86_64__
    atomic_signal_fence(memory_order_seq_cst);
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

static inline uint64_t identity_of(const struct region *region, size_t page)
{
    return region->identity + page;
}

static inline uint64_t *page_at(const struct region *region, size_t page)
{
    return region->at + page * WORDS;
}

_Noreturn void fail(const char *what, const struct region *region, size_t page);
_Noreturn void fail_call(const char *what);
void *map_anonymous(size_t pages);
void verify_page(const char *what, struct region *region, size_t page);
void rewrite_page(struct verifier *verifier, struct region *region, size_t page);
void verify_zero(const char *what, const volatile uint64_t *memory, size_t pages);

/* torture_owner.c: one random disturbance, by the owner, of its own region. */
void disturb_own(struct verifier *verifier, struct region *region);

/* torture_threads.c: threads that disturb from beside. */
void start_disturbers(void);
void join_disturbers(void);
extern atomic_ulong forks, spawns, churns, signals_taken;

#endif
