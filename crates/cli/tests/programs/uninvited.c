/* What an intruder tells memfold.
 *
 *   uninvited knock NAME COUNT     connects COUNT times to the abstract name NAME, says nothing, and
 *                                 counts on which of these it is hung up within two seconds
 *   uninvited flood NAME SECONDS  connects and hangs up without a pause, deep below other processes
 *   uninvited linger NAME COUNT   connects COUNT times by path or abstract name and sends sockets that take
 *                                 a minute to close
 *   uninvited hold COUNT           becomes another user, connects COUNT times, says nothing and sleeps
 *   uninvited sound                says hello for itself, with all that memfold asks for: it is welcomed
 *   uninvited leave                says hello for itself twice, takes no answer, hangs up, and lives on
 *   uninvited foreign              says hello for a child with userfaultfds of its own
 *   uninvited claim MEGABYTES      says hello for memory that another process has inherited by a fork; what it inherited
 *                                 itself it is given
 *   uninvited token MEGABYTES      says hello as the child of a prepared fork that there is not
 *   uninvited rubbish              says hello with what cannot be, and with other descriptors
 *   uninvited exchanged TRUSTED    connects and executes TRUSTED, a copy of this with more rights; its
 *                                 child then says hello by that connection, for a thread of it
 *   uninvited trusted ARENA PIPE   what that executes: says whether any page of ARENA was read
 *
 * All but the first three are run under memfold, and find it by LD_PRELOAD, as the third does for a NAME "-". One line on
 * stdout. */
#define _GNU_SOURCE
#include "filter.h"
#include "rights.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

enum { STAGE_PAGES = 2048, TRASH_PAGES = 128, FRONT_PAGES = 16 };
#define ARENA_PAGES (FRONT_PAGES + STAGE_PAGES + TRASH_PAGES + 1)

struct hello {
    uint64_t magic, inherited, arena, arena_length, stage, stage_pages, trash, beacon, relative, thread, refused,
        can_prepare;
};

struct welcome {
    uint64_t magic, address_space, replaces_uffd;
};

static char name[108];

/* Where memfold listens: beside the library that it preloads. */
static void find_memfold(void)
{
    const char *preload = getenv("LD_PRELOAD");
    if (!preload || strlen(preload) >= sizeof name)
        _exit(2);
    strcpy(name, preload);
    name[strcspn(name, ": ")] = 0;
    char *slash = strrchr(name, '/');
    if (!slash || slash - name + sizeof "/control" > sizeof name)
        _exit(2);
    strcpy(slash, "/control");
}

static int connect_by(int is_abstract)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + is_abstract, name, strlen(name));
    int socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (socket_ >= 0 && connect(socket_, (struct sockaddr *)&address, sizeof address) == 0)
        return socket_;
    int error = errno;
    close(socket_);
    errno = error;
    return -1;
}

static int connect_to_memfold(void)
{
    return connect_by(1);
}

/* What is sent to a connection by the abstract name is refused until memfold knows the process. */
static int is_sent(int socket_, const void *data, size_t length, const int *descriptors, size_t count)
{
    for (int tries = 0; tries < 10000; tries++, usleep(500))
        if (send_rights(socket_, data, length, descriptors, count) >= 0)
            return 1;
        else if (errno != EPERM)
            return 0;
    return 0;
}

static void *sleep_on(void *number)
{
    *(volatile pid_t *)number = syscall(SYS_gettid);
    sleep(1000);
    return NULL;
}

/* A thread of this process, besides the main one: a helper. */
static pid_t helper_thread(void)
{
    static pid_t process;
    static volatile pid_t number;
    if (process != getpid()) {
        pthread_t thread;
        number = 0, process = getpid();
        must(pthread_create(&thread, NULL, sleep_on, (void *)&number), "pthread_create");
        while (number == 0)
            usleep(100);
    }
    return number;
}

static void seal(char *start, size_t pages)
{
    /* Before Linux 6.10 there is no such call, and memfold does not ask for it. */
    syscall(462, start, pages * PAGE, 0);
}

