/* What a program leaves running, in ways that are easily overlooked.
 *
 *   leftover thread   the main thread ends, another one prints five lines
 *   leftover raw      a child made behind the C library's back sleeps; its parent ends
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *print(void *unused)
{
    (void)unused;
    for (int line = 0; line < 5; line++) {
        usleep(400 * 1000);
        printf("line %d\n", line);
        fflush(stdout);
    }
    return NULL;
}

int main(int count, char **words)
{
    const char *mode = count > 1 ? words[1] : "";
    if (!strcmp(mode, "thread")) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, print, NULL))
            return 1;
        pthread_exit(NULL);
    }
    if (!strcmp(mode, "raw")) {
        size_t size = 48 << 20;
        char *memory = malloc(size);
        for (int round = 0; round < 4; round++)
            for (size_t at = 0; at < size; at += 4096)
                memory[at] = at / 4096 + round;
        if (syscall(SYS_fork) == 0) {
            sleep(3600);
            _exit(0);
        }
        puts("left");
        return 0;
    }
    return 2;
}
