/* Drops much of its memory, writes to some of that again, and goes on with the rest for so long that
 * what was dropped is looked at.
 *
 *   dropped MEGABYTES SECONDS
 *
 * Prints one line, the same in every run; MISMATCH, and a status that is not 0, where a page is
 * wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

static size_t pages;
static uint64_t *memory;

/* Of the dropped half, which is the one that was written last and is in memory, every ninth is written
 * again. */
static int is_written_again(size_t page)
{
    return page % 9 == 4;
}

static void verify_dropped(void)
{
    for (size_t page = pages / 2; page < pages; page++) {
        uint64_t generation = is_written_again(page) ? 2 : 0;
        verify_stamp("dropped", memory + page * WORDS, page + 1, generation);
    }
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    pages = strtoul(arguments[1], NULL, 10) * 256;
    memory = map_stamped(pages);
    if (madvise(memory + pages / 2 * WORDS, pages / 2 * PAGE, MADV_DONTNEED))
        return 2;
    for (size_t page = pages / 2; page < pages; page++)
        if (is_written_again(page))
            stamp_page(memory + page * WORDS, page + 1, 2);
    double end = seconds_now() + strtod(arguments[2], NULL);
    while (seconds_now() < end) {
        verify_pages("kept", memory, 0, pages / 2, 1);
        usleep(20000);
    }
    verify_dropped();
    /* Once more, as much of it went out meanwhile. */
    verify_pages("kept", memory, 0, pages / 2, 1);
    verify_dropped();
    say("dropped ok\n");
    return 0;
}