static struct hello sound_hello(char *arena)
{
    struct hello hello = {
        .magic = 0x31646c6f666d656d,
        .arena = (uint64_t)arena,
        .arena_length = ARENA_PAGES * PAGE,
        .stage = (uint64_t)arena + FRONT_PAGES * PAGE,
        .stage_pages = STAGE_PAGES,
        .trash = (uint64_t)arena + (FRONT_PAGES + STAGE_PAGES) * PAGE,
        .beacon = (uint64_t)arena + PAGE,
        .thread = helper_thread(),
        .can_prepare = 1,
    };
    return hello;
}

/* At an address, or where the kernel likes. */
static char *map_arena(char *address)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (address ? MAP_FIXED : 0);
    char *arena = mmap(address, ARENA_PAGES * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    must(arena == MAP_FAILED, "mmap");
    return arena;
}

/* The answer to a hello with two descriptors; 0 where memfold hangs up. */
static int is_welcomed(int socket_, const void *hello, size_t length, int first, int second)
{
    int both[RIGHTS_MOST] = {first, second};
    if (!is_sent(socket_, hello, length, both, first >= 0 ? RIGHTS_MOST : 0))
        return 0;
    union {
        char bytes[CMSG_SPACE(RIGHTS_MOST * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct welcome welcome = {0};
    struct iovec room = {&welcome, sizeof welcome};
    memset(&control, 0, sizeof control);
    struct msghdr answer = {
        .msg_iov = &room, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct pollfd wait = {.fd = socket_, .events = POLLIN};
    if (poll(&wait, 1, 10000) != 1) {
        say("FAILED: no answer\n");
        _exit(1);
    }
    return recvmsg(socket_, &answer, 0) == (ssize_t)sizeof welcome && welcome.address_space != 0;
}

static int own_userfaultfd(void)
{
    int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    must(uffd < 0, "userfaultfd");
    return uffd;
}

static void become_nobody(void)
{
    must(setresgid(65534, 65534, 65534), "setresgid");
    must(setresuid(65534, 65534, 65534), "setresuid");
    /* Or it could not look into its own child. */
    must(prctl(PR_SET_DUMPABLE, 1), "dumpable");
}

static int knock(int count)
{
    struct pollfd *all = calloc(count, sizeof *all);
    int connected = 0, hung_up = 0, tries = 0;
    while (connected < count && tries++ < 10 * count) {
        int one = connect_to_memfold();
        if (one >= 0)
            all[connected++] = (struct pollfd){.fd = one, .events = POLLIN};
        else
            usleep(1000);
    }
    for (int turn = 0; turn < 40 && hung_up < connected; turn++) {
        usleep(50000);
        poll(all, connected, 0);
        hung_up = 0;
        for (int index = 0; index < connected; index++)
            hung_up += (all[index].revents & (POLLHUP | POLLERR)) != 0;
    }
    say("connected %d, hung up on %d\n", connected, hung_up);
    return 0;
}

static int flood(double seconds)
{
    /* So that it takes long to find out whose child it is. */
    for (int level = 0; level < 40; level++) {
        pid_t child = fork();
        must(child < 0, "fork");
        if (child > 0) {
            waitpid(child, NULL, 0);
            _exit(0);
        }
        /* The test kills the first one, and so all of them. */
        must(prctl(PR_SET_PDEATHSIG, SIGKILL) != 0, "prctl");
    }
    double end = seconds_now() + seconds;
    while (seconds_now() < end)
        close(connect_to_memfold());
    return 0;
}

/* A socket whose other end does not read what was sent to it. */
static int stuffed_socket(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0), small = 4096;
    must(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), "SO_RCVBUF");
    must(setsockopt(near, SOL_SOCKET, SO_SNDBUF, &small, sizeof small), "SO_SNDBUF");
    must(bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1), "listen");
    must(getsockname(listener, (struct sockaddr *)&address, &size), "getsockname");
    must(connect(near, (struct sockaddr *)&address, size), "connect");
    must(accept(listener, NULL, NULL) < 0, "accept");
    must(fcntl(near, F_SETFL, O_NONBLOCK), "fcntl");
    static const char data[1 << 16];
    while (write(near, data, sizeof data) > 0)
        ;
    close(listener);
    return near;
}

static int send_lingering(int socket_, size_t length)
{
    int slow = stuffed_socket();
    int sent = is_sent(socket_, "x", length, &slow, 1);
    struct linger minute = {1, 60};
    must(setsockopt(slow, SOL_SOCKET, SO_LINGER, &minute, sizeof minute), "SO_LINGER");
    /* If memfold has closed it already, a signal ends the wait. */
    ualarm(20000, 20000);
    close(slow);
    ualarm(0, 0);
    return sent;
}

static void do_nothing(int signal)
{
    (void)signal;
}

static int linger(int count)
{
    signal(SIGALRM, do_nothing);
    int sent = 0;
    for (int index = 0; index < count; index++) {
        int socket_ = connect_by(0);
        if (socket_ < 0)
            socket_ = connect_by(1);
        must(socket_ < 0, "connect");
        sent += send_lingering(socket_, index % 2);
        if (index % 3 == 0)
            close(socket_);
    }
    say("sent %s\n", sent ? "some" : "none");
    pause();
    return 0;
}

static int hold(int count)
{
    find_memfold();
    become_nobody();
    int connected = 0;
    for (int index = 0; index < count; index++)
        connected += connect_to_memfold() >= 0;
    say("holds %d\n", connected > 0);
    pause();
    return 0;
}

static int claim_one(char *arena, char *beacon, uint64_t number)
{
    int socket_ = connect_to_memfold(), own = own_userfaultfd(), trash = own_userfaultfd();
    must(socket_ < 0, "connect");
    struct hello hello = sound_hello(arena);
    hello.inherited = number;
    hello.beacon = (uint64_t)beacon;
    int welcomed = is_welcomed(socket_, &hello, sizeof hello, own, trash);
    close(socket_), close(own), close(trash);
    return welcomed;
}

/* What the other modes say would be taken but for what they are to be refused for. */
static int sound(void)
{
    find_memfold();
    become_nobody();
    char *arena = map_arena(NULL);
    seal(arena, FRONT_PAGES + STAGE_PAGES);
    int welcomed = claim_one(arena, arena + PAGE, 0);
    say(welcomed ? "welcomed\n" : "FAILED: not welcomed\n");
    return !welcomed;
}

static int leave(void)
{
    find_memfold();
    become_nobody();
    for (int turn = 0; turn < 2; turn++) {
        char *arena = map_arena(NULL);
        seal(arena, FRONT_PAGES + STAGE_PAGES);
        int both[RIGHTS_MOST] = {own_userfaultfd(), own_userfaultfd()}, socket_ = connect_to_memfold();
        must(socket_ < 0, "connect");
        /* To hang up after the hello alone could come after the welcome. */
        must(shutdown(socket_, SHUT_RD) != 0, "shutdown");
        struct hello hello = sound_hello(arena);
        must(!is_sent(socket_, &hello, sizeof hello, both, RIGHTS_MOST), "send");
        close(socket_), close(both[0]), close(both[1]);
    }
    say("left\n");
    pause();
    return 0;
}

/* The userfaultfds are the parent's; whose memory would be read is the child. */
static int foreign(void)
{
    find_memfold();
    become_nobody();
    char *arena = map_arena(NULL);
    int own = own_userfaultfd(), trash = own_userfaultfd();
    pid_t child = fork();
    if (child == 0) {
        int socket_ = connect_to_memfold();
        must(socket_ < 0, "connect");
        strcpy(arena + FRONT_PAGES * PAGE, "the child's own secret");
        seal(arena, FRONT_PAGES + STAGE_PAGES);
        struct hello hello = sound_hello(arena);
        _exit(is_welcomed(socket_, &hello, sizeof hello, own, trash) ? 3 : 0);
    }
    int status = -1;
    must(waitpid(child, &status, 0) != child, "waitpid");
    say(status == 0 ? "not welcomed\n" : "FAILED: welcomed (%x)\n", status);
    return status != 0;
}

/* The page in which a forked child reads what it inherited: one page, wiped by forks, and registered. */
static char *find_beacon(void)
{
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    unsigned long start = 0, end = 0, beacon = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            start = from, end = to;
        if (strstr(line, "VmFlags:") && strstr(line, " wf") && strstr(line, " um") && end - start == PAGE)
            beacon = start;
    }
    if (maps)
        fclose(maps);
    if (!beacon) {
        say("FAILED: no beacon\n");
        _exit(2);
    }
    return (char *)beacon;
}

