/* Programs that part from their memory in unusual ways, while most of it is out:
 *
 *   departures left MEGABYTES    a parent forks and ends (or executes) at once; its children verify
 *   departures main MEGABYTES    the main thread ends; another verifies, and forks
 *   departures raw MEGABYTES     a child made behind the C library's back verifies until killed
 *   departures shares MEGABYTES  a process that shares the memory outlives the program, and verifies
 *   departures race MEGABYTES    one thread forks while another moves and unmaps: children see
 *                                the moment of the fork
 *   departures stays MEGABYTES   the same with moves that leave an empty mapping behind
 *   departures over MEGABYTES    the same with moves back and forth between two mappings, both in use
 *   departures drops MEGABYTES   one thread forks while others unmap: children have what was not
 *                                unmapped yet
 *
 * A third argument is a factor on how long left, race, stays and over take.
 *
 * MISMATCH on stdout, and a status that is not 0, where a page is wrong. */
#define _GNU_SOURCE
#include "stamp.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static size_t pages;
/* Factor on the number of forks. */
static unsigned times;
static uint64_t *memory;

static void verify(const char *who)
{
    verify_pages(who, memory, 0, pages, 1);
}

static void must_end_well(pid_t child)
{
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) {
        say("MISMATCH child %d ended with status %x\n", (int)child, status);
        _exit(1);
    }
}

/* Beside a move that leaves its mapping, a child's mappings may not show where the memory is: then it
 * is stopped, with a message. */
static unsigned stopped;

static void must_end_well_or_be_stopped(pid_t child)
{
    int status;
    if (waitpid(child, &status, 0) != child || (status != 0 && status != SIGKILL)) {
        say("MISMATCH child %d ended with status %x\n", (int)child, status);
        _exit(1);
    }
    stopped += status == SIGKILL;
}

static void few_were_stopped(unsigned forks)
{
    fprintf(stderr, "%u of %u children stopped\n", stopped, forks);
    if (stopped > forks / 3) {
        say("MISMATCH: %u of %u children were stopped\n", stopped, forks);
        _exit(1);
    }
}

/* Each round, a process touches pages (so that some are on their way out or back), forks and is
 * gone.  Its child reports through a pipe. */
static void left(char *self)
{
    for (unsigned round = 0; round < 15 * times; round++) {
        int channel[2];
        if (pipe(channel))
            _exit(2);
        pid_t middle = fork();
        if (middle == 0) {
            for (size_t page = round; page < pages; page += 3)
                if (check_page(memory + page * WORDS, page + 1, 1) >= 0)
                    _exit(1);
            if (fork() == 0) {
                verify("left behind");
                if (write(channel[1], "v", 1) != 1)
                    _exit(3);
                _exit(0);
            }
            if (round % 2)
                _exit(0);
            execl(self, "departures", "nothing", "1", (char *)NULL);
            _exit(2);
        }
        must_end_well(middle);
        close(channel[1]);
        char byte = 0;
        if (read(channel[0], &byte, 1) != 1 || byte != 'v') {
            say("MISMATCH round %u: a child that was left behind did not come to its end\n", round);
            _exit(1);
        }
        close(channel[0]);
    }
    say("left ok\n");
}

static void *outlive(void *main_thread)
{
    pthread_join(*(pthread_t *)main_thread, NULL);
    for (unsigned round = 0; round < 4; round++) {
        verify("without its main thread");
        pid_t child = fork();
        if (child == 0) {
            verify("forked without a main thread");
            _exit(0);
        }
        must_end_well(child);
    }
    say("main ok\n");
    _exit(0);
}

static void end_main(void)
{
    static pthread_t main_thread;
    pthread_t other;
    main_thread = pthread_self();
    if (pthread_create(&other, NULL, outlive, &main_thread))
        _exit(2);
    pthread_exit(NULL);
}

static void raw(void)
{
    long child = syscall(SYS_fork);
    if (child == 0) {
        /* By the C library's, which calls what others have it call. */
        pid_t grandchild = fork();
        if (grandchild == 0)
            _exit(0);
        int status;
        if (waitpid(grandchild, &status, 0) != grandchild || status != 0) {
            say("MISMATCH a child of the child made by the system call ended with %x\n", status);
            _exit(1);
        }
    }
    for (;;) {
        verify(child ? "parent" : "made by the system call");
        if (write(1, ".", 1) != 1)
            _exit(3);
    }
}

