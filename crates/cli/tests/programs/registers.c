/* A program with a userfaultfd of its own, which it registers where memfold has pages out already.
 *
 *   registers missing MEGABYTES    all of its memory, as for a migration; what it drops it fills itself
 *   registers protected MEGABYTES  section by section of a growing heap, to find the pages it writes to
 *   registers threads MEGABYTES    the same by several threads at once
 *   registers faults MEGABYTES     again and again, while another thread touches what is missing
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a page is
 * wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define SECTION 256UL /* pages */
#define THREADS 4

static void fail(const char *what)
{
    say("MISMATCH %s: %s\n", what, strerror(errno));
    _exit(1);
}

static int open_userfaultfd(unsigned long features)
{
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API, .features = features};
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api))
        fail("userfaultfd");
    return fd;
}

static void register_pages(int fd, uint64_t *start, size_t pages, unsigned long mode)
{
    struct uffdio_register range = {.range = {(uintptr_t)start, pages * PAGE}, .mode = mode};
    errno = 0;
    if (ioctl(fd, UFFDIO_REGISTER, &range))
        fail("UFFDIO_REGISTER");
    if (errno)
        fail("errno after success");
}

static void protect_pages(int fd, uint64_t *start, size_t pages, int on)
{
    struct uffdio_writeprotect range = {.range = {(uintptr_t)start, pages * PAGE},
                                        .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0};
    if (ioctl(fd, UFFDIO_WRITEPROTECT, &range))
        fail("UFFDIO_WRITEPROTECT");
}

/* Serves one's own faults: missing pages are filled with stamps of generation 2, writes are noted and
 * allowed. */
struct server {
    int fd;
    uint64_t *memory;
    size_t pages;
    atomic_uint missing, written;
    atomic_uchar *is_written;
};

static void *serve(void *argument)
{
    struct server *server = argument;
    static _Thread_local uint64_t page[WORDS];
    struct uffd_msg message;
    while (read(server->fd, &message, sizeof message) == sizeof message) {
        uint64_t *address = (uint64_t *)(message.arg.pagefault.address & -PAGE);
        size_t index = (size_t)(address - server->memory) / WORDS;
        if (message.event != UFFD_EVENT_PAGEFAULT || index >= server->pages)
            fail("a message");
        if (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
            if (!atomic_exchange(&server->is_written[index], 1))
                server->written++;
            protect_pages(server->fd, address, 1, 0);
            continue;
        }
        stamp_page(page, index + 1, 2);
        /* Before the page is there: who waited for it looks at the number. */
        server->missing++;
        struct uffdio_copy copy = {.dst = (uintptr_t)address, .src = (uintptr_t)page, .len = PAGE};
        /* Refused with EAGAIN where another thread's madvise takes an empty page table away just then. */
        while (ioctl(server->fd, UFFDIO_COPY, &copy) && copy.copy != -EEXIST)
            if (copy.copy != -EAGAIN)
                fail("UFFDIO_COPY");
    }
    return NULL;
}

static struct server *start_server(uint64_t *memory, size_t pages)
{
    struct server *server = calloc(1, sizeof *server);
    server->fd = open_userfaultfd(UFFD_FEATURE_PAGEFAULT_FLAG_WP);
    server->memory = memory;
    server->pages = pages;
    server->is_written = calloc(pages, 1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, server))
        fail("a thread");
    return server;
}

/* As a virtual machine's memory before it moves: registered whole, then dropped in part. */
static void missing(size_t pages)
{
    uint64_t *memory = map_stamped(pages);
    struct server *server = start_server(memory, pages);
    register_pages(server->fd, memory, pages, UFFDIO_REGISTER_MODE_MISSING);
    verify_pages("kept", memory, 0, pages, 1);
    if (server->missing)
        fail("pages were missing that were not dropped");
    madvise(memory, pages / 2 * PAGE, MADV_DONTNEED);
    verify_pages("filled by the program", memory, 0, pages / 2, 2);
    verify_pages("not dropped", memory, pages / 2, pages, 1);
    if (server->missing != pages / 2)
        fail("pages that were dropped were not asked for");
    /* The child has nothing of the userfaultfd. */
    madvise(memory, 16 * PAGE, MADV_DONTNEED);
    pid_t child = fork();
    if (child == 0) {
        verify_pages("empty in the child", memory, 0, 16, 0);
        verify_pages("of the child", memory, pages / 2, pages, 1);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status)
        fail("the child");
    struct uffdio_range range = {(uintptr_t)memory, pages * PAGE};
    if (ioctl(server->fd, UFFDIO_UNREGISTER, &range))
        fail("UFFDIO_UNREGISTER");
    verify_pages("registered no more", memory, 16, pages / 2, 2);
    verify_pages("registered no more", memory, pages / 2, pages, 1);
}

