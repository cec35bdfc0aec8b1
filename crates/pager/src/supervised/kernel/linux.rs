//! The host's kernel.

use crate::page::{PageRange, VirtualPage, bytes};
use crate::range_set::RangeSet;
use crate::supervised::kernel::{MESSAGES, Memory, Message, Process};
use memfold_swap::Page;
use memfold_sys::owned_uffd::borrow;
use memfold_sys::process::{InheritedBy, InheritedRange, ThreadSample, VirtualMemoryArea};
use memfold_sys::uffd::{self, FAULT_PROTECTED, FAULT_WRITE, Partial, Uffd};
use memfold_sys::{Errno, PAGE_SIZE};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[cfg(not(simulated))]
pub(crate) use crate::supervised::kernel::sentinel::Sentinel as Ports;
#[cfg(not(simulated))]
pub(crate) use memfold_sys::guardian::{Guarded, Guardian, Held};
#[cfg(not(simulated))]
pub(crate) use memfold_sys::port::{Port, SharedChannel};
pub(crate) use memfold_sys::process::Inspector;
/// A channel's descriptor, which is handed to the program.
pub(crate) type ChannelFile = OwnedFd;

/// What is asked of the program's userfaultfd.
pub(crate) const FEATURES: u64 = FEATURES_WITHOUT_FORKS | uffd::FEATURE_EVENT_FORK;

/// The same where forks are prepared: it takes no capability.
pub(crate) const FEATURES_WITHOUT_FORKS: u64 = uffd::FEATURE_WRITE_PROTECT
    | uffd::FEATURE_EVENT_REMAP
    | uffd::FEATURE_EVENT_REMOVE
    | uffd::FEATURE_EVENT_UNMAP
    | uffd::FEATURE_THREAD_ID;

/// A program's userfaultfd.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl From<OwnedFd> for Userfaultfd {
    fn from(descriptor: OwnedFd) -> Self {
        Userfaultfd(descriptor)
    }
}

