//! Which process a forked child is.
//!
//! The event of a fork brings a descriptor, and the child's first fault the number by which its
//! thread calls itself. In pid namespaces two processes can have the same, and the mappings of the
//! wrong one would make the child forget what it inherited. So the number of the child's address
//! space is put into its beacon, and the process is the one in which it can be read.
//!
//! Reading must not wait for a page that this very thread would have to bring. A process that is
//! known already is not looked at; of any other the beacon is read only if it is there, and none but
//! its own search, of which there is one at a time, puts it there.

use crate::address_space::AddressSpace;
use crate::group::lock;
use crate::page::VirtualPage;
use crate::shortage::patiently;
use memfold_sys::hello::LOST;
use memfold_sys::process::{Inspector, own_id, processes_by_own_number, thread_by_own_number};
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::atomic::Ordering;

/// While other processes end, the kernel may leave one out of those it lists.
const SEARCHES: u32 = 3;

impl AddressSpace {
    /// Before the first fault of a forked child is served: finds its process, by the number its
    /// thread calls itself, and makes its page states those of its mappings. `false` if nothing but its
    /// beacon may be served: part of its memory is lost, and its process was not found, to be stopped.
    pub fn meet(&self, thread: Option<u32>) -> bool {
        if lock(&self.inheritance).is_none() {
            return true;
        }
        if self.inspector().is_none()
            && let (Some(thread), Some(beacon)) = (thread, self.beacon())
        {
            let _one_at_a_time = lock(&self.group().meeting);
            // With no descriptor to look with, nobody would be found.
            let _ = patiently(|| self.uffd_descriptor().try_clone());
            let found = (0..SEARCHES).find_map(|_| self.find_process(thread, beacon));
            if let Some(inspector) = found {
                self.set_seen(inspector);
            }
        }
        const WHY: &str = "its parent ended while it forked, and part of its memory went with it";
        if self.lost.load(Ordering::Relaxed) && !self.stop_program(WHY) {
            return false;
        }
        self.reconcile();
        true
    }

    /// What a child reads in its beacon.
    pub fn beacon_page(&self) -> [u8; PAGE_SIZE] {
        let number = if self.lost.load(Ordering::Relaxed) {
            LOST
        } else {
            self.id
        };
        let mut page = [0; PAGE_SIZE];
        page[..8].copy_from_slice(&number.to_le_bytes());
        page
    }

    fn find_process(&self, thread: u32, beacon: VirtualPage) -> Option<Inspector> {
        let shown = self.beacon_page();
        if let Err(partial) = self.uffd().put_page(beacon.address(), &shown)
            && partial.errno != Errno::EEXIST
        {
            log::debug!(
                "a forked child's beacon cannot be filled: {}",
                partial.errno
            );
            return None;
        }
        processes_by_own_number(own_id(), thread.into())
            .filter(|pid| !self.is_known(*pid))
            .filter_map(|pid| {
                // The main thread may have ended before others.
                let by_other = || {
                    let other = thread_by_own_number(pid, thread.into())?;
                    Inspector::open(pid, other).ok()
                };
                Inspector::open(pid, pid).ok().or_else(by_other)
            })
            .find(|inspector| shows(inspector, beacon, &shown))
    }

    /// Whether a process has an address space that is known to be its own.
    fn is_known(&self, pid: i32) -> bool {
        self.group().spaces().iter().any(|space| {
            let known = space.inspector().map(Inspector::pid);
            known == Some(pid) && !space.is_gone()
        })
    }
}

/// Whether a page of a process is there and reads like this.
fn shows(inspector: &Inspector, page: VirtualPage, expected: &[u8; PAGE_SIZE]) -> bool {
    let (start, end) = (page.address(), page.plus(1).address());
    let is_there = inspector
        .present(start, end)
        .is_ok_and(|present| present == [(start, end)]);
    let mut found = [0; PAGE_SIZE];
    is_there && matches!(inspector.read_pages(&[start], &mut found), Ok(1)) && found == *expected
}
