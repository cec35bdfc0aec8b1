//! Finding the process of a forked child.
//!
//! A fork event carries a userfaultfd, and the child's first fault its TID in its PID namespace.
//! Processes in different namespaces may have the same TID, and reconciling with the mappings of the
//! wrong process would discard inherited pages. So the child's ID and a secret are written to its
//! beacon, and the process whose beacon contains both is the child. (Reading a missing page of a
//! candidate fails at once; it raises no userfaultfd fault.)

use crate::page::VirtualPage;
use crate::supervised::group::Group;
use crate::supervised::helper::accept::is_known_child;
use crate::supervised::kernel::{Inspector, Memory};
use crate::supervised::space::AddressSpace;
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_sys::hello::LOST;
use memfold_sys::privilege;
use memfold_sys::process::processes_by_own_number;
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Number of searches: listing `/proc` may miss a process while others exit. More delays the first
/// fault of a child that cannot be found.
const SEARCHES: u32 = 3;

/// Longest wait for reading the beacon of a candidate process. An anonymous page takes microseconds; longer lets
/// a process that maps a file there block the handler of its CPU for longer.
const BEACON_PATIENCE: Duration = Duration::from_millis(50);

impl AddressSpace {
    /// Prepares for the first fault of a forked child: finds its process by the faulting TID, and
    /// reconciles its page states with its mappings. `false` if only its beacon may be served, because
    /// some of its pages are lost and its process was not found to be killed.
    pub fn identify_child(&self, group: &Group, thread: Option<u32>) -> bool {
        if lock(&self.fork.inheritance).is_none() {
            return true;
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
            return false;
        }
        self.reconcile();
        true
    }

    /// The contents of a child's beacon: its ID, or [`LOST`], and the secret.
    pub fn beacon_page(&self) -> [u8; PAGE_SIZE] {
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

    /// Whether the beacon of a process has the contents of this address space's beacon, which shows that it is the
    /// same process. The process has proved nothing yet, so the read must not wait for what it maps there.
    pub fn is_shown_by(&self, inspector: &Inspector, beacon: VirtualPage) -> bool {
        let found = inspector.read_page_within(beacon.address(), BEACON_PATIENCE);
        found.is_some_and(|found| *found == self.beacon_page())
    }
}

fn find_process(
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
    processes_by_own_number(thread.into())
        .filter(|process| !is_known(group, process.pid()))
        // With no descriptor to look by, descent is unknown; opening the process reports that.
        .filter(|process| {
            is_known_child(group, process) || process.descends_from_here().unwrap_or(true)
        })
        .filter_map(|process| {
            let process = Arc::new(process);
            // The main thread may have exited before others.
            let by_other = || {
                let other = process.thread_by_own_number(thread.into())?;
                Inspector::open_with_flags(&process, other).ok()
            };
            let main = Inspector::open_with_flags(&process, process.pid()).ok();
            main.or_else(by_other)
        })
        .find(|inspector| space.is_shown_by(inspector, beacon))
}

/// Whether a process already belongs to another live address space.
fn is_known(group: &Group, pid: i32) -> bool {
    group.spaces().iter().any(|space| {
        let known = space.inspector().map(|known| known.pid());
        known == Some(pid) && !space.is_gone()
    })
}
