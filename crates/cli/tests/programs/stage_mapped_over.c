/* A program that maps a file of its own FUSE file system over its helper's stage.
 *
 *   stage_mapped_over over MEGABYTES SECONDS    rewrites its memory, and after a second maps the file over
 *                                               the stage, whose pages the file system never reads
 *   stage_mapped_over steady MEGABYTES SECONDS  rewrites and verifies its memory
 *
 * The file system is served by a process without the library: `stage_mapped_over serve SOCKET`. */
#define _GNU_SOURCE
#include "filter.h"
#include "rights.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { STAGE_PAGES = 2048, TRASH_PAGES = 128, ROOT = 1, FILE_ = 2 };
#define FILE_BYTES (STAGE_PAGES * PAGE)

static void send_descriptor(int socket_, int descriptor)
{
    must(send_rights(socket_, "", 1, &descriptor, 1) != 1, "sendmsg");
}

static int receive_descriptor(int socket_)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    char byte;
    struct iovec vector = {&byte, 1};
    struct msghdr header = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    must(recvmsg(socket_, &header, MSG_CMSG_CLOEXEC) != 1, "recvmsg");
    struct cmsghdr *message = CMSG_FIRSTHDR(&header);
    must(message == NULL, "a descriptor");
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(message), sizeof descriptor);
    return descriptor;
}

static void reply(int device, const struct fuse_in_header *to, int error, const void *body, size_t length)
{
    char buffer[512];
    struct fuse_out_header header = {sizeof header + length, error, to->unique};
    memcpy(buffer, &header, sizeof header);
    if (length)
        memcpy(buffer + sizeof header, body, length);
    /* It is refused where the caller was interrupted. */
    ssize_t written = write(device, buffer, header.len);
    (void)written;
}

static struct fuse_attr attributes_of(uint64_t node)
{
    struct fuse_attr attributes = {.ino = node, .nlink = 1, .blksize = PAGE};
    attributes.mode = node == ROOT ? S_IFDIR | 0755 : S_IFREG | 0666;
    attributes.size = node == ROOT ? 0 : FILE_BYTES;
    return attributes;
}

static void answer(int device, const struct fuse_in_header *request)
{
    switch (request->opcode) {
    case FUSE_INIT: {
        struct fuse_init_out init = {.major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = PAGE};
        reply(device, request, 0, &init, sizeof init);
        break;
    }
    case FUSE_LOOKUP: {
        struct fuse_entry_out entry = {
            .nodeid = FILE_, .entry_valid = 1000, .attr_valid = 1000, .attr = attributes_of(FILE_)};
        reply(device, request, 0, &entry, sizeof entry);
        break;
    }
    case FUSE_GETATTR: {
        struct fuse_attr_out out = {.attr_valid = 1000, .attr = attributes_of(request->nodeid)};
        reply(device, request, 0, &out, sizeof out);
        break;
    }
    case FUSE_OPEN: {
        struct fuse_open_out open_ = {.fh = 1};
        reply(device, request, 0, &open_, sizeof open_);
        break;
    }
    case FUSE_READ: /* The reader waits. */
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        break;
    default:
        reply(device, request, -ENOSYS, NULL, 0);
    }
}

/* Mounts a file system, hands its one file to the program, and serves it until that program ends. */
static int serve(int socket_)
{
    static char buffer[1 << 17];
    char options[128];
    int spaces = getuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER;
    must(unshare(spaces), "unshare");
    must(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL), "a private tree of mounts");
    int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    must(device < 0, "/dev/fuse");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other", device, getuid(),
             getgid());
    must(mount("never", "/mnt", "fuse", MS_NOSUID | MS_NODEV, options), "mount");
    if (fork() == 0) {
        int file = open("/mnt/file", O_RDWR);
        must(file < 0, "the file");
        send_descriptor(socket_, file);
        _exit(0);
    }
    struct pollfd both[] = {{.fd = device, .events = POLLIN}, {.fd = socket_}};
    while (poll(both, 2, -1) > 0 && !(both[1].revents & POLLHUP)) {
        ssize_t got = read(device, buffer, sizeof buffer);
        if (got >= (ssize_t)sizeof(struct fuse_in_header))
            answer(device, (struct fuse_in_header *)buffer);
    }
    return 0;
}

static int start_server(const char *program)
{
    int ends[2];
    char number[16];
    must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), "socketpair");
    pid_t server = fork();
    must(server < 0, "fork");
    if (server == 0) {
        int end = dup(ends[1]);
        snprintf(number, sizeof number, "%d", end);
        unsetenv("LD_PRELOAD");
        execl(program, program, "serve", number, NULL);
        _exit(2);
    }
    close(ends[1]);
    return receive_descriptor(ends[0]);
}

/* The helper's stage: it lies right before the trash, and both are of known lengths. */
static void *find_stage(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    unsigned long start, end, before = 0, before_end = 0, stage = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx rw-p", &start, &end) != 2)
            continue;
        if (before_end == start && start - before == STAGE_PAGES * PAGE && end - start == TRASH_PAGES * PAGE)
            stage = before;
        before = start, before_end = end;
    }
    must(stage == 0, "the stage in /proc/self/maps");
    fclose(maps);
    return (void *)stage;
}

struct rewritten {
    uint64_t *memory;
    size_t pages;
    double seconds;
};

static void *rewrite(void *argument)
{
    struct rewritten *all = argument;
    double end = seconds_now() + all->seconds;
    for (uint64_t generation = 1; seconds_now() < end; generation++) {
        verify_pages("rewritten", all->memory, 0, all->pages, generation);
        stamp_pages(all->memory, 0, all->pages, generation + 1);
    }
    return NULL;
}

static int over(const char *program, size_t pages, double seconds)
{
    int file = start_server(program);
    struct rewritten all = {map_stamped(pages), pages, seconds};
    pthread_t thread;
    must(pthread_create(&thread, NULL, rewrite, &all), "pthread_create");
    usleep(1000000);
    int access = PROT_READ | PROT_WRITE;
    void *stage = find_stage();
    void *mapped = mmap(stage, STAGE_PAGES * PAGE, access, MAP_PRIVATE | MAP_FIXED, file, 0);
    say(mapped == MAP_FAILED ? "over: %s\n" : "over: mapped\n", strerror(errno));
    pthread_join(thread, NULL);
    say("over: ok\n");
    return 0;
}

int main(int count, char **arguments)
{
    if (count == 3 && !strcmp(arguments[1], "serve"))
        return serve(atoi(arguments[2]));
    if (count != 4)
        return 2;
    size_t pages = strtoul(arguments[2], NULL, 10) * 256;
    double seconds = atof(arguments[3]);
    if (!strcmp(arguments[1], "over"))
        return over(arguments[0], pages, seconds);
    rewrite(&(struct rewritten){map_stamped(pages), pages, seconds});
    say("steady: ok\n");
    return 0;
}
