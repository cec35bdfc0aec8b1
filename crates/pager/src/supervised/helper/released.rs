//! Processes that were let go, as long as they live.
//!
//! Their children may have memory in part that memfold serves, so they are looked for below these. And nothing of memfold's
//! is to be started in any of them because of what is left of the library there.

use crate::sync::lock;
use memfold_sys::process::Process;
use std::sync::{Arc, Mutex};

/// The processes. Any thread.
#[derive(Debug, Default)]
pub(crate) struct Released {
    dismissed: Mutex<Vec<Arc<Process>>>,
}

impl Released {
    /// A process is let go.
    pub(crate) fn add(&self, process: &Arc<Process>) {
        let mut dismissed = lock(&self.dismissed);
        dismissed.retain(|one| one.signal(0).is_ok());
        dismissed.push(process.clone());
    }

    /// It is held anew.
    pub(crate) fn remove(&self, process: &Process) {
        lock(&self.dismissed).retain(|one| one.pid() != process.pid());
    }

    /// Those that live.
    pub(crate) fn living(&self) -> Vec<Arc<Process>> {
        let dismissed = lock(&self.dismissed);
        let living = dismissed.iter().filter(|one| one.signal(0).is_ok());
        living.cloned().collect()
    }

    /// Whether a process is one of them, or descends from one.
    pub(crate) fn covers(&self, process: &Process) -> bool {
        self.living().iter().any(|one| {
            // Where descriptors are short, it may.
            one.pid() == process.pid() || process.descends_from(one).unwrap_or(true)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_released_until_it_is_held_anew_or_ends() {
        let mut child = Command::new("/bin/sleep").arg("10").spawn().unwrap();
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let own = Arc::new(Process::open(memfold_sys::process::own_id()).unwrap());
        let released = Released::default();
        assert!(!released.covers(&process));
        released.add(&process);
        assert!(released.covers(&process) && !released.covers(&own));
        released.remove(&process);
        assert!(!released.covers(&process));
        released.add(&own);
        assert!(released.covers(&process), "it descends from one");
        released.remove(&own);
        released.add(&process);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(released.living().is_empty());
    }
}
