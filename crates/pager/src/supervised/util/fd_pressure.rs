//! Descriptor shortage (EMFILE, ENFILE): retried for a while, because other threads and processes close
//! descriptors. Programs wait meanwhile.

use crate::time::Instant;
use memfold_sys::is_shortage;
use std::io;
use std::time::Duration;

/// Time for which an operation is retried. Longer survives longer shortages and blocks the thread for
/// longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two tries.
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// Runs `operation`, and again while it fails for want of a descriptor.
pub(crate) fn patiently<T>(operation: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let began = Instant::now();
    loop {
        match operation() {
            Err(error) if is_shortage(&error) && began.elapsed() < PATIENCE => {
                crate::time::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::Errno;
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
        assert_eq!(after(2, Errno::EMFILE).expect("it works in the end"), 3);
        assert_eq!(after(1, Errno::ENFILE).expect("it works in the end"), 2);
        assert!(after(1, Errno::ENOMEM).is_err());
        assert_eq!(tries.get(), 1);
    }
}
