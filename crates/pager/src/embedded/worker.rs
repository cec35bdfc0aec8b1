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
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

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
    /// Threads that wait for this worker: no other takes it meanwhile. A thread that works without end takes the same one
    /// again as soon as it has given it back.
    wanted: AtomicU32,
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
            let mut worker = slot.take_this();
            if !worker.scratch.prepare_loads() {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
        }
        self.loads.store(true, Ordering::Release);
        Ok(())
    }

    fn new() -> io::Result<WorkerPool> {
        let slot = |number| {
            Ok(WorkerSlot {
                taken: AtomicBool::new(false),
                wanted: AtomicU32::new(0),
                worker: UnsafeCell::new(Worker::new(number)?),
            })
        };
        Ok(WorkerPool {
            owner: Owner::this(),
            loads: AtomicBool::new(false),
            slots: (0..WORKERS).map(slot).collect::<io::Result<_>>()?,
        })
    }

    fn take(&'static self) -> WorkerGuard {
        // The worker last used on this CPU, whose buffers are in the CPU's cache.
        let mut index = memfold_sys::thread::current_cpu() % WORKERS;
        let mut looks = 0;
        loop {
            let slot = &self.slots[index];
            let is_free = !slot.taken.load(Ordering::Relaxed);
            if is_free && slot.wanted.load(Ordering::Relaxed) == 0 && slot.try_take() {
                return WorkerGuard { slot };
            }
            index = (index + 1) % WORKERS;
            looks += 1;
            if looks % WORKERS == 0 {
                pause((looks / WORKERS) as u32);
            }
        }
    }
}

impl WorkerSlot {
    fn try_take(&self) -> bool {
        !self.taken.swap(true, Ordering::Acquire)
    }

    /// Waits for this worker.
    fn take_this(&'static self) -> WorkerGuard {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        for attempt in 0.. {
            if self.try_take() {
                break;
            }
            pause(attempt);
        }
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        WorkerGuard { slot: self }
    }
}

fn make() -> io::Result<()> {
    let before = POOL.load(Ordering::Acquire);
    if pool().is_some_and(|pool| pool.owner.is_here()) {
        return Ok(());
    }
    let fresh = WorkerPool::new()?;
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
    let pool = pool().expect("workers are prepared by every engine");
    pool.take()
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

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::thread::{allowed_cpus, nap, pin_to};
    use std::time::Duration;

    #[test]
    fn a_worker_that_is_always_in_use_is_prepared_for_loads() {
        const MOST: u32 = 200;
        let pool: &WorkerPool = Box::leak(Box::new(WorkerPool::new().unwrap()));
        let done = AtomicBool::new(false);
        let taken = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // So that it takes the same worker each time.
                let _ = pin_to(allowed_cpus()[0]);
                while !done.load(Ordering::Relaxed) && taken.load(Ordering::Relaxed) < MOST {
                    let _worker = pool.take();
                    taken.fetch_add(1, Ordering::Relaxed);
                    nap(Duration::from_millis(10));
                }
            });
            while taken.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            pool.prepare_loads().unwrap();
            done.store(true, Ordering::Relaxed);
        });
        assert!(taken.load(Ordering::Relaxed) < MOST, "it waited to the end");
    }
}
