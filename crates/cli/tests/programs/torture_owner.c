/* Disturbances that a verifier thread does to its own regions. */
#include "torture.h"

/* A random part of a region. */
struct part {
    size_t first, pages;
};

static struct part some_part(struct verifier *verifier, const struct region *region)
{
    uint64_t chance = next_random(&verifier->random);
    struct part part;
    part.first = chance % region->pages;
    part.pages = 1 + (chance >> 32) % 512;
    if (part.pages > region->pages - part.first)
        part.pages = region->pages - part.first;
    return part;
}

static void now_zero(struct region *region, struct part part)
{
    for (size_t page = part.first; page < part.first + part.pages; page++)
        region->record[page].current = 0;
}

static void verify_part(const char *what, struct region *region, struct part part)
{
    for (size_t page = part.first; page < part.first + part.pages; page++)
        verify_page(what, region, page);
}

/* Rewrites about a third of a part, so that dropped memory is used again. */
static void use_again(struct verifier *verifier, struct region *region, struct part part)
{
    for (size_t page = part.first; page < part.first + part.pages; page++)
        if (next_random(&verifier->random) % 3 == 0)
            rewrite_page(verifier, region, page);
}

/* How many of the first pages are at a target that had no access.  Since Linux 6.17 mremap to a fixed address moves one
 * mapping after the other, and may have moved some before it refuses one.  What they have left may be another
 * thread's by now. */
static size_t moved_pages(const struct verifier *verifier, const uint64_t *target, size_t pages)
{
    size_t moved = 0;
    char byte;
    while (moved < pages && write(verifier->pipe[1], target + moved * WORDS, 1) == 1) {
        if (read(verifier->pipe[0], &byte, 1) != 1)
            fail_call("read of a byte");
        moved++;
    }
    if (moved < pages && errno != EFAULT)
        fail_call("write of a byte");
    return moved;
}

/* Unmaps what has not moved. */
static void unmap_rest(uint64_t *from, size_t moved, size_t pages)
{
    if (moved < pages && munmap(from + moved * WORDS, (pages - moved) * PAGE))
        fail_call("munmap of what has not moved");
}

/* mremap refuses a region that has come to consist of several mappings. */
static void must_be_refused(const char *what)
{
    if (errno != EFAULT)
        fail_call(what);
}

/* Maps a region anew that was refused, of which some pages had moved. */
static void renew(struct verifier *verifier, struct region *region, size_t moved)
{
    unmap_rest(region->at, moved, region->pages);
    region->at = map_anonymous(region->pages);
    region->wiped_on_fork = 0;
    struct part whole = {0, region->pages};
    now_zero(region, whole);
    for (size_t page = 0; page < region->pages; page++)
        if (next_random(&verifier->random) % 8)
            rewrite_page(verifier, region, page);
}

static void resize(struct verifier *verifier, struct region *region, int grow)
{
    size_t by = 1 + next_random(&verifier->random) % 256;
    size_t pages = grow ? region->pages + by : region->pages - by;
    if (region->pages < by || pages > region->most || pages < region->least)
        return;
    uint64_t *at = mremap(region->at, region->pages * PAGE, pages * PAGE, MREMAP_MAYMOVE);
    if (at == MAP_FAILED) {
        must_be_refused("mremap, resizing");
        renew(verifier, region, 0);
        return;
    }
    struct part tail = {region->pages, grow ? by : 0};
    region->at = at;
    region->pages = pages;
    now_zero(region, tail);
    if (next_random(&verifier->random) % 2)
        verify_part("grown tail", region, tail);
    use_again(verifier, region, tail);
}

