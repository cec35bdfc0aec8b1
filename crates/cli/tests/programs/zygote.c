/* What a browser's zygote does: it insists on having one thread, and forks what goes on by another name.
 *
 *   zygote --type=zygote MEGABYTES
 *
 * The child stamps so much, and verifies it until it has a helper. One line on stdout. */
#define _GNU_SOURCE
#include "has_helper.h"
#include "stamp.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* As many as are worth a helper, which is started within a second then. */
enum { WORTH = 4096, SECONDS = 2 };

static void insist_on_one_thread(const char *when)
{
    struct stat threads;
    /* The folder, the one above it, and one for each thread. */
    if (stat("/proc/self/task", &threads) != 0 || threads.st_nlink != 3) {
        say("a second thread %s\n", when);
        _exit(1);
    }
}

static void be_renamed(char **arguments, size_t pages)
{
    memcpy(strrchr(arguments[1], '=') + 1, "render", sizeof "render" - 1);
    const uint64_t *memory = map_stamped(pages);
    int round = 0;
    do {
        sleep(1);
        verify_pages("child", memory, 0, pages, 1);
    } while (++round < MOST_WAITS && !has_helper());
    /* What is above the limit goes out meanwhile. */
    sleep(1);
    verify_pages("child, again", memory, 0, pages, 1);
    say(has_helper() ? "the child has a helper\n" : "the child has no helper\n");
    _exit(0);
}

int main(int count, char **arguments)
{
    if (count < 3 || strcmp(arguments[1], "--type=zygote"))
        return 2;
    insist_on_one_thread("at first");
    const uint64_t *memory = map_stamped(WORTH);
    double began = seconds_now();
    while (seconds_now() - began < SECONDS) {
        insist_on_one_thread("later");
        usleep(1000);
    }
    pid_t child = fork();
    if (child == 0)
        be_renamed(arguments, strtoul(arguments[2], NULL, 10) * 256);
    int status = -1;
    waitpid(child, &status, 0);
    insist_on_one_thread("after the fork");
    verify_pages("zygote", memory, 0, WORTH, 1);
    return status != 0;
}
