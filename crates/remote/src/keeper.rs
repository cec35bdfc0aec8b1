//! The thread that removes and renews what is in a store, and says what is wrong with it.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use memfold_swap::{RemoteTier, RemoteUsage};

use crate::threads::spawn;

/// The interval at which freed pages are removed. Longer makes fewer, larger removals, and leaves what
/// is freed in the store for longer.
const INTERVAL: Duration = Duration::from_millis(200);
/// A wait of a load that is worth a warning.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// The thread, until it is dropped.
pub(crate) struct Keeper {
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    pub(crate) fn start(
        tier: Arc<RemoteTier>,
        store: String,
        patience: Duration,
    ) -> io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let thread = spawn("remote", move || {
            let mut warnings = Warnings::new(store, patience);
            while !stop.load(Relaxed) {
                std::thread::park_timeout(INTERVAL);
                tier.maintain(&|| stop.load(Relaxed));
                warnings.note(&tier.usage());
            }
        })?;
        Ok(Self {
            stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// Warnings, each given once.
struct Warnings {
    store: String,
    patience: Duration,
    said_full: bool,
    said_waiting: bool,
    said_lost: bool,
}

impl Warnings {
    fn new(store: String, patience: Duration) -> Self {
        Self {
            store,
            patience,
            said_full: false,
            said_waiting: false,
            said_lost: false,
        }
    }

    fn note(&mut self, usage: &RemoteUsage) {
        for line in self.lines(usage) {
            log::warn!("{line}");
        }
    }

    fn lines(&mut self, usage: &RemoteUsage) -> Vec<String> {
        let mut lines = Vec::new();
        let trouble = usage
            .trouble
            .map_or_else(String::new, |error| format!(" ({error})"));
        if usage.store_failures > 0 && !std::mem::replace(&mut self.said_full, true) {
            lines.push(format!(
                "the store {} takes no more pages for now{trouble}; they stay in memory, and are sent once \
                 it does (reported once; memfold stat counts them)",
                self.store
            ));
        }
        let waits = usage.waiting > 0 && usage.waiting_for >= LONG_WAIT;
        if waits && !std::mem::replace(&mut self.said_waiting, true) {
            lines.push(format!(
                "the store {} does not return pages{trouble}: what needs them waits, and a program is \
                 killed if it does not get one within {} s (reported once)",
                self.store,
                self.patience.as_secs()
            ));
        }
        if usage.lost_pages > 0 && !std::mem::replace(&mut self.said_lost, true) {
            lines.push(format!(
                "the store {} has lost {} pages (evicted, flushed or gone with a server): a program that \
                 needs one is killed (reported once)",
                self.store, usage.lost_pages
            ));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_swap::RemoteError;

    #[test]
    fn each_trouble_is_told_once() {
        let mut warnings = Warnings::new("valkey://a".to_owned(), Duration::from_secs(60));
        let mut usage = RemoteUsage::default();
        assert_eq!(warnings.lines(&usage), [""; 0]);
        usage.store_failures = 1;
        usage.trouble = Some(RemoteError::Full);
        let lines = warnings.lines(&usage);
        assert!(lines[0].contains("it has no room"), "{lines:?}");
        usage.waiting = 2;
        usage.waiting_for = Duration::from_secs(2);
        usage.lost_pages = 7;
        assert_eq!(warnings.lines(&usage).len(), 2);
        assert_eq!(warnings.lines(&usage), [""; 0]);
    }
}
