/* What a program does before it has a helper, and while it gets one.
 *
 *   late grow MEGABYTES    stamps pages as fast as it can, and verifies them twice
 *   late hold MEGABYTES    stamps pages, sleeps for two seconds, and verifies them
 *   late helped MEGABYTES  the same, and sleeps again until it has a helper
 *   late touch MEGABYTES   writes a word of each page, which is the fastest growth, and verifies that
 *   late forks MEGABYTES   forks at once, and again and again as it grows; each child verifies and grows, too
 *   late spawns MEGABYTES  is large when it makes a child by vfork, which does not execute anything for a while
 *   late user MEGABYTES    closes all descriptors and becomes another user before it grows
 *   late outlives MEGABYTES  the main thread ends before another one stamps pages, sleeps and verifies them
 *   late ticks MEGABYTES   a child interrupts itself as it has itself traced, and executes this to be helped with so much
 *   late waits             is large, and waits for an event, again until it has a helper; an interruption would show
 *   late signals           the same, and a signal is to end the wait
 *   late receives          the same for data on a socket with a timeout
 *   late ring              the same for a completion of io_uring
 *   late executes MEGABYTES SCRIPT INTERPRETER  is large when another thread executes a script, whose interpreter the
 *                          kernel waits to open
 *   late stopped           waits without an end, and one signal that comes while it is traced is to end that
 *
 * One line on stdout. */
#define _GNU_SOURCE
#include "has_helper.h"
#include "stamp.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/fanotify.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

/* As few as are worth a helper at all: it is not started before the wait has begun. */
enum { LARGE = 8192, WORTH = 1100, STEPS = 8 };

static void end_unless(int is_right, const char *what)
{
    if (!is_right) {
        say("MISMATCH %s (errno %d)\n", what, errno);
        _exit(1);
    }
}

