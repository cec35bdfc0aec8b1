//! A model of what Linux does with the memory of programs and their userfaultfds.
//!
//! | module | holds |
//! |---|---|
//! | `memory` | mappings and pages of one program; accesses by its threads |
//! | `changes` | munmap, mremap, `madvise`, fork, exit |
//! | `queues`, `userfaultfd` | the userfaultfd of a program: its messages, its ioctls |
//! | `process` | what `/proc` shows |
//! | `channel` | the gate and the channel between supervisor and helper |
//! | `helper` | the helper's thread |
//! | `guardian` | which programs are killed when the supervisor dies |
//!
//! State is behind ordinary mutexes that are never held across a point of scheduling: what such a lock
//! covers is one step for all threads. A step is what the kernel does under `mmap_lock`, a page's lock, or
//! the lock of a userfaultfd's queues; where the kernel releases them, another thread may run
//! (`interleave`).

pub(crate) mod changes;
pub(crate) mod channel;
pub(crate) mod guardian;
pub(crate) mod helper;
pub(crate) mod memory;
pub(crate) mod process;
pub(crate) mod queues;
pub(crate) mod userfaultfd;

/// Tokens of prepared forks: no program of the model forges one.
pub(crate) fn next_token() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

pub(crate) use channel::{ChannelFile, Port, Ports, SharedChannel};
pub(crate) use guardian::{Guarded, Guardian};
pub(crate) use process::Inspector;
pub(crate) use userfaultfd::Userfaultfd;
