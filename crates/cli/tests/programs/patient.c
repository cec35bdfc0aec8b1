/* Fills memory, waits for a sign, and verifies the memory.
 *
 *   patient MEGABYTES SIGN_FILE
 *
 * Writes one byte to stdout when the memory is filled, and waits until SIGN_FILE
 * is there.  Exits with 1 if a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <stdlib.h>

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) * 256;
    uint64_t *memory = map_stamped(pages);
    if (write(1, ".", 1) != 1)
        return 3;
    while (access(arguments[2], F_OK) != 0)
        usleep(10000);
    verify_pages("patient", memory, 0, pages, 1);
    return 0;
}
