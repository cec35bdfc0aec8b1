/* Forked children read memory that their parent has emptied at a fork (MADV_WIPEONFORK), and memory beside it.
 *
 *   wiped MEGABYTES FORKS [glance]
 *
 * Half of the MEGABYTES is wiped. Before each fork the parent reads a part of both halves, another one each time, or
 * nothing: much, little or nothing of either is in memory then. With "glance", children look at few pages, so
 * that there are many forks. Prints one line, the same in every run; MISMATCH, and
 * a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>
#include <sys/wait.h>

static void live_as_child(uint64_t *wiped, uint64_t *kept, size_t pages, size_t first)
{
    verify_pages("inherited", kept, first, first + 1, 1);
    verify_pages("wiped", wiped, 0, pages, 0);
    verify_pages("inherited", kept, 0, pages, 1);
    stamp_pages(wiped, 0, pages, 2);
    verify_pages("written", wiped, 0, pages, 2);
    _exit(0);
}

static void glance_as_child(uint64_t *wiped, uint64_t *kept, size_t pages, size_t first)
{
    for (size_t page = first % 61; page < pages; page += 61) {
        verify_pages("wiped", wiped, page, page + 1, 0);
        verify_pages("inherited", kept, page, page + 1, 1);
    }
    _exit(0);
}

int main(int count, char **arguments)
{
    if (count != 3 && count != 4)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 128, forks = strtoul(arguments[2], NULL, 10);
    uint64_t *wiped = map_pages(pages), *kept = map_pages(pages);
    if (madvise(wiped, pages * PAGE, MADV_WIPEONFORK))
        return 2;
    stamp_pages(wiped, 0, pages, 1);
    stamp_pages(kept, 0, pages, 1);
    /* Long enough to be taken under management. */
    usleep(300000);
    for (size_t i = 0; i < forks; i++) {
        size_t first = i * 97 % pages, end = first + i % 4 * 64;
        if (end > pages)
            end = pages;
        verify_pages("parent's wiped", wiped, first, end, 1);
        verify_pages("parent's", kept, first, end, 1);
        pid_t child = fork();
        if (child < 0)
            return 2;
        if (child == 0 && count == 4)
            glance_as_child(wiped, kept, pages, first);
        if (child == 0)
            live_as_child(wiped, kept, pages, first);
        int status;
        if (waitpid(child, &status, 0) != child || status != 0) {
            say("MISMATCH child %d of fork %d ended with status %x\n", (int)child, (int)i, status);
            return 1;
        }
    }
    verify_pages("parent's wiped", wiped, 0, pages, 1);
    verify_pages("parent's", kept, 0, pages, 1);
    say("wiped ok\n");
    return 0;
}
