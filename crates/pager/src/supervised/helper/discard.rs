//! Descriptors that a peer sent and that are of no use: to close one may take any time, as its
//! file system may be a program of the sender's. So they are closed by threads of their own, a few.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many threads may be at it.
const MOST_THREADS: usize = 4;

/// Closes descriptors that peers sent, by threads of its own.
#[derive(Debug, Default)]
pub(crate) struct Discard {
    threads: Arc<AtomicUsize>,
}

impl Discard {
    /// Closes descriptors some time. `false` if that is not to be had: they stay open, and nothing more is
    /// to be taken from their sender.
    pub(crate) fn close(&self, descriptors: Vec<OwnedFd>) -> bool {
        if descriptors.is_empty() {
            return true;
        }
        let threads = self.threads.clone();
        if threads.fetch_add(1, Ordering::Relaxed) >= MOST_THREADS {
            threads.fetch_sub(1, Ordering::Relaxed);
            std::mem::forget(descriptors);
            return false;
        }
        let kept = Arc::new(std::sync::Mutex::new(descriptors));
        let to_close = kept.clone();
        let spawned = std::thread::Builder::new()
            .name("discard".into())
            .spawn(move || {
                let descriptors = std::mem::take(&mut *crate::sync::lock(&to_close));
                drop(descriptors);
                threads.fetch_sub(1, Ordering::Relaxed);
            });
        if spawned.is_err() {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            std::mem::forget(std::mem::take(&mut *crate::sync::lock(&kept)));
        }
        spawned.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::time::{Duration, Instant};

    #[test]
    fn descriptors_are_closed_elsewhere() {
        let discard = Discard::default();
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert!(discard.close(vec![writer.into()]));
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "the other end is closed");
        let began = Instant::now();
        while discard.threads.load(Ordering::Relaxed) > 0 {
            assert!(began.elapsed() < Duration::from_secs(10));
            crate::time::yield_now();
        }
        discard.threads.store(MOST_THREADS, Ordering::Relaxed);
        let (_reader, writer) = std::io::pipe().unwrap();
        assert!(!discard.close(vec![writer.into()]), "all are at it");
        assert!(discard.close(Vec::new()));
    }
}
