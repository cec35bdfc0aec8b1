//! Whether an execution still makes progress: programs do.
//!
//! A program does a limited number of accesses, so an execution that never ends has a last one.

use std::cell::Cell;

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
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
