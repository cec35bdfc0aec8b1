//! What this process was started with and Rust's runtime, or memfold, changes: signals ignored.
//!
//! The runtime ignores SIGPIPE before `main`, so it is noted before that, as the loader calls
//! initialisers.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// A bit for each standard signal.
static IGNORED: AtomicU32 = AtomicU32::new(0);

#[used]
// SAFETY: the loader calls what stands in this section, before `main` and with one thread. The
// function uses nothing that is set up later.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    let mut ignored = 0;
    for signal in 1..32 {
        // SAFETY: asks only, and fills a live structure, for which zeros are a value.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            action
        };
        if action.sa_sigaction == libc::SIG_IGN {
            ignored |= 1 << signal;
        }
    }
    IGNORED.store(ignored, Ordering::Relaxed);
}

/// Whether a standard signal was ignored when this process was started.
pub fn was_ignored(signal: i32) -> bool {
    (1..32).contains(&signal) && IGNORED.load(Ordering::Relaxed) >> signal & 1 == 1
}

/// Ignores a signal from now on, or gives it its default action. May be called between fork and exec.
///
/// # Errors
/// If there is no such signal, or it cannot be ignored.
pub fn set_ignored(signal: i32, ignored: bool) -> io::Result<()> {
    let action = if ignored {
        libc::SIG_IGN
    } else {
        libc::SIG_DFL
    };
    // SAFETY: installs no code.
    match unsafe { libc::signal(signal, action) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_ignored_at_the_start_is_known() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let now = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
        for signal in (1..32).filter(|signal| *signal != libc::SIGPIPE) {
            assert_eq!(
                was_ignored(signal),
                now >> (signal - 1) & 1 == 1,
                "{signal}"
            );
        }
        assert!(!was_ignored(0) && !was_ignored(32));
        assert!(set_ignored(libc::SIGKILL, true).is_err());
    }
}
