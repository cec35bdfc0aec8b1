/* Calls itself, and a file that it maps, by bytes that are no UTF-8 and look like more than a name, and
 * verifies its memory: in a child, itself, and in a child that it leaves behind.
 *
 *   names MEGABYTES
 */
#define _GNU_SOURCE
#include "stamp.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static size_t pages;
static uint64_t *memory;

static void map_odd_file(void)
{
    char path[128];
    snprintf(path, sizeof path, "/tmp/odd \xff\xfe) Z 1 1 (\n7f0000000000-7f0000001000 rw-p %d", (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || unlink(path) || ftruncate(file, PAGE))
        _exit(2);
    if (mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED)
        _exit(2);
}

static void verify_and_rewrite(const char *who)
{
    verify_pages(who, memory, 0, pages, 1);
    stamp_pages(memory, 0, pages, 2);
    verify_pages(who, memory, 0, pages, 2);
}

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    if (prctl(PR_SET_NAME, "\xff) Z 1 (\xc3"))
        return 2;
    map_odd_file();
    pages = strtoul(arguments[1], NULL, 10) * 256;
    memory = map_stamped(pages);
    pid_t child = fork();
    if (child == 0) {
        verify_and_rewrite("child");
        _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        say("FAILED: the child ended with status %x\n", status);
        return 1;
    }
    verify_pages("parent", memory, 0, pages, 1);
    child = fork();
    if (child == 0) {
        /* Longer than it takes to see that its parent is gone. */
        usleep(2500000);
        verify_and_rewrite("left behind");
        say("names ok\n");
        _exit(0);
    }
    return child < 0;
}
