//! What happens before the first fault of a forked child is served.

#[cfg(simulated)]
use crate::simulation::model::process::find_process;
#[cfg(not(simulated))]
use crate::supervised::fork::find_child::find_process;
use crate::supervised::fork::inheritance::Identified;
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::hello::LOST;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Number of searches: listing `/proc` may miss a process while others exit, and a candidate's beacon may not be read in
/// time on a busy machine. More delays the first fault of a child that cannot be found; with fewer more children are not
/// found, which the guardian cannot kill then.
const SEARCHES: u32 = 4;

/// Number of faults at which a child is searched before that is said, and done more rarely: descriptors may be short for
/// long, or it can never be found.
const TRIES: u32 = 50;
/// Between two of them, at first and later. Longer delays the others on this CPU.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(10)];

impl AddressSpace {
    /// Prepares for the first fault of a forked child: finds its process by the faulting TID, and
    /// reconciles its page states with its mappings.
    pub(crate) fn identify_child(&self, group: &Group, thread: Option<u32>) -> Identified {
        if lock(&self.fork.inheritance).is_none() {
            return Identified::Yes;
        }
        if self.inspector().is_none()
            && let (Some(thread), Some(beacon)) = (thread, self.fork.beacon())
        {
            let _one_at_a_time = lock(&group.child_search);
            // The search needs descriptors, and would find nothing during a shortage.
            let _ = patiently(|| self.uffd().try_clone());
            let found = (0..SEARCHES).find_map(|_| find_process(self, group, thread, beacon));
            if let Some(inspector) = found {
                self.set_child_process(inspector);
            }
        }
        const WHY: &str = "pages that it inherited were lost: its parent exited during the fork, or they \
                           could not be stored";
        if self.fork.lost.load(Ordering::Relaxed) && !self.kill_program(WHY) {
            return Identified::BeaconOnly;
        }
        if self.inspector().is_none() && self.depends_on_mappings() {
            return self.wait_unfound();
        }
        let parent = self.fork.ancestors.last().and_then(|id| group.space(*id));
        self.reconcile(parent.as_deref());
        let awaits = lock(&self.fork.inheritance).is_some();
        self.fork.awaits_comparison.store(awaits, Ordering::Relaxed);
        Identified::Yes
    }

    /// Whether a child's pages may be elsewhere than its page states say, or empty.
    fn depends_on_mappings(&self) -> bool {
        let inheritance = lock(&self.fork.inheritance);
        let has_history = inheritance
            .as_ref()
            .is_some_and(|inheritance| !inheritance.history.is_empty());
        has_history || self.fork.inherited_stored.load(Ordering::Relaxed)
    }

    /// Has the child fault again after a while.
    fn wait_unfound(&self) -> Identified {
        let [first, later] = PAUSES;
        let tries = self.fork.tries.fetch_add(1, Ordering::Relaxed);
        if tries == TRIES && !self.is_gone() {
            log::warn!(
                "a forked child waits: its process cannot be found, so memfold cannot see what of its parent's memory it \
                 has, and goes on looking; raise the limit on open files (ulimit -n), or kill the child"
            );
        }
        crate::time::sleep(if tries < TRIES { first } else { later });
        Identified::NotYet
    }

    /// The contents of a child's beacon: its ID, or [`LOST`], and the secret.
    pub(crate) fn beacon_page(&self) -> [u8; PAGE_SIZE] {
        let number = if self.fork.lost.load(Ordering::Relaxed) {
            LOST
        } else {
            self.id
        };
        let mut page = [0; PAGE_SIZE];
        page[..8].copy_from_slice(&number.to_le_bytes());
        // The child does not read the secret; it identifies the child's process.
        page[8..24].copy_from_slice(&self.fork.secret);
        page
    }
}
