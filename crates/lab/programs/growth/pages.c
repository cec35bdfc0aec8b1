/*
 * Processes that hold pages and visit all of them once for each line on standard input.
 *
 *   pages PROCESSES PAGES MAPPINGS THREADS [spoil]
 *
 * Each of PROCESSES has PAGES pages in MAPPINGS mappings of equal size, which do not touch, and THREADS threads
 * that share its pages. A visit verifies every byte of a page and changes a part of it. Blocks of 16 pages come in a
 * random order. Prints "ready" once all is written, and for each line the wall time of all processes together and the
 * CPU time of their visits, in nanoseconds. A wrong byte ends it with status 1; "spoil" makes one wrong.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, BLOCK = 16, KINDS = 8 };

extern char **environ;

/* Contents that LZ4 compresses about 2:1. */
static unsigned char kinds[KINDS][PAGE];
static unsigned char *start;
/* Pages of the process and of each of its mappings, and the number of its first page among those of all processes. */
static size_t pages, pages_of_mapping, first;
static size_t threads;
static uint64_t pass;

static void fail(const char *what)
{
    fprintf(stderr, "pages: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t nanoseconds(clockid_t clock)
{
    struct timespec now;
    if (clock_gettime(clock, &now) != 0)
        fail("clock_gettime");
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t next(uint64_t *random)
{
    *random ^= *random >> 12;
    *random ^= *random << 25;
    *random ^= *random >> 27;
    return *random * 0x2545f4914f6cdd1dull;
}

static void make_kinds(void)
{
    uint64_t random = 7 * 0x9e3779b97f4a7c15ull | 1;
    for (size_t kind = 0; kind < KINDS; kind++) {
        unsigned char *page = kinds[kind];
        for (size_t at = 0; at < PAGE;) {
            size_t end = at + 8 + (next(&random) >> 16) % 32;
            if (end > PAGE)
                end = PAGE;
            int is_copy = at > 64 && (next(&random) >> 16) % 100 >= 36;
            size_t back = is_copy ? 1 + (next(&random) >> 16) % (at < 1000 ? at : 1000) : 0;
            for (; at < end; at++)
                page[at] = is_copy ? page[at - back] : (unsigned char)(next(&random) >> 16);
        }
    }
}

/* A page that is not mapped lies between two mappings. */
static unsigned char *page_of(size_t number)
{
    return start + (number + number / pages_of_mapping) * PAGE;
}

static void map(size_t mappings)
{
    pages_of_mapping = pages / mappings;
    size_t stride = (pages_of_mapping + 1) * PAGE;
    start = mmap(NULL, mappings * stride, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        fail("mmap");
    for (size_t mapping = 0; mapping < mappings; mapping++) {
        unsigned char *own = start + mapping * stride;
        void *mapped = mmap(own, pages_of_mapping * PAGE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        if (mapped == MAP_FAILED || munmap(own + pages_of_mapping * PAGE, PAGE) != 0)
            fail("mmap");
    }
}

/* What is at three places of a page after a pass. */
static uint64_t stamp(size_t number, uint64_t of_pass)
{
    return ((first + number) * 0x9e3779b97f4a7c15ull) ^ (of_pass << 48);
}

static const size_t PLACES[3] = {0, PAGE / 2, PAGE - sizeof(uint64_t)};

static void write_stamps(unsigned char *page, size_t number)
{
    uint64_t word = stamp(number, pass);
    for (size_t place = 0; place < 3; place++)
        memcpy(page + PLACES[place], &word, sizeof word);
}

static int is_right(const unsigned char *page, size_t number)
{
    uint64_t word = stamp(number, pass - 1);
    const unsigned char *kind = kinds[(first + number) % KINDS];
    for (size_t place = 0; place < 3; place++)
        if (memcmp(page + PLACES[place], &word, sizeof word) != 0)
            return 0;
    for (size_t place = 0; place < 2; place++) {
        size_t from = PLACES[place] + sizeof word;
        if (memcmp(page + from, kind + from, PLACES[place + 1] - from) != 0)
            return 0;
    }
    return 1;
}

static void visit(size_t number)
{
    unsigned char *page = page_of(number);
    if (pass == 0) {
        memcpy(page, kinds[(first + number) % KINDS], PAGE);
    } else if (!is_right(page, number)) {
        fprintf(stderr, "pages: WRONG RESULT: page %zu in pass %llu\n", first + number, (unsigned long long)pass);
        exit(1);
    }
    write_stamps(page, number);
}

/* The share of one thread: in order in the first pass, then a block at a time in random order. */
static void *visit_share(void *argument)
{
    size_t thread = (size_t)(uintptr_t)argument;
    size_t blocks = pages / BLOCK;
    size_t from = blocks * thread / threads, to = blocks * (thread + 1) / threads;
    uint32_t *order = malloc((to - from + 1) * sizeof *order);
    if (order == NULL)
        fail("malloc");
    for (size_t block = from; block < to; block++)
        order[block - from] = (uint32_t)block;
    uint64_t random = (pass * 1000003 + first + thread) * 0x9e3779b97f4a7c15ull | 1;
    for (size_t last = to - from; pass > 0 && last-- > 1;) {
        size_t other = (next(&random) >> 16) % (last + 1);
        uint32_t swapped = order[last];
        order[last] = order[other];
        order[other] = swapped;
    }
    for (size_t index = 0; index < to - from; index++)
        for (size_t page = 0; page < BLOCK; page++)
            visit((size_t)order[index] * BLOCK + page);
    free(order);
    return NULL;
}

static void visit_all(void)
{
    pthread_t running[threads];
    for (size_t thread = 0; thread < threads; thread++)
        if (pthread_create(&running[thread], NULL, visit_share, (void *)(uintptr_t)thread) != 0)
            fail("pthread_create");
    for (size_t thread = 0; thread < threads; thread++)
        pthread_join(running[thread], NULL);
    pass++;
}

/* A process that holds pages: answers each byte with the CPU time of a pass. */
static int hold(char **arguments)
{
    first = strtoull(arguments[0], NULL, 10);
    pages = strtoull(arguments[1], NULL, 10);
    size_t mappings = strtoull(arguments[2], NULL, 10);
    threads = strtoull(arguments[3], NULL, 10);
    int is_spoilt = strcmp(arguments[4], "spoil") == 0;
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    make_kinds();
    map(mappings);
    visit_all();
    if (is_spoilt)
        page_of(pages / 2)[100] ^= 1;
    for (uint64_t spent = 0;;) {
        if (write(STDOUT_FILENO, &spent, sizeof spent) != sizeof spent)
            fail("write");
        char order;
        ssize_t length = read(STDIN_FILENO, &order, 1);
        if (length == 0)
            return 0;
        if (length < 0)
            fail("read");
        uint64_t before = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
        visit_all();
        spent = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - before;
    }
}

struct child {
    pid_t pid;
    int to, from;
};

static void start_child(struct child *child, size_t number, char **arguments)
{
    int to[2], from[2];
    char place[32];
    snprintf(place, sizeof place, "%llu", (unsigned long long)(number * strtoull(arguments[1], NULL, 10)));
    /* Only one of them has a wrong byte. */
    char *spoil = number == 0 && arguments[4] != NULL ? arguments[4] : "";
    char *words[] = {"pages", "hold", place, arguments[1], arguments[2], arguments[3], spoil, NULL};
    posix_spawn_file_actions_t actions;
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0)
        fail("pipe2");
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    errno = posix_spawn(&child->pid, "/proc/self/exe", &actions, NULL, words, environ);
    if (errno != 0)
        fail("posix_spawn");
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    child->to = to[1];
    child->from = from[0];
}

/* The sum of what all children answer. */
static uint64_t answers(struct child *children, size_t count)
{
    uint64_t sum = 0;
    for (size_t number = 0; number < count; number++) {
        uint64_t spent;
        if (read(children[number].from, &spent, sizeof spent) != sizeof spent) {
            fprintf(stderr, "pages: process %zu of %zu ended early\n", number, count);
            exit(1);
        }
        sum += spent;
    }
    return sum;
}

int main(int count, char **words)
{
    if (count == 7 && strcmp(words[1], "hold") == 0)
        return hold(words + 2);
    if (count != 5 && count != 6) {
        fprintf(stderr, "usage: pages PROCESSES PAGES MAPPINGS THREADS [spoil]\n");
        return 2;
    }
    char *arguments[] = {words[1], words[2], words[3], words[4], count == 6 ? words[5] : NULL};
    size_t processes = strtoull(words[1], NULL, 10);
    struct child *children = calloc(processes, sizeof *children);
    if (children == NULL)
        fail("calloc");
    for (size_t number = 0; number < processes; number++)
        start_child(&children[number], number, arguments);
    answers(children, processes);
    puts("ready");
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin) != NULL) {
        uint64_t before = nanoseconds(CLOCK_MONOTONIC);
        for (size_t number = 0; number < processes; number++)
            if (write(children[number].to, "p", 1) != 1)
                fail("write");
        uint64_t spent = answers(children, processes);
        printf("%llu %llu\n", (unsigned long long)(nanoseconds(CLOCK_MONOTONIC) - before), (unsigned long long)spent);
        fflush(stdout);
    }
    for (size_t number = 0; number < processes; number++)
        close(children[number].to);
    int worst = 0;
    for (size_t number = 0; number < processes; number++) {
        int status;
        if (waitpid(children[number].pid, &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
            worst = 1;
    }
    return worst;
}
