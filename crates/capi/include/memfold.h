/* memfold: memory larger than RAM for one program.
 *
 * Generated from crates/capi/src/lib.rs. crates/memfold/README.md lists the guarantees and the
 * limits (system calls on regions, forks, signal handlers of the program's own).
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */

#ifndef MEMFOLD_H
#define MEMFOLD_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

/*
 Statistics of a limit.
 */
typedef struct {
  /*
   `sizeof(memfold_stats)`, to be set before the call.
   */
  size_t size;
  /*
   The mode of the limit: one of `MEMFOLD_MODE_`.
   */
  uint32_t mode;
  /*
   The limit on everything, in bytes; 0 where only the resident limit is set.
   */
  uint64_t limit_bytes;
  /*
   Bytes that may be resident now: what the pool and the metadata leave of the limit.
   */
  uint64_t resident_limit_bytes;
  /*
   Bytes of regions that are resident now, those in the stage included.
   */
  uint64_t resident_bytes;
  /*
   The peak of `resident_bytes`.
   */
  uint64_t peak_resident_bytes;
  /*
   Bytes of memory that the compressed pool takes now.
   */
  uint64_t pool_bytes;
  /*
   Bytes of memory that swap tables and page states take now.
   */
  uint64_t metadata_bytes;
  /*
   Bytes of all regions.
   */
  uint64_t mapped_bytes;
  /*
   Bytes of regions that are pinned.
   */
  uint64_t pinned_bytes;
  /*
   Pages that are stored in the pool now, same-filled ones included.
   */
  uint64_t stored_pages;
  /*
   Stored pages that repeat one word and take no room in the pool.
   */
  uint64_t same_filled_pages;
  /*
   Compressed bytes of all stored pages.
   */
  uint64_t stored_bytes;
  /*
   Faults that swapped pages in from the pool.
   */
  uint64_t faults_swap_in;
  /*
   Faults on pages that were never touched before, or were discarded.
   */
  uint64_t faults_zero_fill;
  /*
   Faults on pages that were still in the stage.
   */
  uint64_t faults_cache;
  /*
   Pages stored in the pool.
   */
  uint64_t pages_out;
  /*
   Pages swapped in from the pool, by faults, prefetch and readahead.
   */
  uint64_t pages_in;
  /*
   Pages of `pages_in` that the readahead thread swapped in, or a fault around its own page.
   */
  uint64_t pages_read_ahead;
  /*
   Pages filled with zeros.
   */
  uint64_t pages_zero_filled;
  /*
   Faults that had to reclaim memory themselves.
   */
  uint64_t direct_reclaims;
  /*
   Pages that could not be stored, and stayed resident.
   */
  uint64_t store_failures;
  /*
   The most pages that were ever resident above the limit, because the rest could not be moved
   out, or moving it out gained nothing.
   */
  uint64_t over_limit_pages;
  /*
   Pages that were moved out by `mremap`, as the kernel has no `UFFDIO_MOVE` (before Linux 6.8).
   */
  uint64_t pages_remapped;
  /*
   Stored pages that are in the store on other machines now. All `remote` statistics are 0 without one.
   */
  uint64_t remote_pages;
  /*
   Bytes that they take there, without its overhead.
   */
  uint64_t remote_bytes;
  /*
   Pages that it has acknowledged so far.
   */
  uint64_t remote_pages_out;
  /*
   Pages that came back from it so far.
   */
  uint64_t remote_pages_in;
  /*
   Faults of `faults_swap_in` that waited for it.
   */
  uint64_t remote_faults;
  /*
   Pages that are waited for now.
   */
  uint64_t remote_waiting;
  /*
   Requests to it that were repeated.
   */
  uint64_t remote_retries;
  /*
   Batches that it did not acknowledge, whose pages stayed, and pages that could not be brought back.
   */
  uint64_t remote_failures;
  /*
   Pages that it was found to have lost when their time to live was renewed.
   */
  uint64_t remote_lost_pages;
  /*
   Waits of threads that needed room for the store to take pages.
   */
  uint64_t remote_room_waits;
} memfold_stats;


