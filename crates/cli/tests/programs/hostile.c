/* Does what well-secured daemons do, one thing after another, and verifies its
 * memory after each: closes descriptors, counts them, lowers limits, blocks signals,
 * changes root and user, forbids itself system calls, forks in that state.
 *
 *   hostile MEGABYTES
 */
#define _GNU_SOURCE
#include "stamp.h"

#include <dirent.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
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

static void must(int result, const char *what)
{
    if (result != 0) {
        say("FAILED %s: %s\n", what, strerror(errno));
        _exit(2);
    }
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
    struct sock_filter filter[2 * sizeof allowed / sizeof *allowed + 2];
    unsigned at = 0;
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i < sizeof allowed / sizeof *allowed; i++) {
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)allowed[i], 0, 1);
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {(unsigned short)at, filter};
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
    must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), "seccomp");
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
