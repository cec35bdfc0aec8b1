//! Whether an execution still makes progress: programs do.
//!
//! A program does a limited number of accesses, so an execution that never ends has a last one.

use std::cell::Cell;

thread_local! {
    static BEGUN: Cell<u64> = const { Cell::new(0) };
    static ENDED: Cell<u64> = const { Cell::new(0) };
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Notes that an execution begins.
pub(crate) fn note_begin() {
    BEGUN.set(BEGUN.get() + 1);
}

/// Notes that an execution has come to its end.
pub(crate) fn note_end() {
    ENDED.set(ENDED.get() + 1);
}

/// How many executions began on this thread, and how many of them were left alone before their end, as they took too many
/// steps in a schedule that is not fair, or failed.
pub fn executions() -> (u64, u64) {
    (BEGUN.get(), BEGUN.get() - ENDED.get())
}

/// Whether the executions on this thread count the steps since the last access of a program, or all.
pub(crate) fn watch(watched: bool) {
    WATCHED.set(watched);
}

/// Notes that a thread of a program has read or written a page.
pub(crate) fn note_access() {
    if WATCHED.get() {
        shuttle::current::reset_step_count();
    }
}
