/* Threads that disturb the verifiers from beside, and what forked children do. */
#include "torture.h"

#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

atomic_ulong forks, spawns, churns, signals_taken;

static pthread_t disturbers[DISTURBANCES];

static int go_on(void)
{
    return !atomic_load_explicit(&stopping, memory_order_relaxed);
}

/* Memory mapped, stamped, verified and unmapped again and again. */
static void *churn(void *unused)
{
    (void)unused;
    uint64_t random = 77;
    while (go_on()) {
        size_t pages = 1 + next_random(&random) % 1024;
        uint64_t *memory = map_anonymous(pages);
        uint64_t identity = 0xc000000UL + atomic_load(&churns) % 1000;
        if (next_random(&random) % 4 == 0)
            verify_zero("newly mapped", memory, pages);
        for (size_t page = 0; page < pages; page++)
            stamp_page(memory + page * WORDS, identity + page, 1);
        usleep(next_random(&random) % 2000);
        for (size_t page = 0; page < pages; page++)
            verify_stamp("churn", memory + page * WORDS, identity + page, 1);
        if (munmap(memory, pages * PAGE))
            fail_call("munmap of churned memory");
        atomic_fetch_add(&churns, 1);
    }
    return NULL;
}

/* A huge mapping of which few pages are used, as Go, Java and V8 make. */
static void *sparse(void *unused)
{
    (void)unused;
    const size_t pages = 16UL << 20;
    uint64_t random = 99;
    while (go_on()) {
        uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            fail_call("mmap of 64 GiB");
        uint64_t start = random;
        for (int i = 0; i < 300; i++) {
            size_t page = next_random(&random) % pages;
            stamp_page(memory + page * WORDS, page, 1);
        }
        for (int i = 0; i < 300; i++) {
            size_t page = next_random(&start) % pages;
            verify_stamp("sparse", memory + page * WORDS, page, 1);
        }
        if (munmap(memory, pages * PAGE))
            fail_call("munmap of 64 GiB");
        usleep(1000);
    }
    return NULL;
}

/* The heap's end moves up and down; what comes back must be zero. */
static void *move_break(void *unused)
{
    (void)unused;
    uint64_t random = 55;
    while (go_on()) {
        size_t pages = 16 + next_random(&random) % 1024;
        char *start = sbrk((intptr_t)(pages * PAGE));
        if (start == (void *)-1)
            fail_call("sbrk");
        uint64_t *memory = (uint64_t *)(((uintptr_t)start + PAGE - 1) & ~(PAGE - 1));
        size_t whole = pages - 1;
        verify_zero("new heap", memory, whole);
        for (size_t page = 0; page < whole; page++)
            stamp_page(memory + page * WORDS, 0xb000000UL + page, 1);
        usleep(next_random(&random) % 3000);
        for (size_t page = 0; page < whole; page++)
            verify_stamp("heap", memory + page * WORDS, 0xb000000UL + page, 1);
        if (sbrk(-(intptr_t)(pages * PAGE)) == (void *)-1)
            fail_call("sbrk down");
    }
    return NULL;
}

/* In a forked child: every page that was not in flux is as the parent left it. */
static void verify_snapshot(const char *what, const struct verifier *verifier, const struct region *region)
{
    for (size_t page = 0; page < region->pages; page++) {
        if (verifier->writing_region == region && verifier->writing_page == page)
            continue;
        uint32_t generation = region->wiped_on_fork ? 0 : region->record[page].current;
        verify_stamp(what, page_at(region, page), identity_of(region, page), generation);
    }
}

static void child_rewrites(const struct verifier *verifier, struct region *region)
{
    for (size_t page = 0; page < region->pages; page += 5) {
        if (verifier->writing_region == region && verifier->writing_page == page)
            continue;
        region->record[page].current = 0x800000 | (region->record[page].last + 1);
        stamp_page(page_at(region, page), identity_of(region, page), region->record[page].current);
    }
}

static void look_at_all(const char *what, int rewrite)
{
    for (int v = 0; v < verifier_count; v++)
        for (int r = 0; r < REGIONS; r++) {
            struct region *region = &verifiers[v].regions[r];
            if (region->busy)
                continue;
            verify_snapshot(what, &verifiers[v], region);
            if (rewrite && !region->wiped_on_fork)
                child_rewrites(&verifiers[v], region);
        }
}

static void reap(pid_t child);

