//! Which process a forked child is.
//!
//! The event of a fork brings a descriptor, and the child's first fault the number by which its
//! thread calls itself. In pid namespaces two processes can have the same, and the mappings of the
//! wrong one would make the child forget what it inherited. So the number of the child's address
//! space is put into its beacon with a secret, and the process is the one in which both can be read.
//! (Where a page is missing, reading fails at once: it does not wait for this very thread to bring it.)

use crate::page::VirtualPage;
use crate::supervised::group::Group;
use crate::supervised::helper::accept::is_known_child;
use crate::supervised::space::AddressSpace;
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_sys::hello::LOST;
use memfold_sys::privilege;
use memfold_sys::process::{Inspector, processes_by_own_number};
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// While other processes end, the kernel may leave one out of those it lists.
const SEARCHES: u32 = 3;

/// How long the beacon of what may be the child's process is waited for. An anonymous page takes
/// microseconds; a longer time lets one that maps a file there hold up its CPU's handler for longer.
const BEACON_PATIENCE: Duration = Duration::from_millis(50);

impl AddressSpace {
    /// Before the first fault of a forked child is served: finds its process, by the number its
    /// thread calls itself, and makes its page states those of its mappings. `false` if nothing but its
    /// beacon may be served: part of its memory is lost, and its process was not found, to be stopped.
    pub fn identify_child(&self, group: &Group, thread: Option<u32>) -> bool {
        if lock(&self.fork.inheritance).is_none() {
            return true;
        }
        if self.inspector().is_none()
            && let (Some(thread), Some(beacon)) = (thread, self.fork.beacon())
        {
            let _one_at_a_time = lock(&group.child_search);
            // With no descriptor to look with, nobody would be found.
            let _ = patiently(|| self.uffd_descriptor().try_clone());
            let found = (0..SEARCHES).find_map(|_| find_process(self, group, thread, beacon));
            if let Some(inspector) = found {
                self.set_child_process(inspector);
            }
        }
        const WHY: &str = "its parent ended while it forked, and part of its memory went with it";
        if self.fork.lost.load(Ordering::Relaxed) && !self.kill_program(WHY) {
            return false;
        }
        self.reconcile();
        true
    }

    /// What a child reads in its beacon.
    pub fn beacon_page(&self) -> [u8; PAGE_SIZE] {
        let number = if self.fork.lost.load(Ordering::Relaxed) {
            LOST
        } else {
            self.id
        };
        let mut page = [0; PAGE_SIZE];
        page[..8].copy_from_slice(&number.to_le_bytes());
        // Nobody reads it: it is looked for.
        page[8..24].copy_from_slice(&self.fork.secret);
        page
    }

    /// Whether what this address space has in its beacon is what a process has there: then it is its own.
    ///
    /// Nothing is known of the process yet, so the read must not wait for what it maps there.
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
    if let Err(partial) = space.uffd().put_page(beacon.address(), &shown)
        && partial.errno != Errno::EEXIST
    {
        log::debug!(
            "a forked child's beacon cannot be filled: {}",
            partial.errno
        );
        return None;
    }
    // What the kernel made a child of may have lost its user's right to look at it.
    let _raised = privilege::raised();
    processes_by_own_number(thread.into())
        .filter(|process| !is_known(group, process.pid()))
        // With no descriptor to look by, descent is unknown; opening the process reports that.
        .filter(|process| {
            is_known_child(group, process) || process.descends_from_here().unwrap_or(true)
        })
        .filter_map(|process| {
            let process = Arc::new(process);
            // The main thread may have ended before others.
            let by_other = || {
                let other = process.thread_by_own_number(thread.into())?;
                Inspector::open_child(&process, other).ok()
            };
            let main = Inspector::open_child(&process, process.pid()).ok();
            main.or_else(by_other)
        })
        .find(|inspector| space.is_shown_by(inspector, beacon))
}

/// Whether a process has an address space that is known to be its own.
fn is_known(group: &Group, pid: i32) -> bool {
    group.spaces().iter().any(|space| {
        let known = space.inspector().map(|known| known.pid());
        known == Some(pid) && !space.is_gone()
    })
}