/* A collector's heap: each section is registered some time after it was made and used, protected, and
 * written to in part. */
static void protected_sections(uint64_t *memory, size_t pages, struct server *server, unsigned step)
{
    for (size_t section = 0; section + SECTION <= pages; section += SECTION) {
        uint64_t *start = memory + section * WORDS;
        register_pages(server->fd, start, SECTION, UFFDIO_REGISTER_MODE_WP);
        protect_pages(server->fd, start, SECTION, 1);
        for (size_t page = section; page < section + SECTION; page += step)
            stamp_page(memory + page * WORDS, page + 1, 2);
    }
}

static void check_sections(uint64_t *memory, size_t pages, struct server *server, unsigned step)
{
    for (size_t page = 0; page < pages; page++) {
        int was_written = page % SECTION % step == 0;
        verify_pages("in a section", memory, page, page + 1, was_written ? 2 : 1);
        if (server->is_written[page] != was_written)
            fail(was_written ? "a write was not seen" : "a write was seen that was none");
    }
}

static void protected(size_t pages)
{
    uint64_t *memory = map_stamped(pages);
    struct server *server = start_server(memory, pages);
    protected_sections(memory, pages, server, 3);
    check_sections(memory, pages, server, 3);
}

struct part {
    uint64_t *memory;
    size_t pages;
};

static void *register_part(void *argument)
{
    struct part *part = argument;
    struct server *server = start_server(part->memory, part->pages);
    protected_sections(part->memory, part->pages, server, 5);
    check_sections(part->memory, part->pages, server, 5);
    return NULL;
}

static void threads(size_t pages)
{
    pthread_t thread[THREADS];
    struct part part[THREADS];
    for (unsigned i = 0; i < THREADS; i++)
        part[i] = (struct part){map_stamped(pages / THREADS), pages / THREADS};
    for (unsigned i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, register_part, &part[i]);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
}

static uint64_t *shared_memory;
static size_t shared_pages;
static atomic_int touching = 1;

static void *touch(void *argument)
{
    (void)argument;
    uint64_t seed = (uintptr_t)&seed;
    while (touching) {
        seed = mix(seed);
        uint64_t first = *(volatile uint64_t *)(shared_memory + seed % shared_pages * WORDS);
        if (first && first != expected_word(seed % shared_pages + 1, 2, 0))
            fail("a page of neither");
    }
    return NULL;
}

/* A missing page is zeros before its range is registered, and the program's to fill afterwards, whichever
 * userfaultfd was asked for it just then. */
static void faults(size_t pages)
{
    uint64_t *filler = map_stamped(pages);
    shared_pages = 8 * SECTION;
    shared_memory = map_pages(shared_pages);
    struct server *server = start_server(shared_memory, shared_pages);
    pthread_t thread[THREADS];
    for (unsigned i = 0; i < THREADS; i++)
        pthread_create(&thread[i], NULL, touch, NULL);
    for (unsigned round = 0; round < 20; round++) {
        for (size_t page = round % 8; page < pages; page += 8)
            verify_pages("beside", filler, page, page + 1, 1);
        /* Threads that touch it wait for room while it is registered. */
        madvise(shared_memory, shared_pages * PAGE, MADV_DONTNEED);
        usleep(100 * (round % 8));
        register_pages(server->fd, shared_memory, shared_pages, UFFDIO_REGISTER_MODE_MISSING);
        madvise(shared_memory, shared_pages * PAGE, MADV_DONTNEED);
        verify_pages("asked for", shared_memory, 0, shared_pages, 2);
        struct uffdio_range range = {(uintptr_t)shared_memory, shared_pages * PAGE};
        if (ioctl(server->fd, UFFDIO_UNREGISTER, &range))
            fail("UFFDIO_UNREGISTER");
        madvise(shared_memory, shared_pages * PAGE, MADV_DONTNEED);
    }
    touching = 0;
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(size_t);
    } modes[] = {{"missing", missing}, {"protected", protected}, {"threads", threads}, {"faults", faults}};
    for (size_t i = 0; count == 3 && i < sizeof modes / sizeof *modes; i++)
        if (!strcmp(arguments[1], modes[i].name)) {
            modes[i].run(strtoul(arguments[2], NULL, 10) * 256);
            say("%s ok\n", modes[i].name);
            return 0;
        }
    return 2;
}
