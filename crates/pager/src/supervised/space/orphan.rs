//! Guarding programs that no helper kills when the supervisor dies: they have none, or it may be blocked.
//! Their pages must not read as zeros then.

use crate::supervised::kernel::Guarded;
use crate::supervised::space::AddressSpace;
#[cfg(not(simulated))]
use crate::supervised::util::fd_pressure::{self, is_shortage};
use crate::time::Instant;
use std::sync::OnceLock;

/// What guards a program that its helper cannot kill.
pub(crate) struct Orphan {
    /// Creation time of the address space.
    pub born: Instant,
    /// Time at which the governor first found it detached.
    pub detached_since: OnceLock<Instant>,
    /// The guardian kills the process when the supervisor dies.
    guarded: OnceLock<Guarded>,
    /// The PID is not known: the guardian keeps the userfaultfd open, so that faults block for ever.
    held: OnceLock<Guarded>,
    /// Its helper breaks COW; see [`AddressSpace::guard_helper`].
    helped: OnceLock<Guarded>,
}

impl Default for Orphan {
    fn default() -> Self {
        Orphan {
            born: Instant::now(),
            detached_since: OnceLock::new(),
            guarded: OnceLock::new(),
            held: OnceLock::new(),
            helped: OnceLock::new(),
        }
    }
}

impl AddressSpace {
    /// Guards a program that has no helper, or lost it. The governor retries while descriptors are
    /// short.
    #[cfg(not(simulated))]
    pub(crate) fn guard(&self) {
        let guardian = &self.resources.guardian;
        // If a helper exited, the survivor is another process that shares the memory (CLONE_VM).
        let known = self.inspector().filter(|_| self.attached().is_none());
        let (place, guarded) = match known {
            _ if self.orphan.guarded.get().is_some() => return,
            Some(inspector) => {
                let handle = inspector.handle();
                (
                    &self.orphan.guarded,
                    handle.and_then(|handle| guardian.guard(handle)),
                )
            }
            None if self.orphan.held.get().is_some() => return,
            None => {
                let uffd = self.uffd.try_clone();
                (&self.orphan.held, uffd.and_then(|uffd| guardian.hold(uffd)))
            }
        };
        match guarded {
            // Only the governor calls this, so the cell is empty.
            Ok(guarded) => drop(place.set(guarded)),
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
