//! Signals that faults raise: handlers that take their place beside those of the program, and a
//! stack of one's own to serve on.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::{call_on_stack, is_fetch, stack_pointer};
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::{call_on_stack, is_fetch, stack_pointer};

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the kernel passes to a handler.
pub type Info = libc::siginfo_t;
/// A handler as the kernel calls it.
pub type Handler = extern "C" fn(i32, *mut Info, *mut libc::c_void);

/// What was installed before, to be called for what is not ours.
#[derive(Debug)]
pub struct Previous {
    action: libc::sigaction,
    /// Whether a handler that the kernel would have called once (`SA_RESETHAND`) was.
    spent: AtomicBool,
}

// SAFETY: plain numbers and the address of a function.
unsafe impl Send for Previous {}
// SAFETY: as above.
unsafe impl Sync for Previous {}

/// The signal by which the C library changes the user of all threads: `SIGSETXID` of glibc, `SIGSYNCCALL` of musl. It
/// waits for each thread, and does no harm.
const SET_USER: u32 = if cfg!(target_env = "musl") { 34 } else { 33 };

/// Every signal but [`SET_USER`], as the kernel knows sets. The C library's functions leave out the signal by which a thread
/// is cancelled (32 of glibc, 33 of musl), too: one that may be cancelled at any point (`PTHREAD_CANCEL_ASYNCHRONOUS`)
/// leaves by it, with what it holds.
const EVERY: u64 = !(1 << (SET_USER - 1));

/// [`EVERY`] as the C library knows it.
fn every_signal() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set it is given, of which the kernel knows the first 8 bytes.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        set.as_mut_ptr().cast::<u64>().write(EVERY);
        set.assume_init()
    }
}

/// Installs a handler that runs with all signals blocked, on the thread's alternate stack if it
/// has one. Returns what was there.
///
/// # Errors
/// If the signal can have no handler.
pub fn install(signal: i32, handler: Handler) -> io::Result<Previous> {
    // SAFETY: a zeroed sigaction is a valid one, filled in below; the handler has the type that
    // SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        action.sa_mask = every_signal();
        let mut previous = MaybeUninit::uninit();
        if libc::sigaction(signal, &raw const action, previous.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Previous {
            action: previous.assume_init(),
            spent: AtomicBool::new(false),
        })
    }
}

/// Whether `handler` is what is installed for a signal now.
pub fn is_installed(signal: i32, handler: Handler) -> bool {
    installed(signal) == Some(handler as usize)
}

/// Whether a signal does what it does of itself, or nothing.
pub fn has_no_handler(signal: i32) -> bool {
    matches!(installed(signal), Some(libc::SIG_DFL | libc::SIG_IGN))
}

/// The address of the handler of a signal, or the number of its default action or of ignoring it.
pub fn installed(signal: i32) -> Option<usize> {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: asks only; the structure is read if it was filled.
    unsafe {
        let known = libc::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0;
        known.then(|| now.assume_init().sa_sigaction)
    }
}

/// The signal, and the address that its fault was at. `None` if the signal was sent, or is not about
/// an access to memory that is mapped but cannot be had (broken memory, for instance).
///
/// # Safety
/// `info` is what the kernel gave a handler of SIGBUS or SIGSEGV.
pub unsafe fn fault(info: *const Info) -> Option<(i32, usize)> {
    /// `SEGV_ACCERR`, which the C library's bindings lack.
    const ACCESS_REFUSED: i32 = 2;
    // SAFETY: the caller's promise; with these codes the address is set.
    unsafe {
        let expected = match (*info).si_signo {
            libc::SIGBUS => libc::BUS_ADRERR,
            libc::SIGSEGV => ACCESS_REFUSED,
            _ => return None,
        };
        let is_fault = (*info).si_code == expected;
        is_fault.then(|| ((*info).si_signo, (*info).si_addr() as usize))
    }
}

/// Whether a handler of this process has sent a signal to its own thread (`raise`), to have the handler called that was
/// installed before it. Known only of handlers that run on an alternate stack.
///
/// # Safety
/// The arguments are what the kernel gave a handler.
pub unsafe fn is_raised_by_handler(info: *const Info, context: *const libc::c_void) -> bool {
    // SAFETY: the caller's promise; a signal that was sent has its sender's PID.
    unsafe {
        let raised = (*info).si_code == libc::SI_TKILL && (*info).si_pid() == libc::getpid();
        let stack = &(*context.cast::<libc::ucontext_t>()).uc_stack;
        let start = stack.ss_sp as usize;
        let used = start..start.saturating_add(stack.ss_size);
        raised && used.contains(&stack_pointer(context))
    }
}

impl Previous {
    /// Whether this handler was installed, as [`installed`] has it.
    pub fn is(&self, handler: usize) -> bool {
        self.action.sa_sigaction == handler
    }

    /// Notes that this was found installed again: a handler with `SA_RESETHAND` may be called once more then.
    pub fn note_found_again(&self, found: &Previous) {
        if self.is(found.action.sa_sigaction) {
            self.spent.store(false, Ordering::Relaxed);
        }
    }