/* As the child of a vfork does whose parent is killed. */
static int outlive_sharing(void *parent)
{
    while (getppid() == *(pid_t *)parent)
        usleep(1000);
    for (unsigned round = 0; round < 3; round++)
        verify("sharing what was another's memory");
    say("shares ok\n");
    _exit(0);
}

static void shares(void)
{
    static char stack[1 << 16] __attribute__((aligned(16)));
    static pid_t self;
    self = getpid();
    if (clone(outlive_sharing, stack + sizeof stack, CLONE_VM | SIGCHLD, &self) < 0)
        _exit(2);
    /* Some pages are on their way out or back. */
    for (unsigned round = 0; round < 3; round++)
        verify("with a process that shares the memory");
    _exit(0);
}

/* Where the moving thread says that the pieces are.  It says so before and after each change, and
 * a child forked in between looks which of the two is mapped. */
#define PIECES 6
struct piece {
    uint64_t *now, *next;
    uint64_t identity;
    uint64_t *nowhere;
};
static struct piece pieces[PIECES];
static size_t piece_pages;
static volatile int racing = 1;

static int is_mapped(void *start)
{
    return msync(start, piece_pages * PAGE, MS_ASYNC) == 0 || errno != ENOMEM;
}

static void stamp_piece(uint64_t *start, uint64_t identity)
{
    for (size_t page = 0; page < piece_pages; page++)
        stamp_page(start + page * WORDS, identity + page, 1);
}

static void *move_about(void *first)
{
    unsigned seed = (unsigned)(size_t)first;
    while (racing) {
        seed = seed * 1103515245 + 12345;
        /* Each of the two movers has pieces of its own. */
        struct piece *piece = &pieces[((size_t)first + 2 * (seed >> 20)) % PIECES];
        uint64_t *target = piece->nowhere;
        __atomic_store_n(&piece->next, target, __ATOMIC_SEQ_CST);
        /* Over a reservation, which goes with it. */
        if (mremap(piece->now, piece_pages * PAGE, piece_pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
                   target) == MAP_FAILED)
            _exit(2);
        uint64_t *before = piece->now;
        __atomic_store_n(&piece->now, target, __ATOMIC_SEQ_CST);
        piece->nowhere = before;
        if (seed >> 30)
            usleep(300);
    }
    return NULL;
}

static void look_at_pieces(void)
{
    for (unsigned number = 0; number < PIECES; number++) {
        struct piece *piece = &pieces[number];
        uint64_t *start = piece->now;
        if (piece->next && piece->next != start && is_mapped(piece->next)) {
            if (is_mapped(start)) {
                say("MISMATCH piece %u is in two places\n", number);
                _exit(1);
            }
            start = piece->next;
        }
        for (size_t page = 0; page < piece_pages; page++) {
            uint64_t *where = start + page * WORDS;
            verify_stamp("forked while it moved", where, piece->identity + page, 1);
        }
    }
}

/* Moves a piece by turns to each of a row of reserved places; where it was, an empty mapping stays
 * for a while, at two of three turns. */
#define PLACES 16
static uint64_t *places[PLACES];

