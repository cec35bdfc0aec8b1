//! What the core asks of the kernel about one program.
//!
//! | type | what it is on Linux | in the simulation |
//! |---|---|---|
//! | [`Userfaultfd`] | a userfaultfd | mappings, pages and a queue of messages |
//! | [`Inspector`] | open files of `/proc/PID` | a look at the same |
//! | [`Port`], [`SharedChannel`] | memory shared with the helper | a command that the model's helper executes |
//! | [`Ports`] | makes channels | the same |
//! | [`Guardian`] | a process that kills programs when the supervisor dies | notes which it would kill |
//!
//! Which column the core uses is a matter of `cfg(simulated)`: `crates/simulation` compiles this crate's
//! sources a second time with it. All calls are static. [`Memory`] and [`Process`] are what both columns
//! must have; of the channel, both have the methods that the core calls.
//!
//! The simulation compiles `linux`, too: its `conformance` compares the model with these very
//! implementations.

pub(crate) mod linux;
#[cfg(not(simulated))]
pub(crate) mod sentinel;

#[cfg(simulated)]
pub(crate) use crate::simulation::model::{
    ChannelFile, Guarded, Guardian, Inspector, Port, Ports, SharedChannel, Userfaultfd,
};
#[cfg(not(simulated))]
pub(crate) use linux::{
    ChannelFile, Guarded, Guardian, Held, Inspector, Port, Ports, SharedChannel, Userfaultfd,
};

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use memfold_swap::Page;
use memfold_sys::Errno;
use memfold_sys::process::{InheritedBy, InheritedRange, ThreadSample, VirtualMemoryArea};
use memfold_sys::uffd::Partial;
use std::io;

/// One message of a userfaultfd. `U` is the kind of userfaultfd that was read.
#[derive(Debug)]
pub enum Message<U = Userfaultfd> {
    /// A thread faulted, and waits.
    Fault {
        /// The page.
        page: VirtualPage,
        /// The access was a write.
        write: bool,
        /// The page is present and write-protected.
        protected: bool,
        /// TID of the thread in its PID namespace.
        thread: u32,
    },
    /// munmap and everything else that unmaps; its thread waits until this is read.
    Unmap(PageRange),
    /// `madvise` is about to drop the pages; its thread waits until this is read.
    Remove(PageRange),
    /// mremap; its thread waits until this is read.
    Remap {
        /// Source range.
        from: PageRange,
        /// First page of the target range.
        to: VirtualPage,
    },
    /// A fork; the parent waits until this is read, and the child does not run yet.
    Fork(U),
}

/// Requests on a program's userfaultfd. All calls may be made from any thread, and none waits for the
/// program.
pub(crate) trait Memory: Sized {
    /// Copies `pages` pages in and wakes the threads that wait for them (`UFFDIO_COPY`).
    fn copy_in(&self, page: VirtualPage, source: &[u8], pages: u64) -> Result<(), Partial>;

    /// Copies one page in and wakes no thread.
    fn put_page(&self, page: VirtualPage, contents: &Page) -> Result<(), Partial>;

    /// Maps the zero page and wakes the threads that wait for it (`UFFDIO_ZEROPAGE`).
    fn zero(&self, page: VirtualPage) -> Result<(), Partial>;

    /// Wakes the threads that wait for pages of the range; they access them again (`UFFDIO_WAKE`).
    fn wake(&self, range: PageRange) -> Result<(), Errno>;

    /// Makes the next write to each page of the range that is there a fault (`UFFDIO_WRITEPROTECT`).
    fn protect(&self, range: PageRange) -> Result<(), Errno>;

    /// Allows writes again, and wakes the threads that wait for that.
    fn unprotect(&self, range: PageRange) -> Result<(), Errno>;

    /// Registers a range for missing pages (`UFFDIO_REGISTER`).
    fn register(&self, range: PageRange) -> Result<(), Errno>;

    /// Registers a range for missing and write-protected pages.
    fn register_protectable(&self, range: PageRange) -> Result<(), Errno>;

    /// Registers a range for missing pages, and for tracking accesses.
    fn register_tracked(&self, range: PageRange) -> Result<(), Errno>;

    /// Has the kernel note the next access to each page of the range that is there (`UFFDIO_RWPROTECT`). Nothing is done if
    /// not all of it is registered so.
    fn track(&self, range: PageRange) -> Result<(), Errno>;

    /// Unregisters a range: the kernel fills its holes with zeros again.
    fn unregister(&self, range: PageRange) -> Result<(), Errno>;

    /// Waits until each thread that changes mappings or drops pages now has released the kernel's `mmap_lock`.
    /// `unregistered` is a mapped page that is not registered, and stays so.
    fn await_mmap_lock(&self, unregistered: VirtualPage) -> Result<(), Errno>;

    /// Whether all of a range lies in one registered mapping, and no change of the mappings is in
    /// progress.
    fn is_registered(&self, range: PageRange) -> bool;

    /// Whether a mapping change is in progress or its event is unread (the kernel's `mmap_changing`).
    fn is_changing(&self) -> bool;

    /// Whether the address space is released (ESRCH).
    fn is_gone(&self) -> bool;

    /// Reads up to [`MESSAGES`] messages and adds them to `messages`. Returns how many; fewer than
    /// [`MESSAGES`] if there are no more.
    fn read(&self, messages: &mut Vec<Message<Self>>) -> Result<usize, Errno>;
}

/// Most messages of one [`Memory::read`]. More saves system calls, and reads more of what must wait until
/// events are applied.
pub(crate) const MESSAGES: usize = 8;

/// What `/proc` shows of a program's process.
pub(crate) trait Process {
    /// The pages of a range that are resident (pagemap).
    fn resident(&self, range: PageRange) -> io::Result<RangeSet>;

    /// The pages of a range that were read and never written: the kernel's page of zeros. `Err` also where it does not tell.
    fn zero_pages(&self, range: PageRange) -> io::Result<RangeSet>;

    /// The pages of a range that are tracked, and were accessed since, or came since.
    fn accessed(&self, range: PageRange) -> io::Result<RangeSet>;

    /// Copies pages out of the program, up to the first that is missing. Returns their number.
    fn copy_out(&self, addresses: &[u64], target: &mut [u8]) -> io::Result<usize>;

    /// Whether the address space is released, without waiting for a lock of the program's; `None` if that is not told.
    fn released(&self) -> Option<bool>;

    /// The threads but the helper, and what they do.
    fn threads(&self) -> io::Result<Vec<ThreadSample>>;

    /// Whether a child that is no program of its own yet uses the same memory.
    fn shares_memory(&self) -> io::Result<bool>;

    /// The VMAs.
    fn vmas(&self) -> io::Result<Vec<VirtualMemoryArea>>;

    /// The guard regions in a range.
    fn guard_regions(&self, range: PageRange) -> io::Result<Vec<PageRange>>;

    /// The mapping around a page, as addresses.
    fn mapping_around(&self, page: VirtualPage) -> io::Result<Option<(u64, u64)>>;

    /// The mappings of a forked child that its parent had registered.
    fn inherited(&self, by: InheritedBy) -> io::Result<Vec<InheritedRange>>;
}

/// Both implementations have both traits.
const _: () = {
    const fn has_both<U: Memory, P: Process>() {}
    has_both::<Userfaultfd, Inspector>();
};
