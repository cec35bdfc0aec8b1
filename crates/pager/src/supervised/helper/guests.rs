//! Processes that may connect although they do not descend from this one: those that a user attached.

use crate::sync::lock;
use memfold_sys::process::Process;
use std::sync::{Arc, Mutex, MutexGuard};

/// The processes. Any thread.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    guests: Mutex<Vec<Arc<Process>>>,
    /// Taken while one is attached or detached: it ends with this process as long as that traces it.
    tracing: Mutex<()>,
}

impl Guests {
    /// Keeps this process from ending as long as the result lives, and others from tracing.
    pub(crate) fn trace(&self) -> MutexGuard<'_, ()> {
        lock(&self.tracing)
    }

    /// Lets a process in from now on.
    pub(crate) fn invite(&self, process: &Arc<Process>) {
        let mut guests = lock(&self.guests);
        guests.retain(|guest| guest.signal(0).is_ok());
        guests.push(process.clone());
    }

    /// Takes that back. Returns whether it was invited.
    pub(crate) fn forget(&self, process: &Process) -> bool {
        let mut guests = lock(&self.guests);
        let before = guests.len();
        guests.retain(|guest| guest.pid() != process.pid());
        guests.len() < before
    }

    /// Whether a process was invited.
    pub(crate) fn includes(&self, process: &Process) -> bool {
        // While the guest is not reaped, its PID is no other process's.
        let is_it = |guest: &Arc<Process>| guest.pid() == process.pid() && guest.signal(0).is_ok();
        lock(&self.guests).iter().any(is_it)
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
        guests.invite(&invited);
        assert!(guests.includes(&Process::open(guest.id() as i32).unwrap()));
        assert!(!guests.includes(&stranger));
        guest.kill().unwrap();
        guest.wait().unwrap();
        assert!(!guests.includes(&invited));
        guests.invite(&stranger);
        guests.forget(&stranger);
        assert!(!guests.includes(&stranger));
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