/* Claims what another child inherited: by its number, and by all that it reads in its beacon. Then its own. */
static _Noreturn void claim_all(char *arena, const char *shown)
{
    char *beacon = find_beacon();
    static char own[PAGE];
    memcpy(own, beacon, PAGE);
    uint64_t own_number, its_number;
    memcpy(&own_number, own, sizeof own_number);
    become_nobody();
    map_arena(arena);
    seal(arena, FRONT_PAGES + STAGE_PAGES);
    int welcomed = 0;
    for (uint64_t number = 1; number <= 40; number++)
        welcomed += number != own_number && claim_one(arena, beacon, number);
    memcpy(&its_number, shown, sizeof its_number);
    must(its_number == 0 || its_number == own_number, "the other child's number");
    memcpy(beacon, shown, PAGE);
    welcomed += claim_one(arena, beacon, its_number);
    memcpy(beacon, own, PAGE);
    must(!claim_one(arena, beacon, own_number), "what it inherited itself");
    say(welcomed ? "FAILED: welcomed %d times\n" : "not welcomed\n", welcomed);
    _exit(welcomed != 0);
}

/* A process that knows the layout of a managed program, by a fork, knows much of what a claim has to say. */
static int claim(size_t pages)
{
    find_memfold();
    char *shown = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(shown == MAP_FAILED, "mmap");
    /* Where both children map one of their own. */
    char *arena = map_arena(NULL);
    uint64_t *memory = map_stamped(pages);
    verify_pages("own", memory, 0, pages, 1);
    pid_t victim = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (victim == 0) {
        map_arena(arena);
        memcpy(shown, find_beacon(), PAGE);
        usleep(5000000);
        _exit(0);
    }
    usleep(500000);
    pid_t worker = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (worker == 0)
        claim_all(arena, shown);
    int status = -1;
    must(waitpid(worker, &status, 0) != worker, "waitpid");
    kill(victim, SIGKILL);
    return status != 0;
}

