//! What a thread needs to serve a fault or to reclaim: buffers, and a stack. All of it is made
//! beforehand, as a signal handler has little stack and no business making anything.

use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot};
use memfold_sys::fork::Owner;
use memfold_sys::memory::Mapping;
use memfold_sys::reserve::{Reservation, dont_fork};
use std::cell::UnsafeCell;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// How many threads may be at work at a time. More wait.
pub const WORKERS: usize = 64;
/// The most pages brought in from the pool at once.
pub const WINDOW: usize = 32;
/// The most pages moved out at once.
pub const BATCH: usize = 64;

/// LZ4 takes 16 KiB, and code without optimisation several times what it takes with.
const STACK: usize = 512 << 10;

/// A page claimed to be brought in.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    pub page: usize,
    pub slot: Slot,
}

/// Buffers of one thread at work.
pub struct Worker {
    /// Which it is; it has the part of each engine's stage with this number.
    pub number: usize,
    pub scratch: Scratch,
    pub claims: Vec<Claim>,
    pub victims: Vec<usize>,
    pub slots: Vec<Slot>,
    buffer: Mapping,
    stack: Reservation,
}

impl Worker {
    fn new(number: usize) -> io::Result<Worker> {
        let stack = Reservation::new(STACK, PAGE_SIZE)?;
        // The lowest page stays out of reach: an overflow ends the process.
        stack.make_anonymous(PAGE_SIZE)?;
        let buffer = Mapping::anonymous(WINDOW * PAGE_SIZE)?;
        dont_fork(&buffer)?;
        Ok(Worker {
            number,
            scratch: Scratch::new(),
            claims: Vec::with_capacity(WINDOW),
            victims: Vec::with_capacity(BATCH),
            slots: Vec::with_capacity(WINDOW),
            buffer,
            stack,
        })
    }

    /// The end of the worker's stack.
    pub fn stack_top(&self) -> *mut u8 {
        // SAFETY: the end of the reservation, which is aligned to pages.
        unsafe { self.stack.start().as_ptr().add(STACK) }
    }

    /// The page buffer beside the codec's state.
    pub fn buffer_and_scratch(&mut self) -> (&mut [Page], &mut Scratch) {
        // SAFETY: the mapping is the worker's own and as long; any bytes make a page.
        let pages =
            unsafe { std::slice::from_raw_parts_mut(self.buffer.start().as_ptr().cast(), WINDOW) };
        (pages, &mut self.scratch)
    }

    /// The page buffer.
    pub fn buffer(&self) -> &[Page] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.buffer.start().as_ptr().cast(), WINDOW) }
    }
}

struct Desk {
    taken: AtomicBool,
    worker: UnsafeCell<Worker>,
}

// SAFETY: the worker is used only by who set `taken`.
unsafe impl Sync for Desk {}

/// The workers of one process. A forked child inherits neither the buffers nor the stacks.
struct Desks {
    owner: Owner,
    desks: Vec<Desk>,
}

/// Null or leaked: whoever took a worker may hold it as long as it likes.
static DESKS: AtomicPtr<Desks> = AtomicPtr::new(ptr::null_mut());

fn desks() -> Option<&'static Desks> {
    // SAFETY: null, or leaked by `prepare`.
    unsafe { DESKS.load(Ordering::Acquire).as_ref() }
}

/// Makes the workers, once for each process.
pub fn prepare() -> io::Result<()> {
    let before = DESKS.load(Ordering::Acquire);
    if desks().is_some_and(|desks| desks.owner.is_here()) {
        return Ok(());
    }
    let desks = (0..WORKERS)
        .map(|number| {
            Ok(Desk {
                taken: AtomicBool::new(false),
                worker: UnsafeCell::new(Worker::new(number)?),
            })
        })
        .collect::<io::Result<Vec<_>>>()?;
    let owner = Owner::this();
    let fresh = Box::into_raw(Box::new(Desks { owner, desks }));
    let set = DESKS.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire);
    if set.is_err() {
        // Somebody else was first; theirs are as good.
        // SAFETY: made above, and shown to nobody.
        drop(unsafe { Box::from_raw(fresh) });
    }
    Ok(())
}

/// A worker that is the caller's until this is dropped. All signals of the thread must be blocked
/// meanwhile.
pub struct AtWork {
    desk: &'static Desk,
}

/// Takes a worker; waits for one if all are at work.
///
/// # Panics
/// If there are none: [`prepare`] was not called.
pub fn take() -> AtWork {
    let Desks { desks, .. } = desks().expect("workers are prepared by every engine");
    // The one used last on this CPU, with its buffers in the CPU's cache.
    let mut index = memfold_sys::thread::current_cpu() % WORKERS;
    let mut looks = 0;
    loop {
        let desk = &desks[index];
        if !desk.taken.load(Ordering::Relaxed) && !desk.taken.swap(true, Ordering::Acquire) {
            return AtWork { desk };
        }
        index = (index + 1) % WORKERS;
        looks += 1;
        if looks % WORKERS == 0 {
            super::fault::pause((looks / WORKERS) as u32);
        }
    }
}

impl Deref for AtWork {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        // SAFETY: `taken` is ours.
        unsafe { &*self.desk.worker.get() }
    }
}

impl DerefMut for AtWork {
    fn deref_mut(&mut self) -> &mut Worker {
        // SAFETY: as above.
        unsafe { &mut *self.desk.worker.get() }
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.desk.taken.store(false, Ordering::Release);
    }
}