static void expect_success(pid_t child)
{
    int status;
    end_unless(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child");
}

static void grow(size_t pages)
{
    const uint64_t *memory = map_stamped(pages);
    verify_pages("grown", memory, 0, pages, 1);
    verify_pages("again", memory, 0, pages, 1);
}

static void hold(size_t pages)
{
    const uint64_t *memory = map_stamped(pages);
    sleep(2);
    verify_pages("held", memory, 0, pages, 1);
}

static void helped(size_t pages)
{
    const uint64_t *memory = map_stamped(pages);
    int wait = 0;
    do
        sleep(2);
    while (++wait < MOST_WAITS && !has_helper());
    verify_pages("helped", memory, 0, pages, 1);
}

static void *outlive(void *pages)
{
    /* Until the main thread has ended. */
    usleep(50000);
    helped(*(size_t *)pages);
    say("outlives ok\n");
    _exit(0);
}

static void outlives(size_t pages)
{
    static size_t other_pages;
    pthread_t other;
    other_pages = pages;
    end_unless(!pthread_create(&other, NULL, outlive, &other_pages), "a thread");
    pthread_exit(NULL);
}

/* Where a signal takes as long as the time between two, the program would come no further. */
static volatile sig_atomic_t ticks_left = 2000;

static void tick(int number)
{
    (void)number;
    struct itimerval never = {0};
    if (--ticks_left == 0)
        setitimer(ITIMER_REAL, &never, NULL);
}

static void be_traced(char *self, char *megabytes)
{
    struct sigaction action = {.sa_handler = tick};
    struct itimerval often = {{0, 20}, {0, 20}}, never = {0};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    long traced = ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    setitimer(ITIMER_REAL, &never, NULL);
    end_unless(traced == 0, "tracing");
    execl(self, self, "helped", megabytes, (char *)NULL);
    _exit(2);
}

static void ticks(char *self, char *megabytes)
{
    pid_t child = fork();
    if (child == 0)
        be_traced(self, megabytes);
    int status = -1;
    while (waitpid(child, &status, 0) == child && WIFSTOPPED(status))
        ptrace(PTRACE_CONT, child, NULL, NULL);
    end_unless(status == 0, "a traced child");
}

static void touch(size_t pages)
{
    uint64_t *memory = map_pages(pages);
    for (size_t page = 0; page < pages; page++)
        memory[page * WORDS] = page + 1;
    for (size_t page = 0; page < pages; page++)
        end_unless(memory[page * WORDS] == page + 1, "a page that was touched");
}

static void forks(size_t pages)
{
    pid_t first = fork();
    if (first == 0) {
        grow(pages / 2);
        _exit(0);
    }
    uint64_t *memory = map_pages(pages);
    for (size_t step = 0; step < STEPS; step++) {
        size_t end = pages / STEPS * (step + 1);
        stamp_pages(memory, pages / STEPS * step, end, 1);
        pid_t child = fork();
        if (child == 0) {
            verify_pages("inherited", memory, 0, end, 1);
            grow(pages / STEPS);
            verify_pages("inherited, again", memory, 0, end, 1);
            _exit(0);
        }
        expect_success(child);
    }
    verify_pages("parent", memory, 0, pages, 1);
    expect_success(first);
}

static void spawns(size_t pages)
{
    const uint64_t *memory = map_stamped(LARGE);
    pid_t child = vfork();
    if (child == 0) {
        usleep(700000);
        _exit(0);
    }
    expect_success(child);
    grow(pages);
    verify_pages("before", memory, 0, LARGE, 1);
}

static void other_user(size_t pages)
{
    close_range(3, ~0U, 0);
    end_unless(!setresgid(65534, 65534, 65534) && !setresuid(65534, 65534, 65534), "another user");
    grow(pages);
}

static void nothing(int signal)
{
    (void)signal;
}

static void wait_for_signals(int queue)
{
    enum { AT_A_TIME = 40 };
    struct epoll_event event;
    struct itimerval timer = {{0, 50000}, {0, 50000}};
    signal(SIGALRM, nothing);
    setitimer(ITIMER_REAL, &timer, NULL);
    for (int count = 0; count < AT_A_TIME; count++) {
        int result = epoll_wait(queue, &event, 1, 20000);
        end_unless(result < 0 && errno == EINTR, "the signal did not end the wait");
    }
    struct itimerval never = {0};
    setitimer(ITIMER_REAL, &never, NULL);
}

static void wait_for_event(int queue)
{
    struct epoll_event event;
    end_unless(epoll_wait(queue, &event, 1, 2500) == 0, "the wait");
}

/* Waits, and again until there is a helper: a wait is longer than it takes until a sleeping thread is sent to start that, but
 * where memfold has no CPU meanwhile. */
static void wait_whole(void (*wait)(int), int on, double seconds)
{
    int waited = 0;
    do {
        double began = seconds_now();
        wait(on);
        end_unless(seconds_now() - began > seconds, "it was short");
    } while (++waited < MOST_WAITS && !has_helper());
}

static void waits(int by_signal)
{
    map_stamped(WORTH);
    int queue = epoll_create1(0);
    if (by_signal)
        wait_whole(wait_for_signals, queue, 0);
    else
        wait_whole(wait_for_event, queue, 2.4);
}

static int is_traced(pid_t process)
{
    char path[64], text[4096] = "";
    snprintf(path, sizeof path, "/proc/%d/status", (int)process);
    int file = open(path, O_RDONLY);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    close(file);
    const char *tracer = length < 0 ? NULL : strstr(text, "TracerPid:");
    return tracer && atoi(tracer + strlen("TracerPid:")) != 0;
}

static void stopped(void)
{
    enum { PATIENCE = 5, UNTIL_TRACED = 30 };
    pid_t waiting = getpid();
    int queue = epoll_create1(0);
    signal(SIGUSR1, nothing);
    /* Where it comes before the wait, it ends that. */
    sigset_t none, usr1;
    sigemptyset(&none);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    sigprocmask(SIG_BLOCK, &usr1, NULL);
    pid_t child = fork();
    if (child == 0) {
        /* On a busy machine the moment may be missed. The signal is to end the wait all the same. */
        for (double began = seconds_now(); !is_traced(waiting) && seconds_now() - began < UNTIL_TRACED;)
            usleep(20);
        usleep(300);
        kill(waiting, SIGUSR1);
        sleep(PATIENCE);
        kill(waiting, SIGKILL);
        _exit(1);
    }
    map_stamped(WORTH);
    struct epoll_event event;
    end_unless(epoll_pwait(queue, &event, 1, -1, &none) < 0 && errno == EINTR, "the signal");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    /* Where the moment was missed, another one comes. */
    for (int count = 0; count < UNTIL_TRACED * 10 && !has_helper(); count++)
        usleep(100000);
}

static void receive(int socket)
{
    char byte;
    end_unless(recv(socket, &byte, 1, 0) < 0 && errno == EAGAIN, "the wait");
}

static void receives(void)
{
    map_stamped(WORTH);
    int pair[2];
    struct timeval patience = {2, 500000};
    end_unless(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "the sockets");
    end_unless(!setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience), "the timeout");
    wait_whole(receive, pair[0], 2.4);
}

