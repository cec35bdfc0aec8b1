/* A forked child uses addresses at which its parent had memory that is kept from children. Another lacks what its
 * parent keeps from it where other memory was moved away from.
 *
 *   dontfork MEGABYTES GROWTH [KEPT]
 *
 * The parent has MEGABYTES, KEPT or 4 of them kept from children; the child maps anew what it did not
 * get, and grows by GROWTH megabytes.  Prints one line, the same in every run; MISMATCH, and a
 * status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>
#include <sys/wait.h>

static size_t kept_pages = 4 * 256;
/* What the child maps anew of it: memory of others may lie at its end. */
#define AGAIN (kept_pages / 2)

static void live_as_child(uint64_t *memory, uint64_t *kept, size_t pages, size_t growth)
{
    uint64_t *own = mmap(kept, AGAIN * PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != kept) {
        say("FAILED: what was kept from the child is not free there\n");
        _exit(2);
    }
    stamp_pages(own, 0, AGAIN, 2);
    uint64_t *more = map_pages(growth);
    for (uint64_t round = 1; round <= 3; round++) {
        stamp_pages(more, 0, growth, round);
        verify_pages("inherited", memory, 0, pages, 1);
        verify_pages("mapped where the parent has its own", own, 0, AGAIN, 2);
        verify_pages("grown", more, 0, growth, round);
    }
    _exit(0);
}

/* Memory is moved, and what children must not see takes its place. */
static void keep_in_place_of(uint64_t *memory, size_t pages)
{
    uint64_t *moved = map_pages(pages);
    munmap(moved, pages * PAGE);
    if (mremap(memory, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) != moved)
        _exit(2);
    /* Not touched before it is kept from children. */
    uint64_t *secret = mmap(memory, pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (secret != memory || madvise(secret, pages * PAGE, MADV_DONTFORK) ||
        mprotect(secret, pages * PAGE, PROT_READ | PROT_WRITE))
        _exit(2);
    stamp_pages(secret, 0, pages, 7);
    pid_t child = fork();
    if (child == 0) {
        verify_pages("moved", moved, 0, pages, 1);
        _exit(*(volatile uint64_t *)secret == 0 ? 3 : 4);
    }
    int status;
    if (waitpid(child, &status, 0) != child || !WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV) {
        say("MISMATCH a child has what is kept from it: status %x\n", status);
        _exit(1);
    }
    verify_pages("secret", secret, 0, pages, 7);
}

/* What has just grown is registered by then, and not managed yet. */
static void fork_as_memory_grows(void)
{
    size_t pages = 256, more = 64;
    uint64_t *memory = map_pages(pages + more);
    munmap(memory + pages * WORDS, more * PAGE);
    stamp_pages(memory, 0, pages, 1);
    usleep(100000);
    if (mremap(memory, pages * PAGE, (pages + more) * PAGE, 0) != memory)
        _exit(2);
    pid_t child = fork();
    if (child == 0) {
        verify_pages("grown", memory, 0, pages, 1);
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) {
        say("MISMATCH a child of a program that has grown ended with status %x\n", status);
        _exit(1);
    }
}

int main(int count, char **arguments)
{
    if (count != 3 && count != 4)
        return 2;
    if (count == 4)
        kept_pages = strtoul(arguments[3], NULL, 10) * 256;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256 - kept_pages;
    size_t growth = strtoul(arguments[2], NULL, 10) * 256;
    /* The lower of the two closes the gap that the other leaves in the child. */
    uint64_t *kept = map_pages(kept_pages), *memory = map_pages(pages);
    if (madvise(kept, kept_pages * PAGE, MADV_DONTFORK))
        return 2;
    stamp_pages(memory, 0, pages, 1);
    stamp_pages(kept, 0, kept_pages, 1);
    /* Long enough to be taken under management. */
    usleep(300000);
    pid_t child = fork();
    if (child < 0)
        return 2;
    if (child == 0)
        live_as_child(memory, kept, pages, growth);
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) {
        say("MISMATCH child %d ended with status %x\n", (int)child, status);
        return 1;
    }
    fork_as_memory_grows();
    verify_pages("kept", kept, 0, kept_pages, 1);
    verify_pages("parent's", memory, 0, pages, 1);
    keep_in_place_of(memory, pages / 2);
    say("dontfork ok\n");
    return 0;
}
