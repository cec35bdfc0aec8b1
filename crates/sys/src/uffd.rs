//! The userfaultfd interface: numbers, structures and the ioctls memfold uses.
//!
//! The errors keep their meaning: what was done before the error is returned beside it, because a
//! partial copy is ordinary (the next page is there already, an event came in between).

use crate::Errno;
use crate::addresses::FAR_PAGE;
use crate::raw::{nr, syscall};
use core::ffi::CStr;

const UFFD_API: u64 = 0xaa;

/// A page fault message.
pub const EVENT_PAGEFAULT: u8 = 0x12;
/// The address space was copied by a fork.
pub const EVENT_FORK: u8 = 0x13;
/// A range was moved by `mremap`.
pub const EVENT_REMAP: u8 = 0x14;
/// A range is about to be dropped by `madvise`.
pub const EVENT_REMOVE: u8 = 0x15;
/// A range was unmapped.
pub const EVENT_UNMAP: u8 = 0x16;

/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`: ranges can be write-protected.
pub const FEATURE_WRITE_PROTECT: u64 = 1 << 0;
/// `UFFD_FEATURE_EVENT_FORK`; the handshake that asks for it needs `CAP_SYS_PTRACE`.
pub const FEATURE_EVENT_FORK: u64 = 1 << 1;
/// `UFFD_FEATURE_EVENT_REMAP`.
pub const FEATURE_EVENT_REMAP: u64 = 1 << 2;
/// `UFFD_FEATURE_EVENT_REMOVE`.
pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// `UFFD_FEATURE_EVENT_UNMAP`.
pub const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
/// `UFFD_FEATURE_SIGBUS`: faults are errors, not messages.
pub const FEATURE_SIGBUS: u64 = 1 << 7;
/// `UFFD_FEATURE_THREAD_ID`: messages carry the faulting thread.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// `UFFD_FEATURE_EXACT_ADDRESS`: messages carry the address that was touched, not its page's.
pub const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
/// `UFFD_FEATURE_POISON` (Linux 6.6).
pub const FEATURE_POISON: u64 = 1 << 14;
/// `UFFD_FEATURE_MOVE` (Linux 6.8).
pub const FEATURE_MOVE: u64 = 1 << 16;
/// `UFFD_FEATURE_RWP` (Linux 7.3): which pages are accessed can be tracked.
pub const FEATURE_RWP: u64 = 1 << 17;
/// `UFFD_FEATURE_RWP_ASYNC`: an access to a tracked page raises no message.
pub const FEATURE_RWP_ASYNC: u64 = 1 << 18;

/// The fault was a write.
pub const FAULT_WRITE: u64 = 1;
/// The page is there, and was written to while it was write-protected.
pub const FAULT_PROTECTED: u64 = 1 << 1;

const IOC_API: usize = 0xc018_aa3f;
/// `UFFDIO_REGISTER`.
pub const IOC_REGISTER: usize = 0xc020_aa00;
const IOC_UNREGISTER: usize = 0x8010_aa01;
const IOC_WAKE: usize = 0x8010_aa02;
const IOC_COPY: usize = 0xc028_aa03;
const IOC_ZEROPAGE: usize = 0xc020_aa04;
const IOC_MOVE: usize = 0xc028_aa05;
const IOC_WRITEPROTECT: usize = 0xc018_aa06;
const IOC_CONTINUE: usize = 0xc020_aa07;
const IOC_POISON: usize = 0xc020_aa08;
const IOC_RWPROTECT: usize = 0xc018_aa09;
/// A process that may open it may create userfaultfds that also serve the kernel's own faults.
pub const DEVICE: &CStr = c"/dev/userfaultfd";
/// `USERFAULTFD_IOC_NEW` on [`DEVICE`].
const IOC_NEW: usize = 0xaa00;

/// `O_CLOEXEC | O_NONBLOCK`, as all are created.
const CREATED: usize = 0o2_000_000 | 0o4_000;

const REGISTER_MODE_MISSING: u64 = 1;
const REGISTER_MODE_WP: u64 = 2;
const REGISTER_MODE_RWP: u64 = 8;
const WRITEPROTECT_MODE_WP: u64 = 1;
const RWPROTECT_MODE_RWP: u64 = 1;
const MODE_DONTWAKE: u64 = 1;

/// One message, 32 bytes, as `read` returns it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Message {
    /// One of the `EVENT_` numbers.
    pub event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

impl Message {
    /// Page fault: the flags.
    pub fn fault_flags(&self) -> u64 {
        self.arguments[0]
    }
    /// Page fault: the address, rounded down to its page.
    pub fn fault_address(&self) -> u64 {
        self.arguments[1] & !(crate::PAGE_SIZE as u64 - 1)
    }
    /// Page fault: the address as the kernel reports it, which is exact only with
    /// [`FEATURE_EXACT_ADDRESS`].
    pub fn exact_fault_address(&self) -> u64 {
        self.arguments[1]
    }
    /// Page fault: the faulting thread.
    pub fn fault_thread(&self) -> u32 {
        self.arguments[2] as u32
    }
    /// Fork: the child's userfaultfd, which the kernel put into the reader's table.
    ///
    /// # Panics
    /// If this is not a fork message.
    #[cfg(feature = "std")]
    pub fn take_fork_descriptor(&self) -> std::os::fd::OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: the kernel made the descriptor for this message; each message is applied once.
        unsafe { std::os::fd::OwnedFd::from_raw_fd(self.fork_descriptor()) }
    }
    /// Fork: the number of the descriptor that [`Message::take_fork_descriptor`] owns.
    ///
    /// # Panics
    /// If this is not a fork message.
    #[cfg(feature = "std")]
    pub(crate) fn fork_descriptor(&self) -> i32 {
        assert_eq!(
            self.event, EVENT_FORK,
            "only a fork message brings a descriptor"
        );
        self.arguments[0] as u32 as i32
    }
    /// Remap: from, to, length in bytes.
    pub fn remap(&self) -> (u64, u64, u64) {
        (self.arguments[0], self.arguments[1], self.arguments[2])
    }
    /// Remove or unmap: start and end.
    pub fn range(&self) -> (u64, u64) {
        (self.arguments[0], self.arguments[1])
    }
}

/// An ioctl stopped before its end: `done` bytes went through, then `errno`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partial {
    /// Bytes that were done.
    pub done: u64,
    /// What stopped it.
    pub errno: Errno,
}

/// A borrowed userfaultfd. All calls may be made from any thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uffd(pub i32);

fn ioctl(fd: i32, request: usize, argument: &mut [u64]) -> Result<(), Errno> {
    // SAFETY: each caller passes the structure that the request reads and writes, as u64 words.
    let result = unsafe {
        syscall(
            nr::IOCTL,
            [
                fd as usize,
                request,
                argument.as_mut_ptr() as usize,
                0,
                0,
                0,
            ],
        )
    };
    Errno::result(result).map(|_| ())
}

/// Outcome of a COPY, ZEROPAGE or MOVE, whose last word the kernel sets to bytes done or -errno.
/// (Taking that word for a length without looking at its sign reads -EAGAIN as a huge copy.)
fn outcome(result: Result<(), Errno>, done: u64, length: u64) -> Result<(), Partial> {
    let done_bytes = if (done as i64) < 0 { 0 } else { done };
    match result {
        Ok(()) if done_bytes == length => Ok(()),
        Ok(()) => Err(Partial {
            done: done_bytes,
            errno: Errno::EAGAIN,
        }),
        // The ioctl answers EAGAIN for any partial result; the word then holds what was done.
        Err(errno) => Err(Partial {
            done: done_bytes,
            errno,
        }),
    }
}

/// Whether a move may have refused without a look at the pages: mappings change, or had changed just
/// before. (To miss a page is `ENOENT`, too, but comes after its target was seen to be empty.)
pub fn is_unseen(errno: Errno) -> bool {
    errno == Errno::EAGAIN || errno == Errno::ENOENT
}

/// Bytes, from the front, that a move put at its target before it refused with `errno`.
fn arrived(target: u64, source: u64, length: u64, errno: Errno) -> u64 {
    let has_arrived = |step: &u64| {
        let is_there = *step == 0 && errno == Errno::EEXIST || is_present(target + step);
        // Where mappings change, another page may be at its place by now, or none anyway.
        is_there && (is_unseen(errno) || !is_present(source + step))
    };
    let steps = (0..length).step_by(crate::PAGE_SIZE);
    steps.take_while(has_arrived).count() as u64 * crate::PAGE_SIZE as u64
}

/// The result of a refused move of which `arrived` bytes had arrived. The next try reports the rest.
fn told(arrived: u64, length: u64, refused: Partial) -> Result<(), Partial> {
    match arrived {
        0 => Err(refused),
        _ => outcome(Ok(()), arrived, length),
    }
}

/// Whether something is in memory at an address of the calling process. A page that cannot be asked
/// for is taken for missing: it was unmapped, or the question is forbidden.
pub fn is_present(address: u64) -> bool {
    let mut present = 0u8;
    // SAFETY: asks about one page; the kernel writes one byte.
    let result = unsafe {
        syscall(
            nr::MINCORE,
            [
                address as usize,
                crate::PAGE_SIZE,
                (&raw mut present) as usize,
                0,
                0,
                0,
            ],
        )
    };
    Errno::result(result).is_ok() && present & 1 != 0
}

/// Opens [`DEVICE`], close-on-exec.
fn open_raw_device() -> Result<i32, Errno> {
    const AT_FDCWD: isize = -100;
    const O_RDWR_CLOEXEC: usize = 0o2_000_002;
    let path = DEVICE.as_ptr() as usize;
    // SAFETY: a terminated path and flags.
    let device = unsafe {
        syscall(
            nr::OPENAT,
            [AT_FDCWD as usize, path, O_RDWR_CLOEXEC, 0, 0, 0],
        )
    };
    Errno::result(device).map(|device| device as i32)
}

/// Opens [`DEVICE`] to hand it out.
#[cfg(feature = "std")]
pub fn open_device() -> Result<std::os::fd::OwnedFd, Errno> {
    // SAFETY: a fresh descriptor.
    open_raw_device().map(|device| unsafe { std::os::fd::FromRawFd::from_raw_fd(device) })
}

impl Uffd {
    /// Creates one for the calling process (non-blocking, close-on-exec) that serves no fault of
    /// the kernel's own; that needs no privilege.
    pub fn create_for_user_mode() -> Result<Uffd, Errno> {
        const USER_MODE_ONLY: usize = 1;
        // SAFETY: takes flags only.
        let result = unsafe { syscall(nr::USERFAULTFD, [CREATED | USER_MODE_ONLY, 0, 0, 0, 0, 0]) };
        Errno::result(result).map(|fd| Uffd(fd as i32))
    }

    /// Creates one for the calling process (non-blocking, close-on-exec).
    pub fn create() -> Result<Uffd, Errno> {
        // SAFETY: takes flags only.
        let result = unsafe { syscall(nr::USERFAULTFD, [CREATED, 0, 0, 0, 0, 0]) };
        match Errno::result(result) {
            Ok(fd) => Ok(Uffd(fd as i32)),
            Err(refused) => Self::create_by_own_device().map_err(|_| refused),
        }
    }

    fn create_by_own_device() -> Result<Uffd, Errno> {
        let device = open_raw_device()?;
        let created = Self::create_by(device);
        // SAFETY: closing our own descriptor.
        unsafe { syscall(nr::CLOSE, [device as usize, 0, 0, 0, 0, 0]) };
        created
    }

    /// As [`Uffd::create`], by an open descriptor of [`DEVICE`]: its opener was allowed to.
    pub fn create_by(device: i32) -> Result<Uffd, Errno> {
        // SAFETY: USERFAULTFD_IOC_NEW takes flags by value.
        let fd = unsafe { syscall(nr::IOCTL, [device as usize, IOC_NEW, CREATED, 0, 0, 0]) };
        Errno::result(fd).map(|fd| Uffd(fd as i32))
    }

    /// Lets [`Uffd::read`] wait for messages instead of returning without any.
    #[cfg(feature = "std")]
    pub fn set_blocking(self) -> Result<(), Errno> {
        // SAFETY: numbers only.
        let result = unsafe { libc::fcntl(self.0, libc::F_SETFL, 0) };
        match result {
            0 => Ok(()),
            _ => Err(Errno(
                std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
            )),
        }
    }

    /// The handshake; returns the features the kernel has.
    pub fn api(self, features: u64) -> Result<u64, Errno> {
        let mut argument = [UFFD_API, features, 0];
        ioctl(self.0, IOC_API, &mut argument)?;
        Ok(argument[1])
    }

    /// Registers a range for missing-page faults.
    pub fn register(self, start: u64, length: u64) -> Result<(), Errno> {
        ioctl(
            self.0,
            IOC_REGISTER,
            &mut [start, length, REGISTER_MODE_MISSING, 0],
        )
    }

    /// [`Uffd::register`], and for faults of writes to pages that [`Uffd::protect`] protected.
    pub fn register_protectable(self, start: u64, length: u64) -> Result<(), Errno> {
        let mode = REGISTER_MODE_MISSING | REGISTER_MODE_WP;
        ioctl(self.0, IOC_REGISTER, &mut [start, length, mode, 0])
    }

    /// [`Uffd::register`], and for [`Uffd::track`]. `EINVAL` without [`FEATURE_RWP`], and of memory that may not be
    /// accessed. What is registered so cannot be protectable.
    pub fn register_tracked(self, start: u64, length: u64) -> Result<(), Errno> {
        let mode = REGISTER_MODE_MISSING | REGISTER_MODE_RWP;
        ioctl(self.0, IOC_REGISTER, &mut [start, length, mode, 0])
    }

    /// Has the kernel note the next access to each page of the range that is there. All that is mapped there must be
    /// registered so; else nothing is done.
    pub fn track(self, start: u64, length: u64) -> Result<(), Errno> {
        ioctl(
            self.0,
            IOC_RWPROTECT,
            &mut [start, length, RWPROTECT_MODE_RWP],
        )
    }

    /// Whether all of a range lies in one mapping, anonymous memory that is registered with a
    /// userfaultfd, and no change of the mappings is under way. Changes nothing.
    pub fn is_registered(self, start: u64, length: u64) -> bool {
        // The kernel looks at the mapping first, and then that such memory has nothing to continue.
        let asked = ioctl(self.0, IOC_CONTINUE, &mut [start, length, 0, 0]);
        asked == Err(Errno::EINVAL)
    }

    /// Whether the address space has no process any more. Changes nothing: whatever the program has mapped
    /// there, memory that is registered has nothing to continue.
    pub fn is_gone(self) -> bool {
        let length = crate::PAGE_SIZE as u64;
        let asked = ioctl(self.0, IOC_CONTINUE, &mut [FAR_PAGE, length, 0, 0]);
        asked == Err(Errno::ESRCH)
    }

    /// Makes the next write to each page of the range that is there a fault. All of the range must
    /// be registered so; pages up to the first mapping that is not are protected all the same.
    pub fn protect(self, start: u64, length: u64) -> Result<(), Errno> {
        let mode = WRITEPROTECT_MODE_WP;
        ioctl(self.0, IOC_WRITEPROTECT, &mut [start, length, mode])
    }

    /// Allows writes again, and wakes the threads that wait for that.
    pub fn unprotect(self, start: u64, length: u64) -> Result<(), Errno> {
        ioctl(self.0, IOC_WRITEPROTECT, &mut [start, length, 0])
    }

    /// Takes a range back: its holes are filled by the kernel again.
    pub fn unregister(self, start: u64, length: u64) -> Result<(), Errno> {
        ioctl(self.0, IOC_UNREGISTER, &mut [start, length])
    }

    /// Wakes the threads that wait for pages of the range; they fault again if still missing.
    pub fn wake(self, start: u64, length: u64) -> Result<(), Errno> {
        ioctl(self.0, IOC_WAKE, &mut [start, length])
    }

    /// Copies `length` bytes at `source` (the caller's memory) into missing pages at `target`
    /// and wakes the threads that wait for them.
    ///
    /// # Safety
    /// `source` must be readable for `length` bytes.
    pub unsafe fn copy(self, target: u64, source: *const u8, length: u64) -> Result<(), Partial> {
        let mut argument = [target, source as u64, length, 0, 0];
        let result = ioctl(self.0, IOC_COPY, &mut argument);
        outcome(result, argument[4], length)
    }

    /// [`Uffd::copy`] from a slice, of its first `length` bytes.
    ///
    /// # Panics
    /// If the slice is shorter.
    pub fn copy_in(self, target: u64, source: &[u8], length: u64) -> Result<(), Partial> {
        assert!(source.len() as u64 >= length, "the source covers the copy");
        // SAFETY: checked above.
        unsafe { self.copy(target, source.as_ptr(), length) }
    }

    /// Copies a page into a missing one without waking the threads that wait for it.
    pub fn put_page(self, target: u64, page: &[u8; crate::PAGE_SIZE]) -> Result<(), Partial> {
        let length = crate::PAGE_SIZE as u64;
        let source = page.as_ptr() as u64;
        let mut argument = [target, source, length, MODE_DONTWAKE, 0];
        let result = ioctl(self.0, IOC_COPY, &mut argument);
        outcome(result, argument[4], length)
    }

    /// Maps the zero page over missing pages and wakes the threads that wait for them.
    pub fn zero(self, target: u64, length: u64) -> Result<(), Partial> {
        let mut argument = [target, length, 0, 0];
        let result = ioctl(self.0, IOC_ZEROPAGE, &mut argument);
        outcome(result, argument[3], length)
    }

    /// Makes each access to a missing page a `SIGBUS` from now on, and wakes the threads that wait for it. `EINVAL` before
    /// Linux 6.6.
    pub fn poison(self, page: u64) -> Result<(), Errno> {
        let length = crate::PAGE_SIZE as u64;
        ioctl(self.0, IOC_POISON, &mut [page, length, 0, 0])
    }

    /// Moves present pages to missing ones of the same process, without waking any thread.
    /// Works only from inside that process. `target` is empty before, or its contents are not needed.
    ///
    /// After an error with `done` 0, nothing was moved. The kernel's own result does not guarantee that.
    /// Since `UFFDIO_MOVE` batches neighbours (Linux 6.18), it retries pages whose PTEs changed under it (the
    /// accessed bit, or a write that was allowed), moves them, loses count, and finds the target of the first
    /// one taken: `EEXIST`, at once or, if pages before them were moved, at the next try; `EAGAIN` if the
    /// mappings change by then. A caller that believed the error would lose those pages, and their next fault
    /// would map zeros. So this looks with mincore which pages arrived.
    ///
    /// After `EAGAIN` and `ENOENT` mincore misses pages that the host has swapped out by then: a caller that
    /// can see the page table must ask it, too.
    pub fn move_pages(self, target: u64, source: u64, length: u64) -> Result<(), Partial> {
        let refused = match self.try_move(target, source, length) {
            Err(refused) if refused.done == 0 => refused,
            moved => return moved,
        };
        let bytes = arrived(target, source, length, refused.errno);
        if bytes > 0 || refused.errno != Errno::EEXIST {
            return told(bytes, length, refused);
        }
        // Something is at the source. Whether it is what was there before is not sure: mappings may have
        // begun to change since the answer, and the page may be one that came after. Only then the kernel returns
        // `EAGAIN`, and else nothing had changed when it was looked.
        let again = match self.try_move(target, source, length) {
            Err(again) if again.done == 0 => again,
            moved => return moved,
        };
        if !is_unseen(again.errno) {
            return Err(again);
        }
        let bytes = arrived(target, source, length, again.errno);
        told(bytes, length, again)
    }

    fn try_move(self, target: u64, source: u64, length: u64) -> Result<(), Partial> {
        let mut argument = [target, source, length, MODE_DONTWAKE, 0];
        let result = ioctl(self.0, IOC_MOVE, &mut argument);
        outcome(result, argument[4], length)
    }

    /// Reads messages; `Ok(0)` when there are none. Never waits, whatever the program that made the
    /// userfaultfd has done to it since: whether reads wait is a flag that its descriptor shares.
    pub fn read_now(self, messages: &mut [Message]) -> Result<usize, Errno> {
        use core::sync::atomic::{AtomicBool, Ordering};
        /// Before Linux 6.10 a userfaultfd knows no reading without waiting but by its flag.
        static UNKNOWN: AtomicBool = AtomicBool::new(false);
        if UNKNOWN.load(Ordering::Relaxed) {
            return self.read(messages);
        }
        match self.try_read_now(messages) {
            Err(Errno::EOPNOTSUPP) => {
                UNKNOWN.store(true, Ordering::Relaxed);
                self.read(messages)
            }
            result => result,
        }
    }

    /// [`Uffd::read_now`] where the kernel knows how; else `EOPNOTSUPP`.
    pub(crate) fn try_read_now(self, messages: &mut [Message]) -> Result<usize, Errno> {
        const RWF_NOWAIT: usize = 8;
        let vector = [
            messages.as_mut_ptr() as usize,
            core::mem::size_of_val(messages),
        ];
        let at_no_offset = usize::MAX;
        // SAFETY: the kernel writes whole messages, plain integers, into the slice.
        let result = unsafe {
            syscall(
                nr::PREADV2,
                [
                    self.0 as usize,
                    vector.as_ptr() as usize,
                    1,
                    at_no_offset,
                    at_no_offset,
                    RWF_NOWAIT,
                ],
            )
        };
        Self::messages_read(Errno::result(result))
    }

    fn messages_read(result: Result<usize, Errno>) -> Result<usize, Errno> {
        match result {
            Ok(read) => Ok(read / core::mem::size_of::<Message>()),
            Err(Errno::EAGAIN) => Ok(0),
            Err(errno) => Err(errno),
        }
    }

    /// Reads messages; `Ok(0)` when there are none and reading does not wait.
    pub fn read(self, messages: &mut [Message]) -> Result<usize, Errno> {
        let bytes = core::mem::size_of_val(messages);
        // SAFETY: the kernel writes whole messages, plain integers, into the slice.
        let result = unsafe {
            syscall(
                nr::READ,
                [
                    self.0 as usize,
                    messages.as_mut_ptr() as usize,
                    bytes,
                    0,
                    0,
                    0,
                ],
            )
        };
        Self::messages_read(Errno::result(result))
    }
}

/// Whether a descriptor is a userfaultfd: on a descriptor of another kind the same requests could mean anything,
/// and block.
#[cfg(feature = "std")]
pub fn is_userfaultfd(descriptor: std::os::fd::BorrowedFd<'_>) -> bool {
    use std::os::fd::AsRawFd;
    let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    // The kernel's own name for it. Those of files begin with a slash.
    rustix::fs::readlink(link, Vec::new())
        .is_ok_and(|name| name.as_bytes() == b"anon_inode:[userfaultfd]")
}

#[cfg(all(test, feature = "std"))]
#[path = "uffd_abi.rs"]
mod abi;
