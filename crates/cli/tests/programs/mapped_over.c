/* Memory is mapped over managed memory while another thread forks, where forks are prepared.
 *
 *   mapped_over MEGABYTES anonymous|file
 *
 * Children read a word of each piece; they are to have what was mapped there, now or before.  Prints one
 * line; MISMATCH, and a status that is not 0, where a child ends otherwise. */
#define _GNU_SOURCE
#include "stamp.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { PIECES = 8, ROUNDS = 32 };
static uint64_t *pieces[PIECES];
static size_t piece_pages;
static int file = -1;
/* The round that has begun, and the one whose piece is mapped over. */
static unsigned begun, done;
/* How long the last fork took, in microseconds. */
static unsigned fork_took = 1000;

static void map_over(uint64_t *piece, int from)
{
    int flags = from < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    if (mmap(piece, piece_pages * PAGE, PROT_READ | PROT_WRITE, flags | MAP_FIXED, from, 0) != piece)
        _exit(2);
}

static void *map_beside(void *unused)
{
    unsigned seed = 1;
    for (unsigned round = 1; round <= ROUNDS; round++) {
        while (__atomic_load_n(&begun, __ATOMIC_SEQ_CST) < round)
            ;
        double until = seconds_now() + rand_r(&seed) % (fork_took + 1) * 1e-6;
        while (seconds_now() < until)
            ;
        map_over(pieces[round % PIECES], file);
        __atomic_store_n(&done, round, __ATOMIC_SEQ_CST);
    }
    return unused;
}

static void fork_and_look(void)
{
    double began = seconds_now();
    pid_t child = fork();
    if (child == 0) {
        for (unsigned number = 0; number < PIECES; number++)
            (void)*(volatile uint64_t *)pieces[number];
        _exit(0);
    }
    fork_took = (seconds_now() - began) * 1e6;
    int status;
    if (waitpid(child, &status, 0) != child || status != 0) {
        say("MISMATCH child %d ended with status %x\n", (int)child, status);
        _exit(1);
    }
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    size_t stride = strtoul(arguments[1], NULL, 10) * 256 / PIECES;
    /* Never one mapping. */
    piece_pages = stride - 1;
    uint64_t *room = mmap(NULL, PIECES * stride * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return 2;
    if (arguments[2][0] == 'f') {
        file = memfd_create("mapped_over", 0);
        if (file < 0 || ftruncate(file, piece_pages * PAGE))
            return 2;
    }
    for (unsigned number = 0; number < PIECES; number++) {
        pieces[number] = room + number * stride * WORDS;
        map_over(pieces[number], -1);
        stamp_pages(pieces[number], 0, piece_pages, 1);
    }
    /* Long enough to be taken under management. */
    usleep(300000);
    pthread_t thread;
    pthread_create(&thread, NULL, map_beside, NULL);
    for (unsigned round = 1; round <= ROUNDS; round++) {
        __atomic_store_n(&begun, round, __ATOMIC_SEQ_CST);
        fork_and_look();
        while (__atomic_load_n(&done, __ATOMIC_SEQ_CST) < round)
            ;
        fork_and_look();
        uint64_t *piece = pieces[round % PIECES];
        if (file >= 0)
            map_over(piece, -1);
        stamp_pages(piece, 0, piece_pages, 1);
        usleep(10000);
    }
    pthread_join(thread, NULL);
    say("mapped_over ok\n");
    return 0;
}
