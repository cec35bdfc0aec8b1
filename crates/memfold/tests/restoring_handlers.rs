//! Handlers that restore what was installed before them and raise the signal again, as CPython's faulthandler has.

mod common;

use common::{MIB, PAGE, builder, forked};
use memfold::{Memfold, Mode, Region, reinstall_handlers};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Calls of the handler; in memory that children share.
static CALLS: AtomicPtr<AtomicUsize> = AtomicPtr::new(ptr::null_mut());
/// What was installed before it, in a box.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
/// The page that `rearming_handler` makes accessible.
static REFUSED: AtomicPtr<libc::c_void> = AtomicPtr::new(ptr::null_mut());

fn calls() -> &'static AtomicUsize {
    // SAFETY: the test sets it first, to memory that stays.
    unsafe { &*CALLS.load(Ordering::Relaxed) }
}

fn share_calls() {
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping where the kernel likes, which stays.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    CALLS.store(page.cast(), Ordering::Relaxed);
}

/// Restores and returns: the access is made again.
extern "C" fn returning_handler(signal: i32) {
    calls().fetch_add(1, Ordering::Relaxed);
    // SAFETY: as below.
    unsafe { libc::sigaction(signal, BEFORE.load(Ordering::Relaxed), ptr::null_mut()) };
}

extern "C" fn restoring_handler(signal: i32) {
    calls().fetch_add(1, Ordering::Relaxed);
    // SAFETY: what `install` put there; the process keeps it.
    unsafe {
        libc::sigaction(signal, BEFORE.load(Ordering::Relaxed), ptr::null_mut());
        libc::raise(signal);
    }
}

/// What the kernel calls once.
const ONCE: i32 = libc::SA_RESETHAND | libc::SA_ONSTACK;

/// Has itself called the next time, too, and the access succeed.
extern "C" fn rearming_handler(signal: i32) {
    calls().fetch_add(1, Ordering::Relaxed);
    install(signal, (rearming_handler, ONCE));
    // SAFETY: a page that nothing else is on.
    unsafe { libc::mprotect(REFUSED.load(Ordering::Relaxed), PAGE, libc::PROT_READ) };
}

const RAISES: (extern "C" fn(i32), i32) = (restoring_handler, libc::SA_NODEFER | libc::SA_ONSTACK);

fn install(signal: i32, (handler, flags): (extern "C" fn(i32), i32)) {
    // SAFETY: a zeroed action with a handler of one argument; the kernel fills in the one before.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = flags;
        let mut before = MaybeUninit::uninit();
        let done = libc::sigaction(signal, &raw const action, before.as_mut_ptr());
        assert_eq!(done, 0);
        BEFORE.store(
            Box::into_raw(Box::new(before.assume_init())),
            Ordering::Relaxed,
        );
    }
}

/// The test's thread has an alternate stack, as Rust gives one to each thread.
fn assert_alternate_stack() {
    let mut stack = MaybeUninit::<libc::stack_t>::uninit();
    // SAFETY: asks only.
    let flags = unsafe {
        assert_eq!(libc::sigaltstack(ptr::null(), stack.as_mut_ptr()), 0);
        stack.assume_init().ss_flags
    };
    assert_eq!(flags & libc::SS_DISABLE, 0);
}

/// Runs a child, whose calls are counted, and returns its wait status.
fn counted(run: impl FnOnce() -> i32) -> i32 {
    calls().store(0, Ordering::Relaxed);
    forked(run)
}

fn signal_of(mode: Mode) -> i32 {
    match mode {
        Mode::Protection => libc::SIGSEGV,
        _ => libc::SIGBUS,
    }
}

fn limited(mode: Mode) -> (Memfold, Region) {
    let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let mut region = memfold.map(MIB).unwrap();
    page_out(&mut region);
    (memfold, region)
}

fn page_out(region: &mut Region) {
    for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
        page[..2].copy_from_slice(&[1 + (number % 250) as u8, 7]);
    }
    region.page_out(..).unwrap();
}

fn is_whole(region: &Region) -> bool {
    let mut pages = region.chunks_exact(PAGE).enumerate();
    pages.all(|(number, page)| page[..2] == [1 + (number % 250) as u8, 7])
}

/// An access that is the program's mistake.
fn crash() -> i32 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: none; the test is that this ends the child, by the alarm at the latest, or that a handler makes the page
    // accessible.
    unsafe {
        libc::alarm(10);
        let page = libc::mmap(ptr::null_mut(), PAGE, libc::PROT_NONE, flags, -1, 0);
        REFUSED.store(page, Ordering::Relaxed);
        i32::from(page.cast::<u8>().read_volatile())
    }
}

