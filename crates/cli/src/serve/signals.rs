//! The signals that end a disk.

use crate::run::escalation::SAME_REQUEST;
use memfold_sys::inherited::was_ignored;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Those that were not ignored at the start, as by `nohup` or by `&` in a script: a descriptor would get ignored signals,
/// too.
fn ends() -> SigSet {
    let ends = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    let ends = ends.into_iter();
    ends.filter(|signal| !was_ignored(*signal as i32)).collect()
}

/// Has them come from a descriptor. To be called while there is one thread.
pub fn block() -> nix::Result<SignalFd> {
    ends().thread_block()?;
    SignalFd::with_flags(&ends(), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// After the first: has the next end this process at once, whatever the end of the server waits for.
pub fn die_by_next(signals: SignalFd) {
    let take = move || {
        std::thread::sleep(SAME_REQUEST);
        while let Ok(Some(_)) = signals.read_signal() {}
        // The kernel gives it to a thread that does not block it.
        if ends().thread_unblock().is_ok() {
            loop {
                std::thread::park();
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    if let Err(error) = thread.spawn(take) {
        log::debug!("a second signal has no effect: {error}");
    }
}
