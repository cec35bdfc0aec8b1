//! The program's `ioctl`: a range that it registers with a userfaultfd of its own gets unregistered
//! from memfold's first.
//!
//! The kernel refuses (`EBUSY`) to register what is registered with another userfaultfd. The library
//! then asks the supervisor for the range, by way of the channel, waits until it has let go of it, and
//! tries again. All other calls go on to the next `ioctl` behind this library, which is the C
//! library's unless something else is preloaded.

use crate::state::{channel, has_left};
use crate::system;
use core::sync::atomic::{AtomicU32, Ordering};
use memfold_sys::Errno;
use memfold_sys::channel::{Channel, UnregisterRequest};
use memfold_sys::futex::{self, OWNER_DIED};
use memfold_sys::raw::{nr, syscall};
use memfold_sys::uffd::IOC_REGISTER;

/// How long one wait lasts, in nanoseconds.
const NAP_NS: u64 = 100_000_000;
/// Waits without any progress after which the kernel's refusal stands.
const NAPS_MOST: u32 = 100;
/// Another mapping may have come to be managed between the answer and the next try.
const TRIES: u32 = 3;

/// A 32-bit request, whatever the C library declares it as, and its argument.
type Ioctl = unsafe extern "C" fn(i32, usize, ...) -> i32;

/// Stands in front of the C library's, which is variadic: on x86-64 and on aarch64 three arguments of such a
/// call are passed as any others.
///
/// # Safety
/// As of `ioctl`.
#[cfg_attr(feature = "standalone", unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: i32, request: usize, argument: usize) -> i32 {
    if request as u32 != IOC_REGISTER as u32 {
        // SAFETY: the caller's promise.
        return unsafe { forward(fd, request, argument) };
    }
    // SAFETY: the caller's promise.
    unsafe { register(fd, request, argument) }
}

