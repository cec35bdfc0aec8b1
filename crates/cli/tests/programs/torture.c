/* Many threads verify stamped pages for ever while everything that moves, drops,
 * protects, maps and forks memory goes on beside them.
 *
 *   torture [--seconds S] [--megabytes M] [--threads T] [--seed N]
 *           [--disturb all|none|NAME,NAME…]
 *
 * Each verifier thread owns regions and knows the contents of every page.  The
 * disturbances before `wipe` in the list of names are done by the owner to its own
 * regions; the others are threads of their own.  Any page that is not as expected
 * is reported with address, expected and found words, and ends the program with
 * exit code 1; a system call that fails unexpectedly with exit code 2. */
#include "torture.h"

#include <malloc.h>
#include <pthread.h>

struct verifier verifiers[MAX_VERIFIERS];
int verifier_count = 2;
unsigned disturbances_on;
atomic_int stopping;

static const char *const names[DISTURBANCES] = {
    "grow", "shrink", "move", "part", "dontunmap", "dontneed", "free", "readonly", "noaccess", "unmap",
    "fixed", "syscalls", "lock", "advice", "wipe", "churn", "sparse", "brk", "fork", "spawn", "signals",
    "threads",
};

_Noreturn void fail(const char *what, const struct region *region, size_t page)
{
    report_page(what, page_at(region, page), identity_of(region, page), region->record[page].current);
    _exit(1);
}

_Noreturn void fail_call(const char *what)
{
    say("FAILED %s: %s\n", what, strerror(errno));
    _exit(2);
}

void *map_anonymous(size_t pages)
{
    void *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        fail_call("mmap");
    return at;
}

void verify_page(const char *what, struct region *region, size_t page)
{
    if (check_page(page_at(region, page), identity_of(region, page), region->record[page].current) >= 0)
        fail(what, region, page);
}

void rewrite_page(struct verifier *verifier, struct region *region, size_t page)
{
    verifier->writing_page = page;
    in_order();
    verifier->writing_region = region;
    in_order();
    struct page_record *record = &region->record[page];
    record->last++;
    record->current = record->last;
    stamp_page(page_at(region, page), identity_of(region, page), record->current);
    in_order();
    verifier->writing_region = NULL;
    in_order();
    verifier->rewritten++;
}

void verify_zero(const char *what, const volatile uint64_t *memory, size_t pages)
{
    for (size_t i = 0; i < pages * WORDS; i++) {
        uint64_t found = memory[i];
        if (found != 0) {
            say("MISMATCH %s: address %p: expected zero, found %016lx (as a stamp: identity %lx generation %lu)\n",
                what, (void *)(memory + i), found, (found ^ STAMP_KEY) >> 24, (found ^ STAMP_KEY) & 0xffffff);
            _exit(1);
        }
    }
}

/* A run of pages, in order or at random, or around one hot place. */
static void verify_some(struct verifier *verifier, struct region *region)
{
    uint64_t chance = next_random(&verifier->random);
    size_t start = (chance >> 20) % region->pages;
    size_t count = 1 + (chance >> 8) % 96;
    for (size_t i = 0; i < count; i++) {
        size_t page;
        switch (chance % 4) {
        case 0:
        case 1:
            page = (start + i) % region->pages;
            break;
        case 2:
            page = next_random(&verifier->random) % region->pages;
            break;
        default:
            page = next_random(&verifier->random) % (region->pages / 16 + 1);
        }
        verify_page("verify", region, page);
        verifier->verified++;
        if (next_random(&verifier->random) % 3 == 0)
            rewrite_page(verifier, region, page);
    }
}

static void *verify_for_ever(void *argument)
{
    struct verifier *verifier = argument;
    while (!atomic_load_explicit(&stopping, memory_order_relaxed)) {
        struct region *region = &verifier->regions[next_random(&verifier->random) % REGIONS];
        verify_some(verifier, region);
        if (next_random(&verifier->random) % 4 == 0)
            disturb_own(verifier, region);
    }
    for (int i = 0; i < REGIONS; i++)
        for (size_t page = 0; page < verifier->regions[i].pages; page++)
            verify_page("at the end", &verifier->regions[i], page);
    return NULL;
}