static void move_whole(struct verifier *verifier, struct region *region)
{
    void *target = mmap(NULL, region->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (target == MAP_FAILED)
        fail_call("mmap of a target");
    uint64_t *at = mremap(region->at, region->pages * PAGE, region->pages * PAGE,
                          MREMAP_MAYMOVE | MREMAP_FIXED, target);
    if (at == MAP_FAILED) {
        must_be_refused("mremap, moving");
        size_t moved = moved_pages(verifier, target, region->pages);
        unmap_rest(target, 0, region->pages);
        renew(verifier, region, moved);
        return;
    }
    region->at = at;
}

/* Moves a part away and back; verifies it at the other address.  Its home stays mapped
 * meanwhile: another thread's new mapping could otherwise slip in there. */
static void move_part(struct verifier *verifier, struct region *region)
{
    struct part part = some_part(verifier, region);
    /* The target is used memory, which MREMAP_FIXED has to drop. */
    uint64_t *target = map_anonymous(part.pages);
    target[0] = 1;
    uint64_t *home = page_at(region, part.first);
    uint64_t *away = mremap(home, part.pages * PAGE, part.pages * PAGE,
                            MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, target);
    if (away == MAP_FAILED) {
        must_be_refused("mremap of a part");
        unmap_rest(target, 0, part.pages);
        renew(verifier, region, 0);
        return;
    }
    for (size_t i = 0; i < part.pages; i += 1 + part.pages / 32) {
        size_t page = part.first + i;
        uint32_t generation = region->record[page].current;
        verify_stamp("part moved away", away + i * WORDS, identity_of(region, page), generation);
    }
    if (mprotect(home, part.pages * PAGE, PROT_NONE))
        fail_call("mprotect of a part's home");
    void *back = mremap(away, part.pages * PAGE, part.pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, home);
    if (back == MAP_FAILED) {
        must_be_refused("mremap of a part, back");
        size_t moved = moved_pages(verifier, home, part.pages);
        unmap_rest(away, moved, part.pages);
        if (mprotect(home, part.pages * PAGE, PROT_READ | PROT_WRITE))
            fail_call("mprotect of a part's home, back");
        /* What is there is empty. */
        struct part lost = {part.first + moved, part.pages - moved};
        now_zero(region, lost);
    }
    verify_part("part moved back", region, part);
}

static void move_and_leave(struct verifier *verifier, struct region *region)
{
    uint64_t *old = region->at;
    uint64_t *at = mremap(old, region->pages * PAGE, region->pages * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    if (at == MAP_FAILED) {
        must_be_refused("mremap, leaving the mapping");
        renew(verifier, region, 0);
        return;
    }
    region->at = at;
    verify_zero("left behind by mremap", old, region->pages > 64 ? 64 : region->pages);
    if (munmap(old, region->pages * PAGE))
        fail_call("munmap of the mapping left behind");
}

static void drop(struct verifier *verifier, struct region *region)
{
    struct part part = some_part(verifier, region);
    if (madvise(page_at(region, part.first), part.pages * PAGE, MADV_DONTNEED))
        fail_call("madvise DONTNEED");
    now_zero(region, part);
    if (next_random(&verifier->random) % 2)
        verify_part("after DONTNEED", region, part);
    use_again(verifier, region, part);
}

/* After MADV_FREE a page keeps its contents or is zero, until it is written. */
static void free_lazily(struct verifier *verifier, struct region *region)
{
    struct part part = some_part(verifier, region);
    if (madvise(page_at(region, part.first), part.pages * PAGE, MADV_FREE))
        fail_call("madvise FREE");
    for (size_t page = part.first; page < part.first + part.pages; page++) {
        const volatile uint64_t *memory = page_at(region, page);
        for (unsigned i = 0; i < WORDS; i++) {
            uint64_t found = memory[i];
            if (found != 0 && found != page_word(identity_of(region, page), region->record[page].current, i))
                fail("after FREE", region, page);
        }
        rewrite_page(verifier, region, page);
    }
}

static void protect(struct verifier *verifier, struct region *region, int protection)
{
    struct part part = some_part(verifier, region);
    if (mprotect(page_at(region, part.first), part.pages * PAGE, protection))
        fail_call("mprotect");
    if (protection & PROT_READ)
        verify_part("read-only", region, part);
    else
        usleep(200);
    if (mprotect(page_at(region, part.first), part.pages * PAGE, PROT_READ | PROT_WRITE))
        fail_call("mprotect back");
    if (next_random(&verifier->random) % 2)
        verify_part("after mprotect", region, part);
}

static void replace(struct verifier *verifier, struct region *region, int unmap_first)
{
    struct part part = some_part(verifier, region);
    void *at = page_at(region, part.first);
    /* Not unmapped by itself: another thread's mapping could slip into the gap. */
    if (unmap_first) {
        void *reserved = mmap(at, part.pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (reserved != at)
            fail_call("mmap FIXED without access");
    }
    if (mmap(at, part.pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
        fail_call("mmap FIXED");
    now_zero(region, part);
    if (next_random(&verifier->random) % 2)
        verify_part("mapped over", region, part);
    use_again(verifier, region, part);
}

/* Unmaps the end of a region for good, and maps a new one behind the rest if it can. */
static void cut_tail(struct verifier *verifier, struct region *region)
{
    size_t by = 1 + next_random(&verifier->random) % 128;
    if (region->pages < region->least + by)
        return;
    if (munmap(page_at(region, region->pages - by), by * PAGE))
        fail_call("munmap");
    region->pages -= by;
}

/* The kernel reads and writes pages on the program's behalf. */
static void use_in_system_calls(struct verifier *verifier, struct region *region)
{
    size_t from = next_random(&verifier->random) % region->pages;
    if (write(verifier->pipe[1], page_at(region, from), PAGE) != PAGE)
        fail_call("write of a page");
    if (read(verifier->pipe[0], verifier->scratch, PAGE) != PAGE)
        fail_call("read into scratch memory");
    verify_stamp("written by a system call", verifier->scratch, identity_of(region, from),
                 region->record[from].current);
    size_t into = next_random(&verifier->random) % region->pages;
    struct page_record *record = &region->record[into];
    record->last++;
    record->current = record->last;
    stamp_page(verifier->scratch, identity_of(region, into), record->current);
    if (write(verifier->pipe[1], verifier->scratch, PAGE) != PAGE)
        fail_call("write of scratch memory");
    if (read(verifier->pipe[0], page_at(region, into), PAGE) != PAGE)
        fail_call("read into a page");
    verify_page("read by a system call", region, into);
}

static void lock_part(struct verifier *verifier, struct region *region)
{
    struct part part = some_part(verifier, region);
    part.pages = part.pages > 32 ? 32 : part.pages;
    /* The limit on locked memory may be low or zero: then there is nothing to test. */
    if (mlock(page_at(region, part.first), part.pages * PAGE))
        return;
    verify_part("locked", region, part);
    use_again(verifier, region, part);
    if (munlock(page_at(region, part.first), part.pages * PAGE))
        fail_call("munlock");
}

static void advise(struct verifier *verifier, struct region *region)
{
    static const int advice[] = {MADV_WILLNEED, MADV_COLD, MADV_PAGEOUT, MADV_RANDOM, MADV_SEQUENTIAL,
                                 MADV_POPULATE_READ, MADV_POPULATE_WRITE};
    struct part part = some_part(verifier, region);
    int which = advice[next_random(&verifier->random) % (sizeof advice / sizeof *advice)];
    /* Some are refused by kernels built without the feature. */
    if (madvise(page_at(region, part.first), part.pages * PAGE, which) && errno != EINVAL)
        fail_call("madvise");
    verify_part("advised", region, part);
    if (madvise(page_at(region, part.first), part.pages * PAGE, MADV_NORMAL))
        fail_call("madvise NORMAL");
}

static void wipe_on_fork(struct region *region)
{
    int wiped = !region->wiped_on_fork;
    if (madvise(region->at, region->pages * PAGE, wiped ? MADV_WIPEONFORK : MADV_KEEPONFORK))
        fail_call("madvise WIPEONFORK");
    region->wiped_on_fork = wiped;
}

void disturb_own(struct verifier *verifier, struct region *region)
{
    enum disturbance which = next_random(&verifier->random) % (LAST_OF_OWNER + 1);
    if (!is_on(which))
        return;
    in_order();
    region->busy = 1;
    in_order();
    /* Wiped on fork is a property of the mapping; parts that are replaced lose it. */
    if (region->wiped_on_fork && (which == UNMAP || which == FIXED || which == PART))
        wipe_on_fork(region);
    switch (which) {
    case GROW: resize(verifier, region, 1); break;
    case SHRINK: resize(verifier, region, 0); break;
    case MOVE: move_whole(verifier, region); break;
    case PART: move_part(verifier, region); break;
    case DONTUNMAP: move_and_leave(verifier, region); break;
    case DONTNEED: drop(verifier, region); break;
    case FREE: free_lazily(verifier, region); break;
    case READONLY: protect(verifier, region, PROT_READ); break;
    case NOACCESS: protect(verifier, region, PROT_NONE); break;
    case UNMAP:
        replace(verifier, region, 1);
        cut_tail(verifier, region);
        break;
    case FIXED: replace(verifier, region, 0); break;
    case SYSCALLS: use_in_system_calls(verifier, region); break;
    case LOCK: lock_part(verifier, region); break;
    case ADVICE: advise(verifier, region); break;
    case WIPE:
        /* Only the last region of a verifier: the others are for forks to inherit. */
        if (region == &verifier->regions[REGIONS - 1])
            wipe_on_fork(region);
        break;
    default: break;
    }
    in_order();
    region->busy = 0;
    in_order();
    verifier->disturbed++;
}
