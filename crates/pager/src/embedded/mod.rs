//! Memory larger than RAM inside one program: the engine of the `memfold` library.
//!
//! A [`Region`] is a range of addresses. Cold pages of it are compressed into a pool in the same
//! process; a touch of one is a fault, which is served in one of three ways ([`Mode`]):
//!
//! | mode | a touch of a missing page | system calls on regions |
//! |---|---|---|
//! | [`Mode::Signal`] | SIGBUS; served by its handler in the faulting thread | `EFAULT` unless pinned |
//! | [`Mode::Thread`] | the thread sleeps; served by a thread of the engine | work |
//! | [`Mode::Protection`] | SIGSEGV; served by its handler in the faulting thread | `EFAULT` unless pinned |
//!
//! All three share the page states, the swap space, reclaim and the account of memory.
//!
//! ```text
//!  touch ─► fault ─► serve ──► Swapped: make room, load the window, copy it in
//!                      │  └──► Hole: fill a window with zeros
//!                      └─────► Staged: copy it back
//!  reclaim (a thread, and direct reclaim by faulting threads): claim victims
//!                      ─► UFFDIO_MOVE (or mremap) to the stage ─► compress ─► drop the stage
//!  readahead thread:   continues the streams that faults have shown, and fills blocks that random
//!                      faults touched much of (`density.rs`)
//! ```
//!
//! | files | hold |
//! |---|---|
//! | `config`, `error`, `stats`, `limits` | options, errors, statistics, sizes |
//! | `area`, `blocks`, `ledger`, `account`, `registry` | pages of a region; those of protection mode; memory in use; address to area |
//! | `worker`, `event`, `backoff` | buffers and stacks for faults; waiting |
//! | `engine`, `region` | what the library exports |
//! | `signals`, `listener` | how a fault arrives |
//! | `remote`, `remote_queue` | pages on other machines |
//! | `inherited` | what a forked child does with its parent's regions |
//! | `fault`, `protected`, `streams`, `readahead` | swap-in |
//! | `victims`, `dues`, `hand`, `reclaim`, `mover` | page-out |
//!
//! # Invariants
//!
//! - A page's contents are where its state says. Each change of a state is a compare-and-swap from the
//!   state that was loaded; only the thread that set `Filling`, `Moving`, `Returning` or `Clearing`
//!   changes it next.
//! - A page is dropped from the stage only after its state became `Swapped` by a compare-and-swap (it is
//!   stored then) or it was copied back.
//! - Pages are moved out of an area, and read ahead into it, only while its gate is held shared and its
//!   mapping exists; unmapping holds the gate exclusively. A faulting thread needs no gate: it uses the
//!   region, so the region is not dropped. In thread mode the faulting thread runs on once its page is
//!   in, while the listener still copies further pages: so unmapping waits for `listening`.
//! - A thread that has claims or a lock of the engine has all signals blocked. So no handler waits for
//!   what the thread that it interrupted holds.
//! - The engine's own code never touches a region, and calls no code of the program while it holds a
//!   lock. (So regions must not back the program's global allocator, which the engine uses.)

mod account;
mod area;
mod backoff;
mod blocks;
mod config;
mod dues;
mod engine;
mod engine_state;
mod error;
mod event;
mod fault;
mod hand;
mod inherited;
mod ledger;
mod limits;
mod listener;
mod mover;
mod protected;
mod readahead;
mod reclaim;
mod region;
mod registry;
mod remote;
mod remote_queue;
mod signals;
mod span_queue;
mod stats;
mod streams;
mod victims;
mod worker;

pub use config::{Config, Mode};
pub use engine::{Engine, memory_allowance};
pub use error::Error;
pub use inherited::{guard_inherited, is_inherited_region, is_region};
pub use region::{PinnedPages, Region};
pub use remote_queue::Remote;
pub use signals::{handle_fault, reinstall};
pub use stats::Stats;
