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
 An argument makes no sense.
 */
#define MEMFOLD_ERROR_ARGUMENT -1

/*
 The host does not allow what was asked for.
 */
#define MEMFOLD_ERROR_UNAVAILABLE -2

/*
 The system refused something.
 */
#define MEMFOLD_ERROR_SYSTEM -3

/*
 The limit has no room.
 */
#define MEMFOLD_ERROR_LIMIT -4

/*
 The calling process was forked from the one that made it.
 */
#define MEMFOLD_ERROR_FORKED -5

/*
 Choose signal mode where the host allows it, else protection mode.
 */
#define MEMFOLD_MODE_AUTO 0

/*
 Faults are served in the faulting thread, by a handler of SIGBUS.
 */
#define MEMFOLD_MODE_SIGNAL 1

/*
 Faults are served by a thread; system calls work on missing pages.
 */
#define MEMFOLD_MODE_THREAD 2

/*
 Faults are served in the faulting thread, by a handler of SIGSEGV, without userfaultfd.
 */
#define MEMFOLD_MODE_PROTECTION 3

/*
 LZ4.
 */
#define MEMFOLD_ALGORITHM_LZ4 0

/*
 Zstandard: smaller, slower.
 */
#define MEMFOLD_ALGORITHM_ZSTD 1

/*
 Bring the range in before it is touched, as far as there is room.
 */
#define MEMFOLD_WILL_NEED 0

/*
 The range goes first when room is needed.
 */
#define MEMFOLD_COLD 1

/*
 Move the range out now.
 */
#define MEMFOLD_PAGE_OUT 2

/*
 Drop the contents of the range: it reads as zeros. Nobody else may use it meanwhile.
 */
#define MEMFOLD_DONT_NEED 3

/*
 A limit on memory.
 */
typedef struct memfold memfold;

/*
 How a limit is to be. All zeros, but for `size`, are the defaults.
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
} memfold_options;

/*
 Figures; see the fields of the same names in the Rust documentation of `Stats`.
 */
typedef struct {
  /*
   `sizeof(memfold_stats)`, to be set before the call.
   */
  size_t size;
  uint32_t mode;
  uint64_t limit_bytes;
  uint64_t resident_limit_bytes;
  uint64_t resident_bytes;
  uint64_t peak_resident_bytes;
  uint64_t pool_bytes;
  uint64_t metadata_bytes;
  uint64_t mapped_bytes;
  uint64_t stored_pages;
  uint64_t stored_bytes;
  uint64_t faults_swap_in;
  uint64_t faults_zero_fill;
  uint64_t pages_out;
  uint64_t pages_in;
  uint64_t pages_read_ahead;
  uint64_t over_limit_pages;
} memfold_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Makes a limit, and puts it into `*made`. `options` may be null for the defaults.

 # Safety
 `options` is null or points to options of the size that they say; `made` can be written.
 */
int memfold_new(const memfold_options *options, memfold **made);

/*
 Gives a limit up. Its regions stay until they are unmapped. Null is ignored.

 # Safety
 `limit` came from [`memfold_new`] and is not used any more.
 */
void memfold_free(memfold *limit);

/*
 Maps `length` bytes of zeros under a limit, and puts their address into `*start`.

 # Safety
 `limit` came from [`memfold_new`]; `start` can be written.
 */
int memfold_map(memfold *limit, size_t length, void **start);

/*
 Unmaps what [`memfold_map`] gave, with all pins. What it has in the pool is released in the
 background.

 # Safety
 Nobody uses the memory any more.
 */
int memfold_unmap(void *start);

/*
 Advises on a range of a region: one of `MEMFOLD_WILL_NEED`, `MEMFOLD_COLD`, `MEMFOLD_PAGE_OUT`
 and `MEMFOLD_DONT_NEED`.

 # Safety
 For `MEMFOLD_DONT_NEED`, nobody else uses the range meanwhile.
 */
int memfold_advise(void *start, size_t length, int advice);

/*
 Brings a range in and keeps it in memory until [`memfold_unpin`] is called for it as often as
 this was: needed before it is given to a system call in signal and protection mode.

 # Safety
 None beyond the address being one.
 */
int memfold_pin(void *start, size_t length);

/*
 Takes back a pin of exactly this range.

 # Safety
 No system call uses the range any more.
 */
int memfold_unpin(void *start, size_t length);

/*
 The figures of a limit. `stats->size` must be set.

 # Safety
 `limit` came from [`memfold_new`]; `stats` can be written, as many bytes as its size says.
 */
int memfold_get_stats(const memfold *limit, memfold_stats *stats);

/*
 Serves the fault that a handler of SIGBUS or SIGSEGV was called for, if it is on a region: 1
 then, and the handler must return. 0 if it is not. For programs that install such a handler after
 the first limit was made. Keeps `errno`, and all signals wait meanwhile.

 # Safety
 `info` is what the kernel gave the handler.
 */
int memfold_handle_signal(const siginfo_t *info);

/*
 What the last call of this thread that failed had to say. Valid until the next one.
 */
const char *memfold_error_message(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MEMFOLD_H */