/* The completion is that of a timeout, half a second later. */
static void complete(int seconds)
{
    struct io_uring_params parameters = {0};
    int ring = (int)syscall(SYS_io_uring_setup, 1, &parameters);
    end_unless(ring >= 0, "the ring");
    char *words = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entry =
        mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    end_unless(words != MAP_FAILED && entry != MAP_FAILED, "the queues");
    struct {
        int64_t seconds, nanoseconds;
    } patience = {seconds, 500000000};
    entry->opcode = IORING_OP_TIMEOUT;
    entry->fd = -1;
    entry->addr = (uintptr_t)&patience;
    entry->len = 1;
    ((unsigned *)(words + parameters.sq_off.array))[0] = 0;
    __atomic_store_n((unsigned *)(words + parameters.sq_off.tail), 1, __ATOMIC_RELEASE);
    end_unless(syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0) == 1, "the request");
    long waited = syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    end_unless(waited == 0, "the wait");
    munmap(words, PAGE);
    munmap(entry, PAGE);
    close(ring);
}

static void ring(void)
{
    map_stamped(WORTH);
    wait_whole(complete, 2, 2.4);
}

static void *execute(void *script)
{
    execl(script, script, NULL);
    end_unless(0, "execl");
    return NULL;
}

static void executes(size_t pages, char *script, const char *interpreter)
{
    /* What happens is asked for, and never answered. */
    int events = fanotify_init(FAN_CLASS_CONTENT, O_RDONLY);
    if (events == -1 && errno == EPERM)
        return;
    end_unless(!fanotify_mark(events, FAN_MARK_ADD, FAN_OPEN_EXEC_PERM, AT_FDCWD, interpreter), "fanotify_mark");
    const uint64_t *memory = map_stamped(pages);
    pthread_t other;
    end_unless(!pthread_create(&other, NULL, execute, script), "pthread_create");
    pthread_join(other, NULL);
    verify_pages("waited", memory, 0, pages, 1);
}

int main(int count, char **arguments)
{
    if (count < 2)
        return 2;
    const char *mode = arguments[1];
    size_t pages = count > 2 ? strtoul(arguments[2], NULL, 10) * 256 : 0;
    if (!strcmp(mode, "grow"))
        grow(pages);
    else if (!strcmp(mode, "hold"))
        hold(pages);
    else if (!strcmp(mode, "helped"))
        helped(pages);
    else if (!strcmp(mode, "outlives"))
        outlives(pages);
    else if (!strcmp(mode, "ticks") && count > 2)
        ticks(arguments[0], arguments[2]);
    else if (!strcmp(mode, "touch"))
        touch(pages);
    else if (!strcmp(mode, "forks"))
        forks(pages);
    else if (!strcmp(mode, "spawns"))
        spawns(pages);
    else if (!strcmp(mode, "user"))
        other_user(pages);
    else if (!strcmp(mode, "executes") && count > 4)
        executes(pages, arguments[3], arguments[4]);
    else if (!strcmp(mode, "receives"))
        receives();
    else if (!strcmp(mode, "ring"))
        ring();
    else if (!strcmp(mode, "stopped"))
        stopped();
    else
        waits(!strcmp(mode, "signals"));
    say("%s ok\n", mode);
    return 0;
}
