//! The supervisor's threads: placement, and the robust futexes that outlive them.

use crate::futex::WAITERS;
use crate::sync::lock;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The calling thread's TID.
pub fn current_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// CPU time that the calling thread has taken.
pub fn cpu_time() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// What `work` returns, and the CPU time that the calling thread took for it.
pub fn cpu_time_of<R>(work: impl FnOnce() -> R) -> (R, Duration) {
    let began = cpu_time();
    let result = work();
    (result, cpu_time().saturating_sub(began))
}

/// CPU time that all threads of this process have taken.
pub fn cpu_time_of_all() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a live structure that the kernel fills. It knows these clocks, so the call does not fail.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A number that no other living thread of the process has, found without a system call.
pub fn fast_number() -> usize {
    // SAFETY: takes nothing. The C library gives the address of the thread's own record.
    let record = unsafe { libc::pthread_self() } as usize;
    // Records lie whole stacks apart.
    record >> 12 ^ record >> 23
}

/// The CPU that the calling thread runs on, as of now.
pub fn current_cpu() -> usize {
    // SAFETY: takes nothing.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// The CPUs that the calling thread may run on; CPU 0 if the kernel does not say.
pub fn allowed_cpus() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect(),
        Err(_) => vec![0],
    }
}

/// Gives the calling thread a descriptor table of its own, with nothing in it but this descriptor: what
/// it is of stays open as long as the thread lives, whatever the rest of the process closes.
pub fn keep_only(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let kept = descriptor.as_raw_fd() as u32;
    let close = |first: u32, last: u32, flags: u32| {
        // SAFETY: numbers only. The first call leaves the others' table for one of this thread's own,
        // so only this thread's descriptors are closed.
        let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    close(kept + 1, u32::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    match kept.checked_sub(1) {
        Some(last) => close(0, last, 0),
        None => Ok(()),
    }
}

/// Pins the calling thread to one CPU.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    run_on(&[cpu])
}

/// Lets the calling thread run on these CPUs and no others.
pub fn run_on(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// Sets the calling thread's nice value (best effort: lowering it needs a privilege).
pub fn set_nice(nice: i32) {
    let _ = rustix::process::setpriority_process(None, nice);
}

/// How a thread stands among the others of its CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It gets a tenth of the CPU time of another thread, and any thread that wakes up preempts it. Not
    /// less, as it may hold a lock that another waits for.
    Behind,
    /// As the others, with a short time slice and therefore an early deadline.
    Equal,
    /// Before ordinary threads.
    Before,
    /// Before those, too: for a thread that must look in time at what many others do at once.
    First,
}

impl Standing {
    const fn nice(self) -> i32 {
        match self {
            Self::Behind => 10,
            Self::Equal => 0,
            Self::Before => -10,
            Self::First => -20,
        }
    }

    const fn slice(self) -> Duration {
        match self {
            Self::Behind => LONG_SLICE,
            Self::Equal | Self::Before | Self::First => SHORT_SLICE,
        }
    }
}

/// The shortest time slice that the kernel grants (EEVDF), and nearly the longest.
const SHORT_SLICE: Duration = Duration::from_micros(100);
const LONG_SLICE: Duration = Duration::from_millis(20);

/// To the scheduler's calls: the calling thread.
const CALLER: u32 = 0;

/// Sets the nice value and the time slice of a thread of this process. Returns whether that succeeded: a
/// lower nice value needs a privilege. (Kernels before 6.12 ignore the slice. In later ones a waking thread
/// preempts one with a longer slice at once, another only at the next tick.)
pub fn set_standing(thread: u32, standing: Standing) -> bool {
    let is_set = set_schedule(thread, standing.nice(), standing.slice());
    // `RLIMIT_NICE` may allow the next best.
    is_set || standing == Standing::First && set_standing(thread, Standing::Before)
}

/// Puts the calling thread behind the others and yields to the thread it preempted: the kernel by itself
/// reschedules only at a wake-up or at the next tick.
pub fn step_behind() {
    // A thread that yields forfeits the rest of its slice, so the slice is short until then.
    set_schedule(CALLER, Standing::Behind.nice(), SHORT_SLICE);
    std::thread::yield_now();
    set_standing(CALLER, Standing::Behind);
}

fn set_schedule(thread: u32, nice: i32, slice: Duration) -> bool {
    schedule(thread, nice, slice, 0)
}

fn schedule(thread: u32, nice: i32, slice: Duration, flags: u64) -> bool {
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: libc::SCHED_OTHER as u32,
        flags,
        nice,
        priority: 0,
        runtime: slice.as_nanos() as u64,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the structure is live and as long as its `size`.
    unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) == 0 }
}

/// The calling thread's nice value; 0 if a seccomp filter hides it.
pub fn nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or(0)
}

