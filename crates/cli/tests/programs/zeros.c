// Reads memory that was never written, then writes all of it: `zeros MIB before|after [wait]`. Under a limit it is read
// before or after there is more in memory than the limit allows. From the end to the start, so that no reader ahead helps.
// In between it fills some memory, prints its PID and waits for SIGUSR1, and says how much it had in memory at most from then on.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { PAGE = 4096, FILLER = 64 << 20, LESS = 24 << 20 };

static unsigned char *map(size_t length) {
    void *start = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || madvise(start, length, MADV_NOHUGEPAGE) != 0) {
        perror("mmap");
        exit(2);
    }
    return start;
}

static void read_all(volatile unsigned char *start, size_t length) {
    for (size_t at = length; at >= PAGE; at -= PAGE)
        if (start[at - PAGE] != 0) {
            puts("not zero");
            exit(1);
        }
}

static void reset_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    if (!file || fputs("5", file) < 0 || fclose(file) != 0)
        exit(2);
}

static void print_peak(void) {
    char line[256];
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "VmHWM:", 6) == 0)
            printf("%s", line);
}

static void await_signal(void) {
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGUSR1);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    printf("%d\n", (int)getpid());
    fflush(stdout);
    int signal;
    sigwait(&awaited, &signal);
    reset_peak();
}

int main(int count, char **arguments) {
    if (count < 3)
        return 2;
    size_t length = (size_t)atoi(arguments[1]) << 20;
    volatile unsigned char *start = map(length);
    if (strcmp(arguments[2], "after") == 0)
        memset(map(FILLER), 7, FILLER);
    read_all(start, length);
    if (count > 3) {
        memset(map(LESS), 7, LESS);
        await_signal();
    }
    for (size_t at = length; at >= PAGE; at -= PAGE)
        start[at - PAGE] = (unsigned char)(at / PAGE % 251);
    for (size_t at = length; at >= PAGE; at -= PAGE)
        if (start[at - PAGE] != (unsigned char)(at / PAGE % 251))
            return 1;
    if (count > 3)
        print_peak();
    puts("zeros ok");
    return 0;
}