static void *move_and_leave(void *unused)
{
    struct piece *piece = &pieces[0];
    for (unsigned turn = 1; racing; turn++) {
        uint64_t *target = places[turn % PLACES];
        __atomic_store_n(&piece->next, target, __ATOMIC_SEQ_CST);
        int stays = turn % 3 ? MREMAP_DONTUNMAP : 0;
        if (mremap(piece->now, piece_pages * PAGE, piece_pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | stays,
                   target) == MAP_FAILED)
            _exit(2);
        /* Children are forked in between, too. */
        if (turn % 2)
            usleep(200);
        if (mmap(piece->now, piece_pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            _exit(2);
        __atomic_store_n(&piece->now, target, __ATOMIC_SEQ_CST);
        if (turn % 5 == 0)
            usleep(500);
    }
    return unused;
}

static int can_be_read(const void *start)
{
    int channel[2];
    if (pipe(channel))
        _exit(2);
    return write(channel[1], start, 1) == 1;
}

static void stays(void)
{
    piece_pages = pages;
    size_t stride = (piece_pages + 1) * WORDS;
    uint64_t *room = mmap(NULL, PLACES * stride * 8, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        _exit(2);
    for (unsigned place = 0; place < PLACES; place++)
        places[place] = room + place * stride;
    struct piece *piece = &pieces[0];
    piece->now = mmap(places[0], piece_pages * PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    stamp_piece(piece->now, 1);
    pthread_t mover;
    pthread_create(&mover, NULL, move_and_leave, NULL);
    for (unsigned round = 0; round < 50 * times; round++) {
        pid_t child = fork();
        if (child == 0) {
            uint64_t *start = piece->next && can_be_read(piece->next) ? piece->next : piece->now;
            for (size_t page = round % 7; page < piece_pages; page += 7)
                verify_stamp("forked while it moved", start + page * WORDS, 1 + page, 1);
            _exit(0);
        }
        must_end_well_or_be_stopped(child);
    }
    racing = 0;
    pthread_join(mover, NULL);
    verify_pages("in its last place", piece->now, 0, piece_pages, 1);
    few_were_stopped(50 * times);
    say("stays ok\n");
}

/* A small piece moves back and forth between two mappings, each time over the one that stayed behind,
 * of which one page is used by then, mostly.  Other memory is used meanwhile, and drives it out. */
static void *move_over(void *unused)
{
    struct piece *piece = &pieces[0];
    for (unsigned turn = 1; racing; turn++) {
        uint64_t *target = piece->next;
        usleep(300 + turn % 8 * 2000);
        if (turn % 3)
            target[0] = 1;
        if (mremap(piece->now, piece_pages * PAGE, piece_pages * PAGE,
                   MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, target) == MAP_FAILED)
            _exit(2);
        piece->next = piece->now;
        piece->now = target;
    }
    return unused;
}

static int is_stamped(const uint64_t *start)
{
    return start[(piece_pages / 2) * WORDS] != 0;
}

static void verify_moment(void)
{
    struct piece *piece = &pieces[0];
    /* Whichever is which by now: the child has the piece in one, and nothing in the other. */
    uint64_t *one = piece->now, *other = one == places[0] ? places[1] : places[0];
    if (is_stamped(one) == is_stamped(other)) {
        say("MISMATCH: a child has the piece in %s\n", is_stamped(one) ? "two places" : "none");
        _exit(1);
    }
    uint64_t *start = is_stamped(one) ? one : other, *empty = is_stamped(one) ? other : one;
    for (size_t page = 0; page < piece_pages; page++) {
        verify_stamp("forked while it moved", start + page * WORDS, 1 + page, 1);
        uint64_t expected = page == 0 ? empty[0] & 1 : 0;
        if (empty[page * WORDS] != expected) {
            say("MISMATCH: page %zu of what was left is not empty\n", page);
            _exit(1);
        }
    }
}

static void over(void)
{
    piece_pages = 64;
    memory = map_stamped(pages);
    struct piece *piece = &pieces[0];
    for (unsigned place = 0; place < 2; place++)
        places[place] = map_pages(piece_pages);
    piece->now = places[0];
    piece->next = places[1];
    stamp_piece(piece->now, 1);
    pthread_t mover;
    pthread_create(&mover, NULL, move_over, NULL);
    for (unsigned round = 0; round < 150 * times; round++) {
        size_t part = pages / 16;
        verify_pages("driving the piece out", memory, round % 16 * part, (round % 16 + 1) * part, 1);
        pid_t child = fork();
        if (child == 0) {
            verify_moment();
            _exit(0);
        }
        must_end_well_or_be_stopped(child);
    }
    racing = 0;
    pthread_join(mover, NULL);
    verify_moment();
    few_were_stopped(150 * times);
    say("over ok\n");
}

static void race(void)
{
    piece_pages = pages / PIECES;
    /* Room for twice as many, a page apart so that they are never one mapping. */
    size_t stride = (piece_pages + 1) * WORDS;
    uint64_t *room = mmap(NULL, 2 * PIECES * stride * 8, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        _exit(2);
    for (unsigned number = 0; number < PIECES; number++) {
        struct piece *piece = &pieces[number];
        piece->now = mmap(room + 2 * number * stride, piece_pages * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        piece->nowhere = room + (2 * number + 1) * stride;
        munmap(piece->nowhere, piece_pages * PAGE);
        piece->identity = 1 + number * piece_pages;
        stamp_piece(piece->now, piece->identity);
    }
    pthread_t movers[2];
    for (size_t mover = 0; mover < 2; mover++)
        pthread_create(&movers[mover], NULL, move_about, (void *)mover);
    for (unsigned round = 0; round < 15 * times; round++) {
        pid_t child = fork();
        if (child == 0) {
            look_at_pieces();
            _exit(0);
        }
        must_end_well(child);
    }
    racing = 0;
    for (size_t mover = 0; mover < 2; mover++)
        pthread_join(movers[mover], NULL);
    look_at_pieces();
    say("race ok\n");
}

/* A piece that is unmapped, together with a page behind it that is PROT_NONE, and made anew. */
struct drop {
    uint64_t *start;
    /* From when it is stamped until after it was unmapped. */
    int is_whole;
};
static struct drop drops[2];

static void make_whole(struct drop *drop)
{
    size_t bytes = piece_pages * PAGE;
    void *start = mmap(drop->start, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (start != drop->start || mprotect(start, bytes, PROT_READ | PROT_WRITE))
        _exit(2);
    stamp_pages(drop->start, 0, piece_pages, 1);
    __atomic_store_n(&drop->is_whole, 1, __ATOMIC_SEQ_CST);
}

static void *drop_and_make(void *argument)
{
    struct drop *drop = argument;
    while (racing) {
        /* Long enough to be taken under management. */
        usleep(60000);
        verify_pages("about to be unmapped", drop->start, 0, piece_pages, 1);
        usleep(20000);
        munmap(drop->start, (piece_pages + 1) * PAGE);
        __atomic_store_n(&drop->is_whole, 0, __ATOMIC_SEQ_CST);
        make_whole(drop);
    }
    return NULL;
}

static void drop_beside_forks(void)
{
    piece_pages = pages / 2;
    pthread_t threads[2];
    for (size_t number = 0; number < 2; number++) {
        uint64_t *room = map_pages(piece_pages + 1);
        munmap(room, (piece_pages + 1) * PAGE);
        drops[number].start = room;
        make_whole(&drops[number]);
    }
    for (size_t number = 0; number < 2; number++)
        pthread_create(&threads[number], NULL, drop_and_make, &drops[number]);
    for (double until = seconds_now() + 5; seconds_now() < until;) {
        pid_t child = fork();
        if (child == 0) {
            for (size_t number = 0; number < 2; number++)
                if (drops[number].is_whole && is_mapped(drops[number].start))
                    verify_pages("forked beside its unmapping", drops[number].start, 0, piece_pages, 1);
            _exit(0);
        }
        must_end_well(child);
    }
    racing = 0;
    for (size_t number = 0; number < 2; number++)
        pthread_join(threads[number], NULL);
    say("drops ok\n");
}

int main(int count, char **arguments)
{
    if (count != 3 && count != 4)
        return 2;
    times = count == 4 ? (unsigned)atoi(arguments[3]) : 1;
    const char *mode = arguments[1];
    if (!strcmp(mode, "nothing"))
        return 0;
    pages = strtoul(arguments[2], NULL, 10) * 256;
    if (!strcmp(mode, "race")) {
        race();
        return 0;
    }
    if (!strcmp(mode, "stays")) {
        stays();
        return 0;
    }
    if (!strcmp(mode, "over")) {
        over();
        return 0;
    }
    if (!strcmp(mode, "drops")) {
        drop_beside_forks();
        return 0;
    }
    memory = map_stamped(pages);
    if (!strcmp(mode, "left"))
        left("/proc/self/exe");
    else if (!strcmp(mode, "main"))
        end_main();
    else if (!strcmp(mode, "raw"))
        raw();
    else if (!strcmp(mode, "shares"))
        shares();
    else
        return 2;
    return 0;
}