    /// Passes a signal on to what was installed before, under the mask that it asked for.
    ///
    /// Where that is the default action (which it is, too, after a handler with `SA_RESETHAND` was called), or ignoring (which
    /// the kernel does not do for a fault), the default is restored: the access is made again and ends the program as it would
    /// have without us; a signal that was sent is raised again.
    ///
    /// # Safety
    /// To be called from a handler, with its arguments.
    pub unsafe fn call(&self, signal: i32, info: *mut Info, context: *mut libc::c_void) {
        let action = &self.action;
        let resets = action.sa_flags & libc::SA_RESETHAND != 0;
        match action.sa_sigaction {
            libc::SIG_DFL => {
                // SAFETY: the arguments are a handler's.
                unsafe { default_action(signal, info) };
            }
            // SAFETY: as above.
            libc::SIG_IGN => unsafe {
                if (*info).si_code > 0 {
                    default_action(signal, info);
                }
            },
            // SAFETY: as above.
            _ if resets && self.spent.swap(true, Ordering::Relaxed) => unsafe {
                default_action(signal, info);
            },
            handler => {
                // SAFETY: the kernel kept this function for calls with these arguments; the mask
                // is set to what it would have been, and back before our handler returns.
                unsafe {
                    let mut mask = mask_of(context.cast());
                    add(&mut mask, &action.sa_mask);
                    if action.sa_flags & libc::SA_NODEFER == 0 {
                        libc::sigaddset(&raw mut mask, signal);
                    }
                    let mut ours = MaybeUninit::uninit();
                    libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, ours.as_mut_ptr());
                    if action.sa_flags & libc::SA_SIGINFO != 0 {
                        let call: Handler = std::mem::transmute(handler);
                        call(signal, info, context);
                    } else {
                        let call: extern "C" fn(i32) = std::mem::transmute(handler);
                        call(signal);
                    }
                    libc::pthread_sigmask(libc::SIG_SETMASK, ours.as_ptr(), ptr::null_mut());
                }
            }
        }
    }
}

/// The mask of what a signal interrupted.
///
/// # Safety
/// `context` is what the kernel gave a handler.
unsafe fn mask_of(context: *const libc::ucontext_t) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the kernel writes the 8 bytes that it knows of a set; the rest is emptied first.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        let words = (&raw const (*context).uc_sigmask).cast::<u64>();
        set.as_mut_ptr().cast::<u64>().write(words.read());
        set.assume_init()
    }
}

fn add(set: &mut libc::sigset_t, more: &libc::sigset_t) {
    for signal in 1..=64 {
        // SAFETY: asks and changes live sets.
        unsafe {
            if libc::sigismember(more, signal) == 1 {
                libc::sigaddset(set, signal);
            }
        }
    }
}

/// # Safety
/// The arguments are a handler's.
unsafe fn default_action(signal: i32, info: *const Info) {
    // SAFETY: restores the default; a signal that was sent is sent again, to this thread, and
    // arrives once the handler has returned. A fault happens again by itself.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}

/// All signals blocked for the calling thread until the guard is dropped.
#[derive(Debug)]
pub struct Blocked {
    /// As the kernel knows it.
    before: u64,
}

/// Sets the calling thread's mask, and returns what it was. Not by the C library, which would let the
/// signal through by which threads are cancelled.
fn set_mask(mask: u64) -> u64 {
    let mut before = 0_u64;
    // SAFETY: both masks are live and of that size.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const mask,
            &raw mut before,
            size_of::<u64>(),
        );
    }
    before
}

/// Blocks all signals of the calling thread. For work that a signal's handler, if it came between,
/// would wait for without end.
pub fn block_all() -> Blocked {
    Blocked {
        before: set_mask(EVERY),
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        set_mask(self.before);
    }
}

/// The C library's error number of this thread, kept over a handler.
pub fn keep_errno<R>(run: impl FnOnce() -> R) -> R {
    // SAFETY: the location is this thread's.
    unsafe {
        let location = libc::__errno_location();
        let kept = *location;
        let result = run();
        *location = kept;
        result
    }
}

/// Writes a line to standard error and ends the process by abort, in a way that a handler may.
pub fn die(parts: &[&str]) -> ! {
    for part in ["memfold: "].iter().chain(parts).chain(&["\n"]) {
        // SAFETY: writes bytes that live here; nothing is left to do if it fails.
        unsafe { libc::write(2, part.as_ptr().cast(), part.len()) };
    }
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::blocked_signals;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn all_are_blocked_but_what_the_c_library_waits_for() {
        let before = blocked_signals();
        let guard = block_all();
        // SIGKILL (9) and SIGSTOP (19) cannot be blocked. The other one changes the user of all threads.
        let by_library = if cfg!(target_env = "musl") { 34 } else { 33 };
        let through = [9, 19, by_library].map(|number| 1_u64 << (number - 1));
        let through = through.iter().sum::<u64>();
        assert_eq!(!blocked_signals(), through);
        drop(guard);
        assert_eq!(blocked_signals(), before);

        static IN_HANDLER: AtomicU64 = AtomicU64::new(0);
        extern "C" fn handler(_: i32, _: *mut Info, _: *mut libc::c_void) {
            IN_HANDLER.store(blocked_signals(), Relaxed);
        }
        install(libc::SIGURG, handler).unwrap();
        // SAFETY: numbers only; the handler runs before this returns.
        unsafe { libc::raise(libc::SIGURG) };
        assert_eq!(!IN_HANDLER.load(Relaxed), through);
    }
}