/* As a child whose parent has had leave to fork, by guesses; its parent forks all the while. */
static int token(size_t pages)
{
    find_memfold();
    uint64_t *memory = map_stamped(pages);
    verify_pages("own", memory, 0, pages, 1);
    pid_t worker = fork();
    if (worker == 0) {
        become_nobody();
        char *arena = map_arena(NULL);
        seal(arena, FRONT_PAGES + STAGE_PAGES);
        int welcomed = 0;
        for (uint64_t guess = 0; guess < 20; guess++)
            welcomed += claim_one(arena, arena + PAGE, 1UL << 63 | guess * 0x123456789abcdefUL);
        say(welcomed ? "FAILED: welcomed %d times\n" : "not welcomed\n", welcomed);
        _exit(welcomed != 0);
    }
    int status = -1;
    while (waitpid(worker, &status, WNOHANG) == 0) {
        pid_t child = fork();
        if (child == 0) {
            verify_pages("a child", memory, 0, pages, 1);
            _exit(0);
        }
        int of_child = -1;
        must(waitpid(child, &of_child, 0) != child || of_child != 0, "a child");
    }
    return status != 0;
}

static int rubbish(void)
{
    find_memfold();
    become_nobody();
    char *arena = map_arena(NULL);
    seal(arena, FRONT_PAGES + STAGE_PAGES);
    unsigned seed = 7;
    int welcomed = 0, ends[2];
    must(pipe(ends), "pipe");
    for (int turn = 0; turn < 300; turn++) {
        int socket_ = connect_to_memfold();
        must(socket_ < 0, "connect");
        struct hello hello = sound_hello(arena);
        int own = own_userfaultfd(), trash = own_userfaultfd();
        uint64_t *fields = (uint64_t *)&hello;
        switch (turn % 4) {
        case 0: /* Any number in any field. */
            fields[1 + rand_r(&seed) % 9] ^= 1ull << rand_r(&seed) % 64;
            break;
        case 1: /* Other descriptors. */
            close(own), close(trash);
            own = dup(ends[0]), trash = dup(ends[1]);
            break;
        case 2: /* A length of its own. */
            break;
        default: /* Numbers without an end. */
            fields[1 + rand_r(&seed) % 9] = ~0ull - rand_r(&seed) % 3 * PAGE;
        }
        size_t length = turn % 4 == 2 ? rand_r(&seed) % sizeof hello : sizeof hello;
        int got = is_welcomed(socket_, &hello, length, own, trash);
        welcomed += turn % 4 != 0 && got;
        close(socket_), close(own), close(trash);
    }
    say(welcomed ? "FAILED: welcomed %d times\n" : "not welcomed\n", welcomed);
    return welcomed != 0;
}