static void set_up_verifier(int number, size_t pages, uint64_t seed)
{
    struct verifier *verifier = &verifiers[number];
    verifier->number = number;
    verifier->random = mix(seed + (uint64_t)number);
    verifier->scratch = map_anonymous(16);
    if (pipe(verifier->pipe))
        fail_call("pipe");
    for (int i = 0; i < REGIONS; i++) {
        struct region *region = &verifier->regions[i];
        region->pages = pages;
        region->least = pages / 2;
        region->most = pages * 2;
        region->identity = (uint64_t)(1 + number * REGIONS + i) << 24;
        region->at = map_anonymous(pages);
        region->record = map_anonymous(region->most * sizeof *region->record / PAGE + 1);
        for (size_t page = 0; page < pages; page++)
            rewrite_page(verifier, region, page);
    }
}

static unsigned parse_disturbances(const char *list)
{
    if (!strcmp(list, "all"))
        return (1U << DISTURBANCES) - 1;
    if (!strcmp(list, "none"))
        return 0;
    unsigned on = 0;
    while (*list) {
        size_t length = strcspn(list, ",");
        int found = -1;
        for (int i = 0; i < DISTURBANCES; i++)
            if (strlen(names[i]) == length && !strncmp(list, names[i], length))
                found = i;
        if (found < 0) {
            say("no such disturbance: %.*s\n", (int)length, list);
            exit(2);
        }
        on |= 1U << found;
        list += length + (list[length] == ',');
    }
    return on;
}

int main(int count, char **arguments)
{
    unsigned long seconds = 5, megabytes = 128, seed = 1;
    const char *list = "all";
    for (int i = 1; i + 1 < count; i += 2) {
        const char *option = arguments[i], *value = arguments[i + 1];
        if (!strcmp(option, "--seconds"))
            seconds = strtoul(value, NULL, 10);
        else if (!strcmp(option, "--megabytes"))
            megabytes = strtoul(value, NULL, 10);
        else if (!strcmp(option, "--threads"))
            verifier_count = atoi(value);
        else if (!strcmp(option, "--seed"))
            seed = strtoul(value, NULL, 10);
        else if (!strcmp(option, "--disturb"))
            list = value;
        else
            return 2;
    }
    if (verifier_count < 1 || verifier_count > MAX_VERIFIERS || count % 2 == 0)
        return 2;
    disturbances_on = parse_disturbances(list);
    /* Let malloc never ask for more by brk, which one of the disturbers moves. (musl's takes that from mmap.) */
#ifdef __GLIBC__
    mallopt(M_TOP_PAD, 16 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    free(malloc(64));
#endif
    for (int i = 0; i < verifier_count; i++)
        set_up_verifier(i, megabytes * 256 / (unsigned)verifier_count / REGIONS, seed);
    pthread_t threads[MAX_VERIFIERS];
    for (int i = 0; i < verifier_count; i++)
        if ((errno = pthread_create(&threads[i], NULL, verify_for_ever, &verifiers[i])) != 0)
            fail_call("pthread_create");
    start_disturbers();
    double end = seconds_now() + (double)seconds;
    while (seconds_now() < end)
        usleep(20000);
    atomic_store(&stopping, 1);
    unsigned long verified = 0, rewritten = 0, disturbed = 0;
    join_disturbers();
    for (int i = 0; i < verifier_count; i++) {
        pthread_join(threads[i], NULL);
        verified += verifiers[i].verified;
        rewritten += verifiers[i].rewritten;
        disturbed += verifiers[i].disturbed;
    }
    say("torture ok: verified %lu rewrote %lu disturbed %lu forks %lu spawns %lu churns %lu signals %lu\n",
        verified, rewritten, disturbed, atomic_load(&forks), atomic_load(&spawns), atomic_load(&churns),
        atomic_load(&signals_taken));
    return 0;
}
