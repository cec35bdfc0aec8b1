//! Guarding programs that no helper kills when the supervisor dies: they have none, or it may be blocked.
//! Their pages must not read as zeros then.

use crate::supervised::kernel::Guarded;
#[cfg(not(simulated))]
use crate::supervised::kernel::Held;
use crate::supervised::space::AddressSpace;
#[cfg(not(simulated))]
use crate::supervised::util::fd_pressure;
use crate::time::Instant;
#[cfg(not(simulated))]
use memfold_sys::is_shortage;
#[cfg(not(simulated))]
use std::io;
#[cfg(not(simulated))]
use std::os::fd::AsFd;
use std::sync::OnceLock;

/// What guards a program that its helper cannot kill.
pub(crate) struct Orphan {
    /// Creation time of the address space.
    pub born: Instant,
    /// Time at which the governor first found it detached.
    pub detached_since: OnceLock<Instant>,
    /// The guardian kills the process when the supervisor dies.
    guarded: OnceLock<Guarded>,
    /// The guardian keeps the userfaultfd open when the supervisor dies, so that faults block until the program is
    /// killed, and ends them if nothing does.
    #[cfg(not(simulated))]
    held: OnceLock<Held>,
    /// Its helper breaks COW; see [`AddressSpace::guard_helper`].
    helped: OnceLock<Guarded>,
}

impl Default for Orphan {
    fn default() -> Self {
        Orphan {
            born: Instant::now(),
            detached_since: OnceLock::new(),
            guarded: OnceLock::new(),
            #[cfg(not(simulated))]
            held: OnceLock::new(),
            helped: OnceLock::new(),
        }
    }
}

impl AddressSpace {
    /// Has the guardian keep the userfaultfd open, from the beginning: when the supervisor dies, nothing is known yet of
    /// a process that came into being a moment before.
    #[cfg(not(simulated))]
    pub(crate) fn hold(&self) -> io::Result<()> {
        if self.orphan.held.get().is_none() {
            let held = self.resources.guardian.hold(self.uffd.as_fd())?;
            // Called where it is created, and by the governor after that: the cell is empty.
            drop(self.orphan.held.set(held));
        }
        Ok(())
    }

    /// Guards a program that has no helper, or lost it. The governor retries while descriptors are
    /// short.
    #[cfg(not(simulated))]
    pub(crate) fn guard(&self) {
        // If a helper exited, the survivor is another process that shares the memory (CLONE_VM).
        let known = self.inspector().filter(|_| self.attached().is_none());
        let result = match known {
            _ if self.orphan.guarded.get().is_some() => return,
            Some(inspector) => {
                let handle = inspector.handle();
                let guarded = handle.and_then(|handle| self.resources.guardian.guard(handle));
                // Only the governor calls this, so the cell is empty.
                guarded.map(|guarded| drop(self.orphan.guarded.set(guarded)))
            }
            None => self.hold(),
        };
        match result {
            Ok(()) => {}
            Err(error)
                if is_shortage(&error) && self.orphan.born.elapsed() < fd_pressure::PATIENCE => {}
            Err(error) => {
                self.kill_program(&format!(
                    "it has no helper thread, and cannot be guarded against the death of memfold: {error}"
                ));
            }
        }
    }

    /// Guards a program whose helper is about to touch pages to break COW. A helper that waits for a missing
    /// page does not see the supervisor die. Where descriptors are short, the next batch tries again.
    pub(crate) fn guard_helper(&self) {
        if self.orphan.helped.get().is_none()
            && let Some(attached) = self.attached()
            && let Ok(handle) = attached.inspector.handle()
            && let Ok(guarded) = self.resources.guardian.guard_helped(handle)
        {
            // Only the reclaimer gets here.
            drop(self.orphan.helped.set(guarded));
        }
    }
}
