/* Asks of memfold's helper thread what programs ask of threads that they do not know of:
 *
 *   helper exit MEGABYTES      the only thread ends by the system call `exit`, with status 3
 *   helper strict MEGABYTES    the same, where hardly any other system call is allowed
 *   helper forbidden MEGABYTES makes another then, for which the kernel kills
 *   helper filtered MEGABYTES  the same with a filter that kills the thread
 *   helper last MEGABYTES      the main thread ends so, and another one after it, both with status 3
 *   helper room MEGABYTES      forks where there is no room for a helper's memory
 *   helper descriptors MEGABYTES  forks where hardly a descriptor can be opened
 *   helper network MEGABYTES   forks in another root and network, out of the supervisor's reach
 *   helper execute MEGABYTES PROGRAM  executes PROGRAM where it may use hardly any system call
 *   helper locked MEGABYTES    locks all its memory, and verifies it
 *   helper late MEGABYTES      the same, when much of it is out: from then on it stays in
 *   helper privileges MEGABYTES  becomes another user, and counts the threads with capabilities
 *   helper follow MEGABYTES    gives up its capabilities, waits until its helper is gone, and drops and touches its memory
 *   helper effective MEGABYTES  the same in a child, forked while the effective user alone is another one
 *   helper ordinary MEGABYTES  has a child of a real-time thread on one CPU look at how its helper is scheduled
 *   helper mounts MEGABYTES    enters the mount namespace of a child
 *
 * MISMATCH on stdout, and a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "filter.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static size_t pages;
static uint64_t *memory;

static void verify(const char *who)
{
    verify_pages(who, memory, 0, pages, 1);
}

static void fork_and_verify(const char *what)
{
    pid_t child = fork();
    if (child == 0) {
        verify(what);
        pid_t grandchild = fork();
        if (grandchild == 0) {
            verify(what);
            _exit(0);
        }
        int status = -1;
        if (grandchild < 0 || waitpid(grandchild, &status, 0) != grandchild || status != 0)
            _exit(1);
        verify(what);
        _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        say("MISMATCH %s: the child ended with status %x\n", what, status);
        _exit(1);
    }
    verify(what);
    say("%s ok\n", what);
}

static void *end_later(void *unused)
{
    (void)unused;
    usleep(100000);
    verify("the last thread");
    syscall(SYS_exit, 3);
    return NULL;
}

/* Room for what a forked child has natively, and hardly more. */
static void leave_no_room(void)
{
    struct rlimit room = {pages * PAGE + (8 << 20), pages * PAGE + (8 << 20)};
    must(setrlimit(RLIMIT_AS, &room), "limit on mappings");
}

static void leave_no_descriptors(void)
{
    struct rlimit few = {2, 2};
    must(setrlimit(RLIMIT_NOFILE, &few), "limit on descriptors");
}

static void leave_network(void)
{
    must(unshare(CLONE_NEWNET), "another network");
    must(chroot("/proc/self/fdinfo"), "another root");
}

/* Kills the process for what a loader and a program need not, but a helper does. */
static void forbid_system_calls(void)
{
    static const int forbidden[] = {SYS_prctl, SYS_close_range, SYS_socket, SYS_connect, SYS_userfaultfd, SYS_ioctl};
    filter_system_calls(forbidden, sizeof forbidden / sizeof *forbidden, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ALLOW);
}

static size_t missing(void)
{
    static unsigned char present[1 << 16];
    size_t absent = 0;
    if (pages > sizeof present || mincore(memory, pages * PAGE, present))
        _exit(2);
    for (size_t page = 0; page < pages; page++)
        absent += !(present[page] & 1);
    return absent;
}

static void lock_late(void)
{
    must(mlockall(MCL_CURRENT), "mlockall");
    verify("locked late");
    for (int look = 0; look < 20; look++) {
        /* What was on its way out just then may be. */
        size_t out = missing();
        if (out > 256) {
            say("FAILED: %zu locked pages are out\n", out);
            _exit(1);
        }
        usleep(10000);
    }
    verify("still locked");
}

/* Ends the process where a thread could give it back what it gave up. */
static void look_at_thread(const char *thread)
{
    char path[300], line[256];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    FILE *status = fopen(path, "r");
    unsigned long long permitted = 0;
    unsigned users[4] = {1, 1, 1, 1};
    while (status && fgets(line, sizeof line, status)) {
        sscanf(line, "CapPrm: %llx", &permitted);
        sscanf(line, "Uid: %u %u %u %u", users, users + 1, users + 2, users + 3);
    }
    must(!status || fclose(status), "a thread's status");
    must(permitted != 0, "a thread has capabilities");
    for (int index = 0; index < 4; index++)
        must(users[index] == 0, "a thread is root's");
}

/* Returns how many threads there are. */
static int look_at_threads(void (*look)(const char *))
{
    DIR *directory = opendir("/proc/self/task");
    struct dirent *entry;
    int threads = 0;
    while (directory && (entry = readdir(directory)))
        if (entry->d_name[0] != '.') {
            look(entry->d_name);
            threads++;
        }
    must(!directory || closedir(directory), "the threads");
    return threads;
}

static void give_up_privileges(void)
{
    must(setresuid(65534, 65534, 65534), "setresuid");
    must(prctl(PR_SET_DUMPABLE, 1), "dumpable");
    int threads = look_at_threads(look_at_thread);
    say(threads > 1 ? "privileges ok\n" : "FAILED: no helper\n");
}