/*
 The version of this header: the first number.
 */
#define MEMFOLD_VERSION_MAJOR 0

/*
 The second number.
 */
#define MEMFOLD_VERSION_MINOR 1

/*
 The third number.
 */
#define MEMFOLD_VERSION_PATCH 0

/*
 An argument is invalid.
 */
#define MEMFOLD_ERROR_ARGUMENT -1

/*
 The host does not allow the mode.
 */
#define MEMFOLD_ERROR_UNAVAILABLE -2

/*
 The kernel refused a system call.
 */
#define MEMFOLD_ERROR_SYSTEM -3

/*
 The limit has no room.
 */
#define MEMFOLD_ERROR_LIMIT -4

/*
 The calling process is a forked child of the one that made the limit.
 */
#define MEMFOLD_ERROR_FORKED -5

/*
 The store on other machines cannot be used.
 */
#define MEMFOLD_ERROR_REMOTE -6

/*
 Signal mode where the host allows userfaultfd, else protection mode.
 */
#define MEMFOLD_MODE_AUTO 0

/*
 Faults are served in the faulting thread, by a SIGBUS handler.
 */
#define MEMFOLD_MODE_SIGNAL 1

/*
 Faults are served by a thread; system calls work on missing pages.
 */
#define MEMFOLD_MODE_THREAD 2

/*
 Faults are served in the faulting thread, by a SIGSEGV handler, without userfaultfd.
 */
#define MEMFOLD_MODE_PROTECTION 3

/*
 LZ4: the fastest.
 */
#define MEMFOLD_ALGORITHM_LZ4 0

/*
 Zstandard: smaller, slower.
 */
#define MEMFOLD_ALGORITHM_ZSTD 1

/*
 Swap the range in before it is touched, as far as there is room: `MADV_WILLNEED`. Pages on other machines stay there.
 */
#define MEMFOLD_PREFETCH 0

/*
 Reclaim moves the range out first: `MADV_COLD`.
 */
#define MEMFOLD_MARK_COLD 1

/*
 Move the range out now: `MADV_PAGEOUT`.
 */
#define MEMFOLD_PAGE_OUT 2

/*
 Discard the contents of the range, which reads as zeros then: `MADV_DONTNEED`. No other thread may
 access the range until the call returns.
 */
#define MEMFOLD_DISCARD 3

/*
 A limit on memory.
 */
typedef struct memfold memfold;

/*
 Options of a limit. Zero in all members but `size` means the defaults.
 */
typedef struct {
  /*
   `sizeof(memfold_options)`.
   */
  size_t size;
  /*
   The most bytes of memory for everything; 0 for half of what the host allows, unless
   `resident_limit_bytes` is given.
   */
  uint64_t limit_bytes;
  /*
   The most bytes of regions that may be resident; 0 for no such limit.
   */
  uint64_t resident_limit_bytes;
  /*
   One of `MEMFOLD_MODE_`.
   */
  uint32_t mode;
  /*
   One of `MEMFOLD_ALGORITHM_`.
   */
  uint32_t algorithm;
  /*
   Not 0: keep no checksums.
   */
  uint32_t no_checksum;
  /*
   Not 0: do not read ahead.
   */
  uint32_t no_readahead;
  /*
   Where pages go once the compressed ones take half of `limit_bytes`: to Valkey or Redis, such as
   `"valkey://10.0.0.7"`, with further nodes behind commas, `valkeys://` for TLS. Null for nowhere.
   These strings are copied, and read only if this one is given. A program that waits for a page
   longer than `remote_timeout_seconds`, or is returned another one, is aborted.
   */
  const char *remote;
  /*
   The user there, or null.
   */
  const char *remote_user;
  /*
   The password, or null.
   */
  const char *remote_password;
  /*
   The authorities that the servers of `valkeys://` are checked against, in PEM; null for the host's.
   */
  const char *remote_ca_certificates;
  /*
   Replicas that must have a page before it counts as stored, beside the primary.
   */
  uint32_t remote_replicas;
  /*
   How long a program waits for a page; 0 for 60.
   */
  uint32_t remote_timeout_seconds;
  /*
   The store forgets what was not renewed for as long; 0 for 3600. At least twice the timeout, and from 10 to 2678400.
   */
  uint64_t remote_time_to_live_seconds;
} memfold_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Makes a limit, and stores it in `*made`. `options` may be null for the defaults.

 # Safety
 `options` is null or points to as many bytes as its `size` says, and its strings end with a zero byte;
 `made` can be written.
 */
