//! The channel: a page or two of memory shared by a program's helper thread and the supervisor.
//!
//! The supervisor writes one command, bumps `posted` and wakes the helper; the helper executes
//! it, writes the outcome beside each run, sets `done` and wakes the supervisor. One command is
//! outstanding at most, so each field has one writer at a time: the supervisor while
//! `posted == done`, the helper otherwise.

use crate::gate::HelperGate;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Runs of pages in one command.
pub const RUNS_MAX: usize = 64;

/// Bytes of the shared memory.
pub const CHANNEL_BYTES: usize = 8192;

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
    /// Not 0: no other thread of the program is left, and the helper is to end, too, so that the
    /// program's status, as `wait` has it, is one less.
    pub dismissed: AtomicU32,
    /// Lets the helper change pages.
    pub gate: HelperGate,
    /// What the program wants to be unregistered.
    pub unregister: UnregisterRequest,
    command: UnsafeCell<Command>,
}

// SAFETY: `command` has one writer at a time by the posted/done protocol above; the rest is atomic.
unsafe impl Sync for Channel {}
// SAFETY: no thread affinity.
unsafe impl Send for Channel {}

const _: () = assert!(core::mem::size_of::<Channel>() <= CHANNEL_BYTES);

impl Channel {
    /// The command's place.
    pub fn command(&self) -> *mut Command {
        self.command.get()
    }
}