impl From<Userfaultfd> for OwnedFd {
    fn from(userfaultfd: Userfaultfd) -> Self {
        userfaultfd.0
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Userfaultfd {
    fn uffd(&self) -> Uffd {
        borrow(&self.0)
    }

    /// Another descriptor of the same userfaultfd.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// [`Memory::read`] of at most `most` messages.
    pub fn read_at_most(
        &self,
        most: usize,
        messages: &mut Vec<Message<Self>>,
    ) -> Result<usize, Errno> {
        let mut buffer = [uffd::Message::default(); MESSAGES];
        let read = self.uffd().read_now(&mut buffer[..most])?;
        messages.extend(buffer[..read].iter().filter_map(message_of));
        Ok(read)
    }
}

/// First address and length in bytes.
fn span(range: PageRange) -> (u64, u64) {
    (range.start.address(), bytes(range.pages()))
}

impl Memory for Userfaultfd {
    fn copy_in(&self, page: VirtualPage, source: &[u8], pages: u64) -> Result<(), Partial> {
        self.uffd().copy_in(page.address(), source, bytes(pages))
    }

    fn put_page(&self, page: VirtualPage, contents: &Page) -> Result<(), Partial> {
        self.uffd().put_page(page.address(), contents)
    }

    fn zero(&self, page: VirtualPage) -> Result<(), Partial> {
        self.uffd().zero(page.address(), bytes(1))
    }

    fn wake(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().wake(start, length)
    }

    fn protect(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().protect(start, length)
    }

    fn unprotect(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().unprotect(start, length)
    }

    fn register(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().register(start, length)
    }

    fn register_protectable(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().register_protectable(start, length)
    }

    fn register_tracked(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().register_tracked(start, length)
    }

    fn track(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().track(start, length)
    }

    fn unregister(&self, range: PageRange) -> Result<(), Errno> {
        let (start, length) = span(range);
        self.uffd().unregister(start, length)
    }

    fn await_mmap_lock(&self, unregistered: VirtualPage) -> Result<(), Errno> {
        // Changes nothing, but takes the lock as what changes mappings does.
        self.unregister(PageRange::around(unregistered, 1))
    }

    fn is_registered(&self, range: PageRange) -> bool {
        let (start, length) = span(range);
        self.uffd().is_registered(start, length)
    }

    fn is_changing(&self) -> bool {
        // The kernel checks `mmap_changing` before the range, which is invalid.
        let probed = self.uffd().zero(1, PAGE_SIZE as u64);
        probed.is_err_and(|partial| partial.errno == Errno::EAGAIN)
    }

    fn is_gone(&self) -> bool {
        self.uffd().is_gone()
    }

    fn read(&self, messages: &mut Vec<Message<Self>>) -> Result<usize, Errno> {
        self.read_at_most(MESSAGES, messages)
    }
}

/// `None` for an event that was not asked for.
fn message_of(message: &uffd::Message) -> Option<Message<Userfaultfd>> {
    let range = || {
        let (start, end) = message.range();
        PageRange::of_addresses(start, end)
    };
    match message.event {
        uffd::EVENT_PAGEFAULT => Some(Message::Fault {
            page: VirtualPage::containing(message.fault_address()),
            write: message.fault_flags() & FAULT_WRITE != 0,
            protected: message.fault_flags() & FAULT_PROTECTED != 0,
            thread: message.fault_thread(),
        }),
        uffd::EVENT_UNMAP => Some(Message::Unmap(range())),
        uffd::EVENT_REMOVE => Some(Message::Remove(range())),
        uffd::EVENT_REMAP => {
            let (from, to, length) = message.remap();
            Some(Message::Remap {
                from: PageRange::of_addresses(from, from + length),
                to: VirtualPage::containing(to),
            })
        }
        uffd::EVENT_FORK => Some(Message::Fork(message.take_fork_descriptor().into())),
        _ => None,
    }
}

/// What is asked for where accesses are tracked, too.
pub(crate) const FEATURES_THAT_TRACK: u64 = uffd::FEATURE_RWP | uffd::FEATURE_RWP_ASYNC;

/// The ranges between such addresses.
fn set_of(runs: &[(u64, u64)]) -> RangeSet {
    let runs = runs.iter();
    runs.map(|(start, end)| PageRange::of_addresses(*start, *end))
        .collect()
}

impl Process for Inspector {
    fn resident(&self, range: PageRange) -> io::Result<RangeSet> {
        let (start, end) = (range.start.address(), range.end.address());
        Ok(set_of(&self.present(start, end)?))
    }

    fn zero_pages(&self, range: PageRange) -> io::Result<RangeSet> {
        let (start, end) = (range.start.address(), range.end.address());
        Ok(set_of(&self.runs_of_zeros(start, end)?))
    }

    fn accessed(&self, range: PageRange) -> io::Result<RangeSet> {
        let (start, end) = (range.start.address(), range.end.address());
        Ok(set_of(&self.runs_of_accessed(start, end)?))
    }

    fn copy_out(&self, addresses: &[u64], target: &mut [u8]) -> io::Result<usize> {
        self.read_pages(addresses, target)
    }

    fn released(&self) -> Option<bool> {
        self.is_released()
    }

    fn threads(&self) -> io::Result<Vec<ThreadSample>> {
        self.other_threads()
    }

    fn shares_memory(&self) -> io::Result<bool> {
        self.process().shares_memory_with_child()
    }

    fn vmas(&self) -> io::Result<Vec<VirtualMemoryArea>> {
        self.areas()
    }

    fn guard_regions(&self, range: PageRange) -> io::Result<Vec<PageRange>> {
        let found = self.guards(range.start.address(), range.end.address())?;
        Ok(found
            .iter()
            .map(|&(start, end)| PageRange::of_addresses(start, end))
            .collect())
    }

    fn mapping_around(&self, page: VirtualPage) -> io::Result<Option<(u64, u64)>> {
        self.mapping_at(page.address())
    }

    fn inherited(&self, by: InheritedBy) -> io::Result<Vec<InheritedRange>> {
        self.inherited_ranges(by)
    }
}