/// # Safety
/// As of `ioctl`.
unsafe fn forward(fd: i32, request: usize, argument: usize) -> i32 {
    if let Some(next) = next_ioctl() {
        // SAFETY: the next function of that name behind this library; the caller's promise.
        return unsafe { next(fd, request, argument) };
    }
    // SAFETY: the caller's promise.
    let result = unsafe { syscall(nr::IOCTL, [fd as usize, request, argument, 0, 0, 0]) };
    match Errno::result(result) {
        Ok(result) => result as i32,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// # Safety
/// As of `ioctl`, with `UFFDIO_REGISTER`.
unsafe fn register(fd: i32, request: usize, argument: usize) -> i32 {
    let errno_before = errno();
    // SAFETY: the caller's promise.
    let mut result = unsafe { forward(fd, request, argument) };
    let is_refused = |result| result == -1 && errno() == Some(Errno::EBUSY);
    let held = channel().filter(|_| !has_left());
    let (true, Some(channel)) = (is_refused(result), held) else {
        return result;
    };
    // SAFETY: the kernel has read the structure, which begins with the range, or would not have come to
    // refuse it.
    let [start, length] = unsafe { core::ptr::read_unaligned(argument as *const [u64; 2]) };
    // A handler that leaves by a jump would leave the lock taken.
    let mask = system::block_signals();
    if let Some(mut asking) = Asking::begin(channel) {
        for _ in 0..TRIES {
            if !asking.ask(start, length) {
                break;
            }
            // SAFETY: as before.
            result = unsafe { forward(fd, request, argument) };
            if !is_refused(result) {
                break;
            }
        }
    }
    system::restore_signals(mask);
    if let (0, Some(before)) = (result, errno_before) {
        set_errno(before);
    }
    result
}

/// The only thread of the program that asks just now.
struct Asking {
    channel: &'static Channel,
    number: u32,
}

impl Asking {
    fn begin(channel: &'static Channel) -> Option<Asking> {
        let request = &channel.unregister;
        acquire(&request.lock).then(|| Asking {
            channel,
            number: request.asked.load(Ordering::Relaxed),
        })
    }

    /// Asks for a range and waits for the answer; `false` if there is none.
    fn ask(&mut self, start: u64, length: u64) -> bool {
        let request = &self.channel.unregister;
        request.start.store(start, Ordering::Relaxed);
        request.length.store(length, Ordering::Relaxed);
        self.number = self.number.wrapping_add(1);
        // Release: the supervisor reads the range after the number.
        request.asked.store(self.number, Ordering::Release);
        self.wait_for_answer(request)
    }

    fn wait_for_answer(&self, request: &UnregisterRequest) -> bool {
        let mut progress = 0;
        let mut naps = 0;
        loop {
            let answered = request.answered.load(Ordering::Acquire);
            if answered == self.number {
                return true;
            }
            if naps > NAPS_MOST || self.channel.alive.load(Ordering::Relaxed) & OWNER_DIED != 0 {
                return false;
            }
            let _ = futex::wait(&request.answered, answered, Some(NAP_NS));
            let now = request.progress.load(Ordering::Relaxed);
            naps = if now == progress { naps + 1 } else { 0 };
            progress = now;
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let request = &self.channel.unregister;
        request.over.store(self.number, Ordering::Release);
        if request.lock.swap(0, Ordering::Release) == 2 {
            futex::wake(&request.lock, 1);
        }
    }
}

fn acquire(lock: &AtomicU32) -> bool {
    if lock
        .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
        .is_ok()
    {
        return true;
    }
    for _ in 0..NAPS_MOST {
        if lock.swap(2, Ordering::Acquire) == 0 {
            return true;
        }
        let _ = futex::wait(lock, 2, Some(NAP_NS));
    }
    false
}

#[cfg(feature = "standalone")]
mod c_library {
    use super::Ioctl;
    use core::ffi::CStr;
    use core::sync::atomic::{AtomicUsize, Ordering};
    use memfold_sys::Errno;

    core::arch::global_asm!(
        ".weak dlsym",
        ".weak __errno_location",
        ".pushsection .data.rel.ro.memfold, \"aw\"",
        ".balign 8",
        "memfold_dlsym: .quad dlsym",
        "memfold_errno_location: .quad __errno_location",
        ".popsection",
    );

    type FindSymbol = unsafe extern "C" fn(usize, *const core::ffi::c_char) -> usize;
    type ErrnoLocation = unsafe extern "C" fn() -> *mut i32;

    unsafe extern "C" {
        #[link_name = "memfold_dlsym"]
        static FIND_SYMBOL: Option<FindSymbol>;
        #[link_name = "memfold_errno_location"]
        static ERRNO_LOCATION: Option<ErrnoLocation>;
    }

    /// The address of the next `ioctl`; 0 if there is none.
    static NEXT: AtomicUsize = AtomicUsize::new(0);

    /// Found once, as `ioctl` may be called from a signal's handler, and the search takes locks.
    extern "C" fn find() {
        const NAME: &CStr = c"ioctl";
        const RTLD_NEXT: usize = usize::MAX;
        // SAFETY: null or the C library's function of that signature, as its symbol is weak.
        unsafe {
            if let Some(find) = core::ptr::read_volatile(&raw const FIND_SYMBOL) {
                NEXT.store(find(RTLD_NEXT, NAME.as_ptr()), Ordering::Relaxed);
            }
        }
    }

    #[used]
    #[unsafe(link_section = ".init_array")]
    static FIND: extern "C" fn() = find;

    pub fn next_ioctl() -> Option<Ioctl> {
        let address = NEXT.load(Ordering::Relaxed) as *const ();
        // SAFETY: null, which is `None`, or a function of that name, which has that signature.
        unsafe { core::mem::transmute(address) }
    }

    fn errno_location() -> Option<*mut i32> {
        // SAFETY: as in `find`.
        unsafe { core::ptr::read_volatile(&raw const ERRNO_LOCATION).map(|location| location()) }
    }

    pub fn errno() -> Option<Errno> {
        // SAFETY: the calling thread's own.
        errno_location().map(|location| Errno(unsafe { location.read() }))
    }

    pub fn set_errno(errno: Errno) {
        if let Some(location) = errno_location() {
            // SAFETY: the calling thread's own.
            unsafe { location.write(errno.0) };
        }
    }
}

/// Built as an ordinary library there is no C library to ask.
#[cfg(not(feature = "standalone"))]
mod c_library {
    use super::Ioctl;
    use memfold_sys::Errno;

    pub fn next_ioctl() -> Option<Ioctl> {
        None
    }

    pub fn errno() -> Option<Errno> {
        None
    }

    pub fn set_errno(_: Errno) {}
}

pub use c_library::set_errno;
use c_library::{errno, next_ioctl};