/* The process that memfold saw connecting has more rights when the hello comes. The userfaultfds are
 * the child's, with which every step before the look into that process works. */
static int exchanged(char *program)
{
    find_memfold();
    char *arena = map_arena(NULL);
    int socket_ = connect_to_memfold(), ends[2];
    must(socket_ < 0, "connect");
    must(pipe(ends), "pipe");
    pid_t child = fork();
    must(child < 0, "fork");
    if (child > 0) {
        char address[32], end[16];
        snprintf(address, sizeof address, "%lx", (unsigned long)arena);
        snprintf(end, sizeof end, "%d", ends[1]);
        close(ends[0]);
        execl(program, program, "trusted", address, end, (char *)NULL);
        _exit(126);
    }
    close(ends[1]);
    int own = own_userfaultfd(), trash = own_userfaultfd();
    pid_t thread;
    must(read(ends[0], &thread, sizeof thread) != sizeof thread, "the parent executes nothing");
    struct hello hello = sound_hello(arena);
    hello.thread = thread;
    int welcomed = is_welcomed(socket_, &hello, sizeof hello, own, trash);
    say(welcomed ? "FAILED: welcomed\n" : "not welcomed\n");
    _exit(welcomed);
}

/* A page that another process reads is present from then on, if only as zeros. */
static int trusted(char *arena, int end)
{
    if (geteuid() != 0) {
        say("FAILED: it has no more rights\n");
        return 2;
    }
    must(munmap(arena, ARENA_PAGES * PAGE), "munmap");
    map_arena(arena);
    pid_t thread = helper_thread();
    must(write(end, &thread, sizeof thread) != sizeof thread, "write");
    int status = -1, read = 0;
    must(wait(&status) < 0, "wait");
    static unsigned char present[ARENA_PAGES];
    must(mincore(arena, sizeof present * PAGE, present), "mincore");
    for (size_t page = 0; page < sizeof present; page++)
        read += present[page] & 1;
    say(read ? "FAILED: %d pages were read\n" : "nothing was read\n", read);
    return status != 0 || read != 0;
}

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "";
    if (!strcmp(mode, "knock") && count == 4 && strlen(arguments[2]) < sizeof name) {
        strcpy(name, arguments[2]);
        return knock(atoi(arguments[3]));
    }
    if (!strcmp(mode, "flood") && count == 4 && strlen(arguments[2]) < sizeof name) {
        strcpy(name, arguments[2]);
        return flood(atof(arguments[3]));
    }
    if (!strcmp(mode, "linger") && count == 4 && strlen(arguments[2]) < sizeof name - 1) {
        if (!strcmp(arguments[2], "-"))
            find_memfold();
        else
            strcpy(name, arguments[2]);
        return linger(atoi(arguments[3]));
    }
    if (!strcmp(mode, "hold") && count == 3)
        return hold(atoi(arguments[2]));
    if (!strcmp(mode, "sound"))
        return sound();
    if (!strcmp(mode, "leave"))
        return leave();
    if (!strcmp(mode, "foreign"))
        return foreign();
    if (!strcmp(mode, "claim") && count == 3)
        return claim(strtoul(arguments[2], NULL, 10) * 256);
    if (!strcmp(mode, "token") && count == 3)
        return token(strtoul(arguments[2], NULL, 10) * 256);
    if (!strcmp(mode, "exchanged") && count == 3)
        return exchanged(arguments[2]);
    if (!strcmp(mode, "trusted") && count == 4)
        return trusted((char *)strtoul(arguments[2], NULL, 16), atoi(arguments[3]));
    if (!strcmp(mode, "rubbish"))
        return rubbish();
    return 2;
}