static void live_as_child(void)
{
    look_at_all("child", 1);
    pid_t grandchild = fork();
    if (grandchild < 0)
        fail_call("fork in a child");
    if (grandchild == 0) {
        look_at_all("grandchild", 1);
        look_at_all("grandchild, later", 0);
        _exit(0);
    }
    look_at_all("child, later", 0);
    reap(grandchild);
    _exit(0);
}

static void reap(pid_t child)
{
    int status;
    if (waitpid(child, &status, 0) != child)
        fail_call("waitpid");
    if (status != 0) {
        say("FAILED: a child ended with status %x\n", status);
        _exit(1);
    }
}

static void *fork_children(void *unused)
{
    (void)unused;
    pid_t before = 0;
    while (go_on()) {
        pid_t child = fork();
        if (child < 0)
            fail_call("fork");
        if (child == 0)
            live_as_child();
        atomic_fetch_add(&forks, 1);
        /* Two at a time: one verifies while the next is forked. */
        if (before)
            reap(before);
        before = child;
    }
    if (before)
        reap(before);
    return NULL;
}

static void *spawn_programs(void *unused)
{
    (void)unused;
    char *const arguments[] = {"true", NULL};
    while (go_on()) {
        pid_t child;
        if (atomic_load(&spawns) % 2) {
            if ((errno = posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ)) != 0)
                fail_call("posix_spawn");
        } else {
            child = vfork();
            if (child == 0) {
                execve("/bin/true", arguments, environ);
                _exit(127);
            }
            if (child < 0)
                fail_call("vfork");
        }
        reap(child);
        atomic_fetch_add(&spawns, 1);
        usleep(500);
    }
    return NULL;
}

static void take_signal(int number)
{
    /* Uses a good part of the stack, and lets it be checked. */
    volatile uint64_t memory[WORDS * 2];
    (void)number;
    for (unsigned i = 0; i < WORDS * 2; i++)
        memory[i] = mix(i);
    for (unsigned i = 0; i < WORDS * 2; i++)
        if (memory[i] != mix(i)) {
            say("MISMATCH signal handler's stack at %p\n", (void *)(memory + i));
            _exit(1);
        }
    atomic_fetch_add(&signals_taken, 1);
}

static void *send_signals(void *unused)
{
    (void)unused;
    struct sigaction action = {.sa_handler = take_signal, .sa_flags = SA_RESTART};
    if (sigaction(SIGUSR1, &action, NULL))
        fail_call("sigaction");
    while (go_on()) {
        if (kill(getpid(), SIGUSR1))
            fail_call("kill");
        usleep(700);
    }
    return NULL;
}

/* A short-lived thread: its stack and thread-local memory come and go. */
static void *live_shortly(void *argument)
{
    static __thread uint64_t local[256];
    volatile uint64_t memory[8 * WORDS];
    uint64_t number = (uint64_t)argument;
    for (unsigned i = 0; i < 256; i++)
        local[i] = mix(number + i);
    for (unsigned i = 0; i < 8 * WORDS; i++)
        memory[i] = mix(number ^ i);
    usleep(300);
    for (unsigned i = 0; i < 256; i++)
        if (local[i] != mix(number + i))
            number = 0;
    for (unsigned i = 0; i < 8 * WORDS; i++)
        if (memory[i] != mix((uint64_t)argument ^ i))
            number = 0;
    if (number == 0) {
        say("MISMATCH stack or thread-local memory of a thread\n");
        _exit(1);
    }
    return NULL;
}

static void *start_threads(void *unused)
{
    (void)unused;
    for (uint64_t number = 1; go_on(); number++) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            if ((errno = pthread_create(&threads[i], NULL, live_shortly, (void *)(number * 4 + (unsigned)i))) != 0)
                fail_call("pthread_create");
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
    }
    return NULL;
}

static const struct {
    enum disturbance which;
    void *(*run)(void *);
} kinds[] = {
    {CHURN, churn},         {SPARSE, sparse},       {BRK, move_break},        {FORK, fork_children},
    {SPAWN, spawn_programs}, {SIGNALS, send_signals}, {THREADS, start_threads},
};

void start_disturbers(void)
{
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (is_on(kinds[i].which) && (errno = pthread_create(&disturbers[i], NULL, kinds[i].run, NULL)) != 0)
            fail_call("pthread_create of a disturber");
}

void join_disturbers(void)
{
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (is_on(kinds[i].which))
            pthread_join(disturbers[i], NULL);
}
