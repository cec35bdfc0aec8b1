//! What happened, step by step, for a failure that is looked at.

use crate::page::PageRange;
use std::cell::Cell;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Whether executions on this thread print what happens.
pub fn set(on: bool) {
    ON.set(on);
}

/// Prints one line, with the thread that does it.
pub(crate) fn trace(line: impl FnOnce() -> String) {
    if ON.get() {
        let thread = shuttle::thread::current();
        eprintln!("{:>12} {}", thread.name().unwrap_or("?"), line());
    }
}

/// A range, short.
pub(crate) fn short(range: PageRange) -> String {
    format!("{:#x}..{:#x}", range.start.0, range.end.0)
}
