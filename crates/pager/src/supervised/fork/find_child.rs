//! Finding the process of a forked child.
//!
//! A fork event carries a userfaultfd, and the child's first fault its TID in its PID namespace.
//! Processes in different namespaces may have the same TID, and reconciling with the mappings of the
//! wrong process would discard inherited pages. So the child's ID and a secret are written to its
//! beacon, and the process whose beacon contains both is the child. (Reading a missing page of a
//! candidate fails at once; it raises no userfaultfd fault.)
//!
//! Only processes that descend from this one are looked at, so that a stranger is never read nor waited for. The children of a
//! program that was attached descend from anything once their parents have ended or were let go: of these every process with
//! that TID is a candidate, and all below that program.

use crate::page::VirtualPage;
use crate::supervised::fork::family::Origin;
use crate::supervised::group::Group;
use crate::supervised::helper::accept::is_known_child;
use crate::supervised::kernel::{Inspector, Memory};
use crate::supervised::space::AddressSpace;
use memfold_sys::Errno;
use memfold_sys::privilege;
use memfold_sys::process::{Process, own_id, processes_by_own_number};
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for reading the beacon of a candidate process. An anonymous page takes microseconds, but a thread may wait
/// for a CPU where many others run: with 50 ms, one child in 150 was not found beside ten that never sleep. Longer lets a
/// process that maps a file there block the handler of its CPU for longer.
const BEACON_PATIENCE: Duration = Duration::from_millis(200);

impl AddressSpace {
    /// Notes which program its children descend from, at the first fork.
    pub(crate) fn note_origin(&self) {
        let origin = &self.fork.family.origin;
        if let Some(attached) = self.attached()
            && origin.get().is_none()
            // Else descriptors are short, and a later fork tells.
            && let Ok(is_below) = attached.inspector.process().descends_from_here()
        {
            let process = attached.inspector.process().clone();
            // Another thread has found the same.
            let _ = origin.set(Origin { process, is_below });
        }
    }

    /// Whether the beacon of a process has the contents of this address space's beacon, which shows that it is the
    /// same process. The process has proved nothing yet, so the read must not wait for what it maps there.
    pub(crate) fn is_shown_by(&self, inspector: &Inspector, beacon: VirtualPage) -> bool {
        let found = inspector.read_page_within(beacon.address(), BEACON_PATIENCE);
        found.is_some_and(|found| *found == self.beacon_page())
    }
}

/// The process of a forked child with a thread of this TID.
pub(crate) fn find_process(
    space: &AddressSpace,
    group: &Group,
    thread: u32,
    beacon: VirtualPage,
) -> Option<Inspector> {
    let shown = space.beacon_page();
    if let Err(partial) = space.uffd().put_page(beacon, &shown)
        && partial.errno != Errno::EEXIST
    {
        log::debug!(
            "cannot fill the beacon of a forked child: {}",
            partial.errno
        );
        return None;
    }
    // The child may have become undumpable, which needs a capability to inspect.
    let _raised = privilege::raised();
    let search = Search {
        group,
        space,
        thread,
        beacon,
    };
    let guest = space.fork.family.origin.get();
    let guest = guest.filter(|origin| !origin.is_below);
    // Unless it is reaped, no other process has its PID.
    let lives = |guest: &&Origin| guest.process.signal(0).is_ok();
    let guest_pid = guest.filter(lives).map(|guest| guest.process.pid());
    let near = std::iter::once(own_id()).chain(guest_pid);
    // With no descriptor to look by, descent is unknown; opening the process reports that.
    let is_near = |process: &Process| {
        guest.is_some()
            || is_known_child(group, process)
            || process.descends_from_here().unwrap_or(true)
    };
    search.below(near, is_near).or_else(|| {
        // Which these are takes a look at each process.
        let elsewhere = elsewhere(group);
        let roots = elsewhere.iter().map(|process| process.pid());
        search.below(roots.collect::<Vec<_>>().into_iter(), |process| {
            is_below_any(process, &elsewhere)
        })
    })
}

/// A search for the process of a forked child.
struct Search<'a> {
    group: &'a Group,
    space: &'a AddressSpace,
    thread: u32,
    beacon: VirtualPage,
}

impl Search<'_> {
    /// Among the candidates with such a thread: the one of that number, and those of `roots` and below.
    fn below(
        &self,
        roots: impl Iterator<Item = i32>,
        is_candidate: impl Fn(&Process) -> bool,
    ) -> Option<Inspector> {
        processes_by_own_number(self.thread.into(), roots)
            .filter(|process| !is_known(self.group, process.pid()) && is_candidate(process))
            .filter_map(|process| {
                let process = Arc::new(process);
                // The main thread may have exited before others.
                let by_other = || {
                    let other = process.thread_by_own_number(self.thread.into())?;
                    Inspector::open_with_flags(&process, other).ok()
                };
                let main = Inspector::open_with_flags(&process, process.pid()).ok();
                main.or_else(by_other)
            })
            .find(|inspector| self.space.is_shown_by(inspector, self.beacon))
    }
}

/// Processes that were attached or were forked by those, and some that were let go since: they need not be below this
/// process, and their children may be in any address space.
fn elsewhere(group: &Group) -> Vec<Arc<Process>> {
    let spaces = group.spaces();
    let held = spaces.iter().filter_map(|space| space.inspector());
    let held = held.map(|inspector| inspector.process().clone());
    let all = held.chain(group.released.living());
    all.filter(|process| !process.descends_from_here().unwrap_or(true))
        .collect()
}

fn is_below_any(process: &Process, others: &[Arc<Process>]) -> bool {
    let is_below = |other: &Arc<Process>| process.descends_from(other).unwrap_or(true);
    others.iter().any(is_below)
}

/// Whether a process already belongs to another live address space.
fn is_known(group: &Group, pid: i32) -> bool {
    group.spaces().iter().any(|space| {
        let known = space.inspector().map(|known| known.pid());
        known == Some(pid) && !space.is_gone()
    })
}