static void have_child_do(void (*work)(void))
{
    pid_t child = fork();
    if (child == 0) {
        work();
        _exit(0);
    }
    int status = -1;
    must(child < 0 || waitpid(child, &status, 0) != child || status != 0, "a child");
}

static void ignore_thread(const char *thread)
{
    (void)thread;
}

/* With capabilities, and without a right to change its user: the helper has them, too, and keeps them. */
static void outlive_helper(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];
    must(syscall(SYS_capget, &header, sets), "capabilities");
    must(sets[0].effective == 0, "it has no capabilities");
    must(look_at_threads(ignore_thread) != 2, "a helper");
    /* Until its memory is managed. */
    usleep(200000);
    memset(sets, 0, sizeof sets);
    must(syscall(SYS_capset, &header, sets), "capabilities are given up");
    double end = seconds_now() + 10;
    while (look_at_threads(ignore_thread) > 1) {
        must(seconds_now() > end, "the helper goes on");
        usleep(5000);
    }
    verify("without a helper");
    for (uint64_t generation = 2; generation < 22; generation++) {
        must(madvise(memory, pages * WORDS * sizeof *memory, MADV_DONTNEED), "memory is dropped");
        stamp_pages(memory, 0, pages, generation);
    }
    say("follow ok\n");
}

/* The child is root by its real and its saved user. */
static void give_up_privileges_in_child(void)
{
    must(setresuid((uid_t)-1, 65534, (uid_t)-1), "an effective user");
    have_child_do(give_up_privileges);
}

static cpu_set_t cpus_at_first;

static void look_at_schedule(const char *thread)
{
    pid_t other = atoi(thread);
    cpu_set_t cpus;
    if (other == getpid())
        return;
    must(sched_getscheduler(other) != (SCHED_OTHER | SCHED_RESET_ON_FORK), "an ordinary thread");
    must(sched_getaffinity(other, sizeof cpus, &cpus), "CPUs");
    must(!CPU_EQUAL(&cpus, &cpus_at_first), "the CPUs that memfold has");
}

static void look_at_schedules(void)
{
    say(look_at_threads(look_at_schedule) > 1 ? "ordinary ok\n" : "FAILED: no helper\n");
}

static void fork_in_real_time(void)
{
    struct sched_param lowest = {.sched_priority = 1};
    cpu_set_t one;
    must(sched_getaffinity(0, sizeof cpus_at_first, &cpus_at_first), "CPUs");
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    must(sched_setaffinity(0, sizeof one, &one), "one CPU");
    must(sched_setscheduler(0, SCHED_FIFO, &lowest), "real time");
    have_child_do(look_at_schedules);
}

static void enter_mounts(void)
{
    int ready[2];
    char byte, path[64];
    must(pipe(ready), "pipe");
    pid_t child = fork();
    if (child == 0) {
        must(unshare(CLONE_NEWNS), "another mount namespace");
        if (write(ready[1], "r", 1) != 1)
            _exit(2);
        for (;;)
            pause();
    }
    if (child < 0 || read(ready[0], &byte, 1) != 1)
        _exit(2);
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)child);
    must(setns(open(path, O_RDONLY), CLONE_NEWNS), "entering a mount namespace");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    verify("in another mount namespace");
    say("mounts ok\n");
}

int main(int count, char **arguments)
{
    if (count < 3)
        return 2;
    const char *mode = arguments[1];
    pages = strtoul(arguments[2], NULL, 10) * 256;
    if (!strcmp(mode, "locked"))
        must(mlockall(MCL_CURRENT | MCL_FUTURE), "mlockall");
    memory = map_stamped(pages);
    if (!strcmp(mode, "exit")) {
        syscall(SYS_exit, 3);
    } else if (!strcmp(mode, "strict")) {
        must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT), "seccomp");
        verify("strict");
        syscall(SYS_exit, 3);
    } else if (!strcmp(mode, "forbidden")) {
        must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT), "seccomp");
        syscall(SYS_getppid);
    } else if (!strcmp(mode, "filtered")) {
        static const int forbidden[] = {SYS_getppid};
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        filter_system_calls(forbidden, 1, SECCOMP_RET_KILL_THREAD, SECCOMP_RET_ALLOW);
        syscall(SYS_getppid);
    } else if (!strcmp(mode, "last")) {
        pthread_t other;
        if (pthread_create(&other, NULL, end_later, NULL))
            return 2;
        syscall(SYS_exit, 3);
    } else if (!strcmp(mode, "room")) {
        leave_no_room();
        fork_and_verify("no room");
    } else if (!strcmp(mode, "descriptors")) {
        leave_no_descriptors();
        fork_and_verify("no descriptors");
    } else if (!strcmp(mode, "network")) {
        leave_network();
        fork_and_verify("another network");
    } else if (!strcmp(mode, "execute") && count > 3) {
        forbid_system_calls();
        execv(arguments[3], arguments + 3);
        return 2;
    } else if (!strcmp(mode, "locked")) {
        verify("locked");
        say("locked ok\n");
    } else if (!strcmp(mode, "late")) {
        lock_late();
        say("late ok\n");
    } else if (!strcmp(mode, "privileges")) {
        must(prctl(PR_GET_DUMPABLE) != 1, "dumpable");
        give_up_privileges();
    } else if (!strcmp(mode, "follow")) {
        outlive_helper();
    } else if (!strcmp(mode, "effective")) {
        give_up_privileges_in_child();
    } else if (!strcmp(mode, "ordinary")) {
        fork_in_real_time();
    } else if (!strcmp(mode, "mounts")) {
        enter_mounts();
    } else {
        return 2;
    }
    return 0;
}