/// The fault goes to the handler first. What it raises does not end the program, and it is not called again.
fn a_fault_is_served_after_a_handler_that_was_installed_later(mode: Mode) {
    let status = counted(|| {
        let (memfold, mut region) = limited(mode);
        install(signal_of(mode), RAISES);
        for _ in 0..3 {
            if !is_whole(&region) || calls().load(Ordering::Relaxed) != 1 {
                return 2;
            }
            page_out(&mut region);
        }
        i32::from(!memfold.is_handler_installed())
    });
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
}

/// A signal that is no fault, which a program may send itself.
fn raise() -> i32 {
    // SAFETY: a number.
    unsafe { libc::raise(libc::SIGSEGV) };
    4
}

/// Nothing goes to the handler but what is the program's, and that ends it after one call.
fn a_handler_below_is_called_for_the_programs_faults_alone(
    mode: Mode,
    how: (extern "C" fn(i32), i32),
    end: fn() -> i32,
) {
    let status = counted(|| {
        // SAFETY: a number. (The handler of Rust's standard library takes what is raised for a stack overflow.)
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        let (memfold, mut region) = limited(mode);
        install(libc::SIGSEGV, how);
        if mode == Mode::Protection {
            reinstall_handlers().unwrap();
        }
        if !memfold.is_handler_installed() || !is_whole(&region) {
            return 2;
        }
        page_out(&mut region);
        if calls().load(Ordering::Relaxed) != 0 {
            return 3;
        }
        end()
    });
    let ended = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV;
    assert!(ended, "{mode:?}: {status:#x}");
    assert_eq!(calls().load(Ordering::Relaxed), 1, "{mode:?}");
}

/// A program that sends itself the signal is ended, as without memfold.
fn a_signal_that_the_program_raises_ends_it(mode: Mode) {
    let status = counted(|| {
        // SAFETY: a number. (The handler of Rust's standard library takes the signal for a stack overflow.)
        unsafe { libc::signal(signal_of(mode), libc::SIG_DFL) };
        let (_memfold, _region) = limited(mode);
        // SAFETY: ends the child.
        unsafe { libc::raise(signal_of(mode)) };
        4
    });
    assert!(libc::WIFSIGNALED(status), "{mode:?}: {status:#x}");
    assert_eq!(libc::WTERMSIG(status), signal_of(mode), "{mode:?}");
}

extern "C" fn counting_handler(_: i32) {
    calls().fetch_add(1, Ordering::Relaxed);
}

/// Each handler that is to be called once is, and the program's fault ends it then.
fn a_handler_that_resets_itself_is_called_once(mode: Mode) {
    let status = counted(|| {
        install(libc::SIGSEGV, (counting_handler, ONCE));
        let (_memfold, region) = limited(mode);
        if !is_whole(&region) {
            return 2;
        }
        crash()
    });
    let ended = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV;
    assert!(ended, "{mode:?}: {status:#x}");
    assert_eq!(calls().load(Ordering::Relaxed), 1, "{mode:?}");
}

/// One that installs itself again is called again, once memfold's handler is above it.
fn a_handler_that_installs_itself_again_is_called_again(mode: Mode) {
    let status = counted(|| {
        install(libc::SIGSEGV, (rearming_handler, ONCE));
        let (_memfold, mut region) = limited(mode);
        for count in 1..=2 {
            if crash() != 0 || calls().load(Ordering::Relaxed) != count {
                return 2;
            }
            reinstall_handlers().unwrap();
        }
        if !is_whole(&region) {
            return 3;
        }
        page_out(&mut region);
        i32::from(!is_whole(&region))
    });
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
}

#[test]
fn faults_are_served_beside_handlers_that_restore_and_raise() {
    assert_alternate_stack();
    share_calls();
    for mode in common::modes() {
        if mode == Mode::Thread {
            continue;
        }
        a_fault_is_served_after_a_handler_that_was_installed_later(mode);
        for how in [
            RAISES,
            (restoring_handler, 0),
            (restoring_handler, libc::SA_ONSTACK),
            (returning_handler, libc::SA_ONSTACK),
        ] {
            a_handler_below_is_called_for_the_programs_faults_alone(mode, how, crash);
        }
        a_handler_below_is_called_for_the_programs_faults_alone(mode, RAISES, raise);
        a_signal_that_the_program_raises_ends_it(mode);
        a_handler_that_resets_itself_is_called_once(mode);
        a_handler_that_installs_itself_again_is_called_again(mode);
    }
}
