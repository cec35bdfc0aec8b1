//! The channel: memory shared by a program's helper thread and the supervisor.
//!
//! The supervisor writes one command, bumps `posted` and wakes the helper; the helper executes
//! it, writes the outcome beside each run, sets `done` and wakes the supervisor. One command is
//! outstanding at most, so each field has one writer at a time: the supervisor while
//! `posted == done`, the helper otherwise.

use crate::gate::HelperGate;
use core::cell::UnsafeCell;
use core::mem::size_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Runs of pages in one command.
pub const RUNS_MAX: usize = 64;

/// Most VMAs of a program whose forks are prepared (`fork/prepared.rs` of the pager). More can stay mapped, but
/// are not managed.
pub const WITHHELD_MOST: usize = 4096;

/// See [`Channel::dismissed`].
pub const RELEASED: u32 = u32::MAX;

/// Bytes of the shared memory. Pages that are never touched take no memory.
pub const CHANNEL_BYTES: usize = 8192 + WITHHELD_MOST * size_of::<Span>();

/// A run of pages to move into the stage.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct MoveRun {
    /// Program address of the first page.
    pub source: u64,
    /// Stage address of the first page.
    pub target: u64,
    /// Pages asked for.
    pub pages: u32,
    /// Out: pages that were moved, from the front.
    pub moved: u32,
    /// Out: the error that stopped the run; 0 if none.
    pub errno: i32,
    /// 1: only break the sharing that a fork left (a write fault a page), and move nothing.
    pub unshare: u32,
}

/// A run of staged pages to drop.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct DropRun {
    /// Stage address of the first page.
    pub start: u64,
    /// Pages.
    pub pages: u32,
    /// Out: 0, or the error.
    pub errno: i32,
}

/// One command: drop, then move.
#[repr(C)]
pub struct Command {
    /// The event count the moves were planned at; the helper moves nothing if it has changed.
    pub event_count: u32,
    /// Entries of `drops`.
    pub drop_count: u32,
    /// Entries of `moves`.
    pub move_count: u32,
    /// Out: 1 if the moves were skipped because an event came in between.
    pub stale: u32,
    /// Staged pages to drop.
    pub drops: [DropRun; RUNS_MAX],
    /// Pages to stage.
    pub moves: [MoveRun; RUNS_MAX],
}

/// A request of the program to unregister a range that it is about to register with a userfaultfd of
/// its own. One at a time; all zero is "none was made".
#[repr(C)]
pub struct UnregisterRequest {
    /// A mutex among the program's threads: 0 if free, 1 if taken, 2 if others may wait for it.
    pub lock: AtomicU32,
    /// Requests made.
    pub asked: AtomicU32,
    /// The request that was answered last. What its thread sleeps on.
    pub answered: AtomicU32,
    /// The request after which the program has registered the range, or given up.
    pub over: AtomicU32,
    /// Changes while the supervisor works on the request.
    pub progress: AtomicU32,
    /// First address.
    pub start: AtomicU64,
    /// Bytes.
    pub length: AtomicU64,
}

/// A range of addresses. All zero is none.
#[repr(C)]
#[derive(Debug)]
pub struct Span {
    /// First address.
    pub start: AtomicU64,
    /// Bytes.
    pub length: AtomicU64,
}

/// A request of the supervisor that the helper keeps a range from forked children (`MADV_DONTFORK`), or gives it to
/// them. One at a time; all zero is "none was made".
#[repr(C)]
pub struct WithholdRequest {
    /// Requests made.
    pub asked: AtomicU32,
    /// The request that was answered last. What the supervisor sleeps on.
    pub answered: AtomicU32,
    /// The answer: 0, or the error. `EAGAIN` while a thread of the program forks.
    pub errno: AtomicU32,
    /// 1: give it.
    pub give: AtomicU32,
    /// The range.
    pub span: Span,
}

