//! Memory larger than RAM inside one program: the engine of the `memfold` library.
//!
//! A [`Region`] is a range of addresses whose pages come and go. Cold pages are compressed into a
//! pool of the same process; a touch of one is a fault, which is served in one of three ways
//! ([`Mode`]):
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
//!  reclaim thread (and who faults at the limit): claim victims ─► UFFDIO_MOVE to the stage
//!                      ─► compress ─► drop the stage
//!  readahead thread:   goes on ahead of the streams that faults have shown, and fills blocks that
//!                      scattered faults asked for much of (`density.rs`)
//! ```
//!
//! # What holds
//!
//! - A page's contents are where its state says. Each change of a state is a compare-and-swap from
//!   the state that was looked at; whoever has a page in `Filling`, `Moving`, `Returning` or
//!   `Clearing` is the only one to change it.
//! - A page is dropped from the stage only after its state became `Swapped` by a compare-and-swap
//!   (it is stored then) or it was copied back.
//! - Pages are moved out of, and read ahead into, an area only while its gate is held shared and
//!   its mapping is there; unmapping holds it exclusively. A faulting thread needs no gate: it uses
//!   the region, so nobody drops it. For the listener of thread mode that does not hold: the thread
//!   it serves runs on with the first page that is in. So unmapping waits for `listening`.
//! - Nobody waits for anything that a thread stopped by a signal could hold: who has claims, or a
//!   lock of the engine, has all signals blocked.
//! - The engine's own code never touches a region, and holds no lock while anything else does, so a
//!   handler never finds a lock held by the code that it interrupted. (This rests on region memory
//!   not being used for what the engine itself allocates: a region must not back the program's
//!   global allocator.)

mod account;
mod area;
mod bell;
mod config;
mod engine;
mod error;
mod fault;
mod listener;
mod protected;
mod readahead;
mod reclaim;
mod region;
mod registry;
mod signals;
mod stats;
mod streams;
mod worker;

pub use config::{Config, Mode};
pub use engine::{Engine, default_limit};
pub use error::Error;
pub use region::{PinnedPages, Region};
pub use signals::handle_fault;
pub use stats::{Stats, StatsField};
