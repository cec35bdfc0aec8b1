/* Does what well-secured daemons do, one thing after another, and verifies its
 * memory after each: closes descriptors, counts them, lowers limits, blocks signals,
 * changes root and user, forbids itself system calls, forks in that state.
 *
 *   hostile MEGABYTES
 */
#define _GNU_SOURCE
#include "filter.h"

#include <dirent.h>
#include <linux/audit.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static size_t pages;
static uint64_t *memory;
static uint64_t generation = 1;

static void verify(const char *after)
{
    for (size_t page = 0; page < pages; page++) {
        verify_stamp(after, memory + page * WORDS, page + 1, generation);
        stamp_page(memory + page * WORDS, page + 1, generation + 1);
    }
    generation++;
}

static int count_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count - 3; /* ., .. and the directory's own */
}

static void fork_and_verify(const char *what)
{
    pid_t child = fork();
    if (child == 0) {
        verify(what);
        verify(what);
        _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        say("FAILED %s: the child ended with status %x\n", what, status);
        _exit(1);
    }
    verify(what);
}

/* Kills the process for any system call that it does not need itself. */
static void forbid_system_calls(void)
{
    static const int allowed[] = {SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_fork, SYS_clone, SYS_wait4,
                                  SYS_mmap, SYS_munmap, SYS_brk, SYS_rt_sigreturn, SYS_getpid,
                                  SYS_set_robust_list, SYS_rt_sigprocmask, SYS_gettid, SYS_prctl};
    filter_system_calls(allowed, sizeof allowed / sizeof *allowed, SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS);
}

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    pages = strtoul(arguments[1], NULL, 10) * 256;
    memory = map_pages(pages);
    stamp_pages(memory, 0, pages, generation);
    verify("start");

    for (int descriptor = 3; descriptor < 1024; descriptor++)
        close(descriptor);
    verify("closing descriptors one by one");
    syscall(SYS_close_range, 3, ~0U, 0);
    verify("closing a range of descriptors");
    int open_now = count_descriptors();
    if (open_now != 3) {
        say("FAILED: %d descriptors are open instead of 3\n", open_now);
        return 1;
    }

    struct rlimit few = {8, 8}, none = {0, 0};
    must(setrlimit(RLIMIT_NOFILE, &few), "limit on descriptors");
    must(setrlimit(RLIMIT_CORE, &none), "limit on core dumps");
    must(setrlimit(RLIMIT_MEMLOCK, &none), "limit on locked memory");
    verify("lower limits");
    fork_and_verify("fork under lower limits");

    sigset_t all;
    sigfillset(&all);
    must(sigprocmask(SIG_BLOCK, &all, NULL), "blocking signals");
    must(prctl(PR_SET_NAME, "renamed"), "naming");
    verify("blocked signals");
    fork_and_verify("fork with blocked signals");

    if (geteuid() == 0) {
        must(chroot("/proc/self/fdinfo"), "chroot");
        verify("chroot");
        must(setresgid(65534, 65534, 65534), "setresgid");
        must(setresuid(65534, 65534, 65534), "setresuid");
        verify("another user");
        fork_and_verify("fork as another user");
    }
    must(prctl(PR_SET_DUMPABLE, 0), "not dumpable");
    verify("not dumpable");
    fork_and_verify("fork while not dumpable");

    forbid_system_calls();
    verify("forbidden system calls");
    fork_and_verify("fork with forbidden system calls");
    say("hostile ok: generation %lu\n", generation);
    return 0;
}
