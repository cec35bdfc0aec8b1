//! Processes that may connect although they do not descend from this one: those that a user attached.

use crate::sync::lock;
use memfold_sys::process::Process;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A process that was attached.
#[derive(Debug)]
struct Guest {
    process: Arc<Process>,
    /// Where the library is in it, once it is.
    library: Option<u64>,
}

/// The processes. Any thread.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    invited: Mutex<Vec<Guest>>,
    /// Taken while one is traced: it ends with this process as long as that traces it.
    tracing: Mutex<()>,
    /// How many detachments began. Changes while `tracing` is held.
    detachments: AtomicU64,
    /// Detachments under way. `SeqCst`: `is_detaching` is asked after the end was announced, which they look at.
    detaching: AtomicUsize,
}

/// A detachment that is under way as long as this lives.
#[derive(Debug)]
pub(crate) struct Detaching<'a>(&'a Guests);

impl Drop for Detaching<'_> {
    fn drop(&mut self) {
        self.0.detaching.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Guests {
    /// Keeps this process from ending as long as the result lives, and others from tracing.
    pub(crate) fn trace(&self) -> MutexGuard<'_, ()> {
        lock(&self.tracing)
    }

    /// Whether a process may be traced just now.
    pub(crate) fn is_tracing(&self) -> bool {
        self.tracing.try_lock().is_err()
    }

    /// A number that changes when a detachment begins. Who starts the helper of a forked child compares it while it
    /// traces: from then on no child of what is detached is to have one.
    pub(crate) fn detachments(&self) -> u64 {
        self.detachments.load(Ordering::Relaxed)
    }

    /// Notes that a detachment begins. With the guard of `trace`, no helper is being started in a forked child.
    pub(crate) fn note_detachment(&self, _tracing: &MutexGuard<'_, ()>) {
        self.detachments.fetch_add(1, Ordering::Relaxed);
    }

    /// The guests in which the library is, and where.
    pub(crate) fn with_library(&self) -> Vec<(Arc<Process>, u64)> {
        let guests = lock(&self.invited);
        let living = guests
            .iter()
            .filter(|guest| guest.process.signal(0).is_ok());
        let with_library = living.filter_map(|guest| Some((guest.process.clone(), guest.library?)));
        with_library.collect()
    }

    /// Where the library was brought to in a guest.
    pub(crate) fn library_in(&self, process: &Process) -> Option<u64> {
        let guests = lock(&self.invited);
        let mut of_process = guests.iter().filter(|guest| guest.process.is_same(process));
        of_process.find_map(|guest| guest.library)
    }

    /// Begins a detachment.
    pub(crate) fn detach(&self) -> Detaching<'_> {
        self.detaching.fetch_add(1, Ordering::SeqCst);
        Detaching(self)
    }

    /// Whether a detachment is under way.
    pub(crate) fn is_detaching(&self) -> bool {
        self.detaching.load(Ordering::SeqCst) > 0
    }

    /// Lets a process in from now on.
    pub(crate) fn invite(&self, process: &Arc<Process>) {
        let mut guests = lock(&self.invited);
        guests.retain(|guest| guest.process.signal(0).is_ok());
        guests.push(Guest {
            process: process.clone(),
            library: None,
        });
    }

    /// Notes where the library is in a guest.
    pub(crate) fn note_library(&self, process: &Process, address: u64) {
        let mut guests = lock(&self.invited);
        let of_process = guests
            .iter_mut()
            .filter(|guest| guest.process.is_same(process));
        of_process.for_each(|guest| guest.library = Some(address));
    }

    /// Takes an invitation back. Returns where the library was brought to, if it was.
    pub(crate) fn forget(&self, process: &Process) -> Option<u64> {
        let library = self.library_in(process);
        lock(&self.invited).retain(|guest| !guest.process.is_same(process));
        library
    }

    /// Whether a process was invited.
    pub(crate) fn includes(&self, process: &Process) -> bool {
        lock(&self.invited)
            .iter()
            .any(|guest| guest.process.is_same(process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn start() -> (Child, Arc<Process>) {
        let child = Command::new("/bin/sleep").arg("10").spawn().unwrap();
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        (child, process)
    }

    #[test]
    fn only_invited_processes_are_let_in_and_only_until_they_end() {
        let ((mut guest, invited), (mut other, stranger)) = (start(), start());
        let guests = Guests::default();
        assert!(!guests.is_tracing());
        let tracing = guests.trace();
        assert!(guests.is_tracing());
        drop(tracing);
        guests.invite(&invited);
        assert!(guests.includes(&Process::open(guest.id() as i32).unwrap()));
        assert!(!guests.includes(&stranger));
        guest.kill().unwrap();
        guest.wait().unwrap();
        assert!(!guests.includes(&invited));
        guests.invite(&stranger);
        guests.note_library(&stranger, 7);
        assert_eq!(guests.library_in(&stranger), Some(7));
        assert_eq!(guests.with_library().len(), 1);
        assert_eq!(guests.forget(&stranger), Some(7));
        assert!(!guests.includes(&stranger));
        assert_eq!(guests.forget(&stranger), None);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
