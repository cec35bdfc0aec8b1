//! What a thread needs to serve a fault or to reclaim: buffers, and a stack. All of it is allocated
//! beforehand, as a signal handler has little stack and must not allocate.

use super::backoff::pause;
use super::dues::Samples;
use super::limits::{BATCH, WINDOW, WORKERS};
use crate::page_state::StageIndex;
use crate::replacement::Shadow;
use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot};
use memfold_sys::fork::Owner;
use memfold_sys::page_buffer::PageBuffer;
use memfold_sys::reserve::{Reservation, dont_fork};
use std::cell::UnsafeCell;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Bytes of a worker's stack. LZ4 takes 16 KiB of it; unoptimised builds take several times more.
const STACK: usize = 512 << 10;

/// A page claimed to be brought in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    pub page: usize,
    pub slot: Slot,
    /// What is remembered of its eviction.
    pub shadow: Shadow,
}

/// Buffers and stack of one thread that serves a fault or reclaims.
pub(super) struct Worker {
    /// The worker's number, which is that of its part of each engine's stage.
    pub number: usize,
    pub scratch: Scratch,
    pub claims: Vec<Claim>,
    pub victims: Vec<usize>,
    /// Which of the victims are samples.
    pub samples: Samples,
    pub slots: Vec<Slot>,
    buffer: PageBuffer,
    stack: Reservation,
}

impl Worker {
    fn new(number: usize) -> io::Result<Worker> {
        let stack = Reservation::new(STACK, PAGE_SIZE)?;
        // The lowest page is a guard page: an overflow kills the process.
        stack.make_anonymous(PAGE_SIZE)?;
        let buffer = PageBuffer::new(WINDOW)?;
        dont_fork(buffer.mapping())?;
        Ok(Worker {
            number,
            scratch: Scratch::new(),
            claims: Vec::with_capacity(WINDOW),
            victims: Vec::with_capacity(BATCH),
            samples: Samples::default(),
            slots: Vec::with_capacity(WINDOW),
            buffer,
            stack,
        })
    }

    /// Forgets the victims of the last batch.
    pub(super) fn clear_victims(&mut self) {
        self.victims.clear();
        self.samples = Samples::default();
    }

    /// The place in the stage of a victim.
    pub(super) fn place(&self, victim: usize) -> StageIndex {
        StageIndex((self.number * BATCH + victim) as u32)
    }

    /// The end of the worker's stack.
    pub(super) fn stack_top(&self) -> *mut u8 {
        // SAFETY: the end of the reservation, which is aligned to pages.
        unsafe { self.stack.start().as_ptr().add(STACK) }
    }

    /// The page buffer beside the codec's state.
    pub(super) fn buffer_and_scratch(&mut self) -> (&mut [Page], &mut Scratch) {
        (&mut self.buffer, &mut self.scratch)
    }

    /// The page buffer.
    pub(super) fn buffer(&self) -> &[Page] {
        &self.buffer
    }
}

struct WorkerSlot {
    taken: AtomicBool,
    worker: UnsafeCell<Worker>,
}

// SAFETY: only the thread that set `taken` uses the worker.
unsafe impl Sync for WorkerSlot {}

/// The workers of one process. A forked child inherits neither the buffers nor the stacks.
struct WorkerPool {
    owner: Owner,
    /// Whether all can load whatever an engine may store.
    loads: AtomicBool,
    slots: Vec<WorkerSlot>,
}

/// Null or leaked: workers are in use at any time.
static POOL: AtomicPtr<WorkerPool> = AtomicPtr::new(ptr::null_mut());

fn pool() -> Option<&'static WorkerPool> {
    // SAFETY: null, or leaked by `make`.
    unsafe { POOL.load(Ordering::Acquire).as_ref() }
}

/// Makes the workers, once for each process. With `loads` they can decompress Zstandard without allocating: a fault that
/// cannot ends the program. To be called with all signals blocked.
pub(super) fn prepare(loads: bool) -> io::Result<()> {
    make()?;
    match pool() {
        Some(pool) if loads => pool.prepare_loads(),
        _ => Ok(()),
    }
}

impl WorkerPool {
    fn prepare_loads(&'static self) -> io::Result<()> {
        if self.loads.load(Ordering::Acquire) {
            return Ok(());
        }
        for slot in &self.slots {
            for attempt in 0.. {
                if !slot.taken.swap(true, Ordering::Acquire) {
                    break;
                }
                pause(attempt);
            }
            let mut worker = WorkerGuard { slot };
            if !worker.scratch.prepare_loads() {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
        }
        self.loads.store(true, Ordering::Release);
        Ok(())
    }
}

fn make() -> io::Result<()> {
    let before = POOL.load(Ordering::Acquire);
    if pool().is_some_and(|pool| pool.owner.is_here()) {
        return Ok(());
    }
    let slots = (0..WORKERS)
        .map(|number| {
            Ok(WorkerSlot {
                taken: AtomicBool::new(false),
                worker: UnsafeCell::new(Worker::new(number)?),
            })
        })
        .collect::<io::Result<Vec<_>>>()?;
    let owner = Owner::this();
    let loads = AtomicBool::new(false);
    let fresh = WorkerPool {
        owner,
        loads,
        slots,
    };
    let fresh = Box::into_raw(Box::new(fresh));
    let set = POOL.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire);
    if set.is_err() {
        // Another thread was first.
        // SAFETY: made above, and not published.
        drop(unsafe { Box::from_raw(fresh) });
    }
    Ok(())
}

/// A worker that the calling thread holds until this is dropped, with all signals blocked.
pub(super) struct WorkerGuard {
    slot: &'static WorkerSlot,
}

/// Takes a worker; waits for one if all are taken.
///
/// # Panics
/// If there are none: [`prepare`] was not called.
pub(super) fn take() -> WorkerGuard {
    let WorkerPool { slots, .. } = pool().expect("workers are prepared by every engine");
    // The worker last used on this CPU, whose buffers are in the CPU's cache.
    let mut index = memfold_sys::thread::current_cpu() % WORKERS;
    let mut looks = 0;
    loop {
        let slot = &slots[index];
        if !slot.taken.load(Ordering::Relaxed) && !slot.taken.swap(true, Ordering::Acquire) {
            return WorkerGuard { slot };
        }
        index = (index + 1) % WORKERS;
        looks += 1;
        if looks % WORKERS == 0 {
            pause((looks / WORKERS) as u32);
        }
    }
}

impl Deref for WorkerGuard {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        // SAFETY: this guard set `taken`.
        unsafe { &*self.slot.worker.get() }
    }
}

impl DerefMut for WorkerGuard {
    fn deref_mut(&mut self) -> &mut Worker {
        // SAFETY: as above.
        unsafe { &mut *self.slot.worker.get() }
    }
}

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.slot.taken.store(false, Ordering::Release);
    }
}
