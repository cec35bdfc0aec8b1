//! Shortage of descriptors (EMFILE, ENFILE), memory (ENOMEM) or threads (EAGAIN): retried for a while, because other threads
//! and processes release theirs. Programs wait meanwhile.

use crate::time::Instant;
use memfold_sys::{Errno, is_shortage};
use std::io;
use std::time::Duration;

/// Time for which an operation is retried. Longer survives longer shortages and blocks the thread for
/// longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two tries.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

fn is_of(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.0)
}

/// Runs `operation`, and again while it fails for want of a descriptor, memory or a thread.
pub(crate) fn patiently<T>(operation: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let began = Instant::now();
    loop {
        match operation() {
            Err(error) if may_pass(&error) && began.elapsed() < PATIENCE => {
                crate::time::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

fn may_pass(error: &io::Error) -> bool {
    is_shortage(error) || is_of(error, Errno::ENOMEM) || is_of(error, Errno::EAGAIN)
}

/// The limit to raise, as far as an error tells which it is.
pub(crate) fn limit_of(error: &io::Error) -> &'static str {
    if is_of(error, Errno::ENFILE) {
        "fs.file-max"
    } else if is_of(error, Errno::ENOMEM) {
        "memory, `ulimit -v` or vm.max_map_count, or set vm.overcommit_memory to 0 or 1"
    } else if is_of(error, Errno::EAGAIN) {
        "`ulimit -u` or pids.max of the cgroup"
    } else {
        "`ulimit -n`"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn only_a_shortage_is_retried() {
        let tries = Cell::new(0);
        let after = |failures: i32, errno: Errno| {
            tries.set(0);
            patiently(|| {
                tries.set(tries.get() + 1);
                if tries.get() > failures {
                    Ok(tries.get())
                } else {
                    Err(errno.into())
                }
            })
        };
        assert_eq!(after(0, Errno::EMFILE).expect("it works at once"), 1);
        let shortages = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::EAGAIN];
        for errno in shortages {
            assert_eq!(after(2, errno).expect("it works in the end"), 3);
        }
        let limits = shortages.map(|errno| limit_of(&errno.into()));
        assert_eq!(limits[0], "`ulimit -n`");
        assert!(limits[2].contains("vm.max_map_count") && limits[3].contains("pids.max"));
        assert!(after(1, Errno::EINVAL).is_err());
        assert_eq!(tries.get(), 1);
    }
}