int memfold_new(const memfold_options *options,
                memfold **made);

/*
 Frees a limit. Its regions stay mapped until they are unmapped. Null is ignored.

 # Safety
 `limit` came from [`memfold_new`] and is not used any more.
 */
void memfold_free(memfold *limit);

/*
 Maps a region of `length` bytes, which reads as zeros, and stores its address in `*start`.

 # Safety
 `limit` came from [`memfold_new`]; `start` can be written.
 */
int memfold_map(memfold *limit, size_t length, void **start);

/*
 Unmaps a region that [`memfold_map`] mapped, and ends its pins. Its pages in the pool are released
 in the background.

 # Safety
 No thread accesses the region any more.
 */
int memfold_unmap(void *start);

/*
 Advises on a range of a region. `advice` is one of `MEMFOLD_PREFETCH`, `MEMFOLD_MARK_COLD`,
 `MEMFOLD_PAGE_OUT` and `MEMFOLD_DISCARD`.

 # Safety
 For `MEMFOLD_DISCARD`, no other thread accesses the range until this returns.
 */
int memfold_advise(void *start, size_t length, int advice);

/*
 Swaps a range in and keeps it resident until [`memfold_unpin`] was called for it as often as this.
 In signal and protection mode, pin a range before a system call reads or writes it.

 # Safety
 `start` is only compared with the addresses of regions: any value is sound.
 */
int memfold_pin(void *start, size_t length);

/*
 Ends one pin of exactly this range.

 # Safety
 No system call uses the range any more.
 */
int memfold_unpin(void *start, size_t length);

/*
 Stores the statistics of a limit in `*stats`, whose `size` must be set.

 # Safety
 `limit` came from [`memfold_new`]; `stats` can be written, as many bytes as its size says.
 */
int memfold_get_stats(const memfold *limit, memfold_stats *stats);

/*
 Serves a fault from a SIGBUS or SIGSEGV handler that the program installed after it made its first
 limit. Returns 1 if the fault was on a region: the handler must return then. Returns 0 if it was
 not. Preserves `errno`, and blocks all signals meanwhile.

 # Safety
 `info` is the `siginfo_t` that the kernel passed to the handler. (Strict C has no such type.)
 */
int memfold_handle_signal(const void *info);

/*
 Returns 1 if the kernel calls the library's handler for the signal of the limit's mode, or the mode has none; 0 if the
 program, or another library, has installed one since, which must pass faults on by [`memfold_handle_signal`].

 # Safety
 `limit` came from [`memfold_new`].
 */
int memfold_is_handler_installed(const memfold *limit);

/*
 Puts the library's handlers above those that the program, or a library of it, has installed since and that pass no
 faults on. Faults that are on no region go to these, and from there to what was installed first.
 */
int memfold_reinstall_handlers(void);

/*
 The version of the library that is linked, such as "0.1.0". `MEMFOLD_VERSION_MAJOR` and so on are the
 header's.
 */
const char *memfold_version(void);

/*
 To be called in a forked child before it maps anything, as by `pthread_atfork`: nothing is mapped at
 the addresses of the parent's regions, and an access to them ends the child with a message.
 */
int memfold_guard_inherited(void);

/*
 The message of the last failed call of this thread, valid until the next call that fails.
 */
const char *memfold_error_message(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MEMFOLD_H */
