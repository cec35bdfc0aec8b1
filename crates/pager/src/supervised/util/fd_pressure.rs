//! No descriptors left: others close theirs soon, or somebody raises the limit. Programs wait meanwhile.

use memfold_sys::Errno;
use std::io;
use std::time::{Duration, Instant};

/// How long that is waited for.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries.
pub const PAUSE: Duration = Duration::from_millis(10);

/// Whether it would have worked with more descriptors.
pub fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::ENFILE, Errno::EMFILE].map(|errno| Some(errno.0));
    shortages.contains(&error.raw_os_error())
}

/// Does what needs a descriptor, again and again while there is none.
pub fn patiently<T>(what: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let began = Instant::now();
    loop {
        match what() {
            Err(error) if is_shortage(&error) && began.elapsed() < PATIENCE => {
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn only_a_shortage_is_waited_out() {
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