/// A fork through the C library where the kernel reports none. One at a time; all zero is the initial state.
///
/// | step | set by | meaning |
/// |---|---|---|
/// | 0 | | no thread forks, or the thread is to read the beacon, which faults, and which the supervisor fills |
/// | [`LISTED`](fork_step::LISTED) | supervisor | `spans` are the withheld VMAs: give them to the child |
/// | [`GIVEN`](fork_step::GIVEN) | thread | they are given |
/// | [`GO`](fork_step::GO) | supervisor | no mapping changed meanwhile (else it lists anew): clone |
/// | [`FORKED`](fork_step::FORKED), [`NOT_FORKED`](fork_step::NOT_FORKED) | thread | it has, or could not |
#[repr(C)]
pub struct ForkRequest {
    /// 1 if forks must be prepared. Set by the supervisor before the helper is welcomed.
    pub prepared: AtomicU32,
    /// What the forking thread asks ([`ASK_FILTERS`], [`ASK_FORK`]). Cleared by the thread with its answer.
    pub asked: AtomicU32,
    /// Where the forking thread's restartable sequence (rseq) is, which the kernel writes to when the thread goes on;
    /// of no length if it has none.
    pub sequence: Span,
    /// See [`fork_step`]. The thread sleeps on it.
    pub step: AtomicU32,
    /// Entries of `spans`.
    pub count: AtomicU32,
    /// By which the child is recognised; written by the supervisor.
    pub token: AtomicU64,
    /// The withheld VMAs; in a forked child those to be withheld before it runs on.
    pub spans: [Span; WITHHELD_MOST],
}

/// Values of [`ForkRequest::step`].
pub mod fork_step {
    #![allow(missing_docs, reason = "said in the table of the structure")]
    pub const LISTED: u32 = 1;
    pub const GIVEN: u32 = 2;
    pub const GO: u32 = 3;
    pub const FORKED: u32 = 4;
    pub const NOT_FORKED: u32 = 5;
}

/// The forking thread asks whether its child may make system calls.
pub const ASK_FILTERS: u32 = 1;
/// The forking thread asks to fork.
pub const ASK_FORK: u32 = 2;
/// What the beacon answers: yes.
pub const GRANTED: u64 = 1;
/// What the beacon answers: no.
pub const DENIED: u64 = 2;
/// What the beacon holds after another process than a forking thread read it.
pub const UNASKED: u64 = 3;

/// The shared memory's layout. All zero is the initial state but for `alive`.
#[repr(C)]
pub struct Channel {
    /// A robust futex held by the supervisor: the kernel marks it and wakes the helper if the
    /// supervisor dies. Also what the helper sleeps on.
    pub alive: AtomicU32,
    /// Commands posted.
    pub posted: AtomicU32,
    /// Commands that the helper has seen: ends the supervisor's waking.
    pub seen: AtomicU32,
    /// Commands done.
    pub done: AtomicU32,
    /// Events applied so far; changes only while the gate is held exclusively.
    pub event_count: AtomicU32,
    /// Threads of the program that are forking.
    pub forking: AtomicU32,
    /// Not 0: the helper is to end. [`RELEASED`]: it leaves the program to itself, and takes this back if a thread of
    /// it forks just now. Else no other thread of the program is left, and its status, as `wait` has it, is one less.
    pub dismissed: AtomicU32,
    /// One more than the number of the run that the helper carries off, or was the last to: written inside the gate. 0 if
    /// that was refused, or none of this command is begun.
    pub carrying: AtomicU32,
    /// Runs carried off of which the event was read; changes only while the gate is held exclusively.
    pub carried: AtomicU32,
    /// Lets the helper change pages.
    pub gate: HelperGate,
    /// What the program wants to be unregistered.
    pub unregister: UnregisterRequest,
    /// What is to be kept from forked children.
    pub withhold: WithholdRequest,
    command: UnsafeCell<Command>,
    /// Forks that the library prepares.
    pub fork: ForkRequest,
}

// SAFETY: `command` has one writer at a time by the posted/done protocol above; the rest is atomic.
unsafe impl Sync for Channel {}
// SAFETY: no thread affinity.
unsafe impl Send for Channel {}

const _: () = assert!(size_of::<Channel>() <= CHANNEL_BYTES);
const _: () = assert!(CHANNEL_BYTES.is_multiple_of(crate::PAGE_SIZE));

impl Channel {
    /// The command's place.
    pub fn command(&self) -> *mut Command {
        self.command.get()
    }
}
