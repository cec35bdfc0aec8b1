//! Stopping and ending this process by a signal.

use nix::sys::signal::{SigHandler, SigSet, Signal, raise, signal};

/// Stops this process as `signal` does, until it is continued.
pub fn stop_by(signal: Signal) -> nix::Result<()> {
    let set = SigSet::from(signal);
    set.thread_unblock()?;
    let raised = raise(signal);
    set.thread_block()?;
    raised
}

/// Ends this process as a signal of this number does. Returns where it cannot: a number that is
/// no standard signal, or the first process of a container, which default actions do not reach.
pub fn die_by(number: i32) {
    let Ok(which) = Signal::try_from(number) else {
        return;
    };
    // SAFETY: sets the default action; no handler is installed.
    let _ = unsafe { signal(which, SigHandler::SigDfl) };
    if SigSet::from(which).thread_unblock().is_ok() {
        let _ = raise(which);
    }
}