/// Has another process's thread run as an ordinary one, at its nice value, on the CPUs of the calling thread, if a thread of
/// another policy made it: where that is busy, on CPUs of its own, this one would get no time. Best effort: other users'
/// threads take `CAP_SYS_NICE`, and a cpuset may have none of these CPUs.
pub fn make_ordinary(thread: i32) {
    let no_priority = 0i32;
    let ordinary = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the structure is a number for the kernel, and live. (In musl the functions always fail.)
    unsafe {
        let policy = libc::syscall(libc::SYS_sched_getscheduler, thread);
        if policy < 0 || policy as i32 & !libc::SCHED_RESET_ON_FORK == libc::SCHED_OTHER {
            return;
        }
        let priority = &raw const no_priority;
        libc::syscall(libc::SYS_sched_setscheduler, thread, ordinary, priority);
    }
    let cpus = sched_getaffinity(None);
    let _ = cpus.and_then(|cpus| sched_setaffinity(Pid::from_raw(thread), &cpus));
}

/// Sets the nice value of another process's thread (best effort, as above). What it forks does not have it.
pub fn set_nice_of(thread: i32, nice: i32) {
    const RESET_ON_FORK: u64 = 1;
    schedule(thread as u32, nice, Duration::ZERO, RESET_ON_FORK);
}

/// Sets the calling thread's timer slack: by this much the kernel may prolong its sleeps (0: the default).
pub fn set_timer_slack(nanoseconds: u64) {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(nanoseconds));
}

/// Sleeps for about `time`. For signal handlers, too: unlike the C library's, this sleep is no point
/// where a thread is cancelled (`pthread_cancel`).
pub fn nap(time: Duration) {
    // It ends by the time, or by a signal.
    let _ = crate::futex::wait(&AtomicU32::new(0), 0, Some(time.as_nanos() as u64));
}

/// One futex that the kernel marks with `OWNER_DIED`, waking its waiter, when the thread of its
/// [`RobustList`] dies for whatever reason.
#[derive(Debug, Clone, Copy)]
pub struct RobustEntry {
    /// The futex; must read `thread | WAITERS`.
    pub futex: *const AtomicU32,
    /// The link beside it, for this list's use.
    pub link: *const AtomicU64,
}

// SAFETY: the pointers are to atomics in shared memory, kept mapped by the caller of `add`.
unsafe impl Send for RobustEntry {}

#[repr(C)]
#[derive(Debug)]
struct RobustHead {
    next: AtomicU64,
    offset: i64,
    pending: u64,
}

/// The kernel looks at no more entries than this when a thread dies.
pub const ROBUST_LIMIT: usize = 2000;

/// The robust futexes of one thread, which must live as long as they are to be watched.
#[derive(Debug)]
pub struct RobustList {
    head: Box<RobustHead>,
    thread: u32,
    entries: Mutex<Vec<RobustEntry>>,
}

impl RobustList {
    /// Makes the calling thread the owner. It must hold no robust mutex of the C library's, and
    /// must live as long as the list (the supervisor parks it).
    ///
    /// `offset` is the distance in bytes from an entry's link to its futex.
    pub fn for_current_thread(offset: i64) -> io::Result<RobustList> {
        let head = Box::new(RobustHead {
            next: AtomicU64::new(0),
            offset,
            pending: 0,
        });
        let address = &raw const *head as u64;
        head.next.store(address, Ordering::Relaxed);
        // SAFETY: the head is live and, by the contract above, stays so until the thread ends;
        // its layout is the kernel's `robust_list_head`.
        let result =
            unsafe { libc::syscall(libc::SYS_set_robust_list, address, size_of::<RobustHead>()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(RobustList {
            head,
            thread: current_id(),
            entries: Mutex::new(Vec::new()),
        })
    }

    fn head_address(&self) -> u64 {
        &raw const *self.head as u64
    }

    /// Watches a futex. `false` if the list is full.
    ///
    /// # Safety
    /// Both pointers must stay valid until [`RobustList::remove`].
    pub unsafe fn add(&self, entry: RobustEntry) -> bool {
        let mut entries = lock(&self.entries);
        if entries.len() >= ROBUST_LIMIT {
            return false;
        }
        // SAFETY: the caller's promise.
        let (futex, link) = unsafe { (&*entry.futex, &*entry.link) };
        futex.store(self.thread | WAITERS, Ordering::Release);
        // At every instant the list is whole: the kernel may walk it at any.
        link.store(self.head.next.load(Ordering::Relaxed), Ordering::Release);
        self.head.next.store(entry.link as u64, Ordering::Release);
        entries.push(entry);
        true
    }

    /// Stops watching a futex; what it points to may go afterwards.
    pub fn remove(&self, link: *const AtomicU64) {
        let mut entries = lock(&self.entries);
        let Some(index) = entries
            .iter()
            .position(|entry| std::ptr::eq(entry.link, link))
        else {
            return;
        };
        // The newest entry comes first in the list: the successor is the one added before.
        let next = match index.checked_sub(1) {
            Some(before) => entries[before].link as u64,
            None => self.head_address(),
        };
        match entries.get(index + 1) {
            // SAFETY: entries are valid until removed.
            Some(after) => unsafe { (*after.link).store(next, Ordering::Release) },
            None => self.head.next.store(next, Ordering::Release),
        }
        entries.remove(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux_raw_sys::general::robust_list_head;

    #[test]
    fn a_robust_list_has_the_kernels_layout() {
        crate::abi::same_layout!(RobustHead, robust_list_head, {
            next => list, offset => futex_offset, pending => list_op_pending,
        });
    }
}
