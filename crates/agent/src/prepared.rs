//! Forks that the library prepares, as the kernel reports none of them (that takes `CAP_SYS_PTRACE`).
//!
//! Without the event a child's memory is not registered with a userfaultfd: pages that are out would read as
//! zeros. So managed memory is kept from forked children (`MADV_DONTFORK`), and is given to a child of this
//! file alone, which has a helper and a userfaultfd of its own before it touches anything:
//!
//! 1. The C library calls its handlers, ours last. From then on this thread's system calls are dispatched to us
//!    (syscall user dispatch, Linux 5.11): between here and `clone` the C library takes its locks and may touch
//!    memory that is out, so that it is too early to stop the supervisor.
//! 2. `clone` comes as SIGSYS. On a stack that is never managed we ask the supervisor for leave by a touch of
//!    the beacon. It applies all events, stores what is staged, lists the withheld VMAs, and keeps page states
//!    and mappings still until our child has come to it.
//! 3. We give these VMAs to the child, until none has changed meanwhile, clone, and withhold them again.
//! 4. The child, still on that stack, starts its helper, which says hello with the token of this fork. The
//!    supervisor registers its memory and copies the page states. Then it goes on where `clone` returns.
//!
//! In a program that no loader brought the library into, the first step is a jump in the C library's code (`fork_site.rs`).
//!
//! A child by a raw `clone` lacks the memory that is managed, and ends by SIGSEGV when it touches it.
//! (One made while another thread is in step 3 would have it, and read zeros.)

use crate::arena::Arena;
use crate::context::{Context, set_mask};
use crate::dispatch::{SELECTOR, allow_all, dispatch};
use crate::start::{BEACON, FORK_STACK_TOP, start};
use crate::state::{Child, HAS_FORK_SITES, MANAGED, READY, channel};
use crate::{helper, system};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use memfold_sys::channel::fork_step::{FORKED, GIVEN, GO, LISTED, NOT_FORKED};
use memfold_sys::channel::{
    ASK_FILTERS, ASK_FORK, Channel, DENIED, GRANTED, Span, UNASKED, WITHHELD_MOST,
};
use memfold_sys::futex::OWNER_DIED;
use memfold_sys::raw::{nr, syscall};
use memfold_sys::{Errno, PAGE_SIZE, futex};

const SIGSYS: usize = 31;
const SA_SIGINFO: usize = 4;
const SIGSYS_BIT: u64 = 1 << (SIGSYS - 1);
const CLONE_VM: usize = 0x100;
const CLONE_PARENT_SETTID: usize = 0x10_0000;
const CLONE_CHILD_SETTID: usize = 0x100_0000;
/// `SIGCHLD`: the signal by which the parent of a child made by the `fork` system call learns of its end.
const SIGCHLD: usize = 17;

/// Bits of [`STATE`].
mod state {
    /// System calls of the forking thread are dispatched.
    pub const ARMED: u32 = 1;
    /// This process is a child that has its helper.
    pub const PREPARED: u32 = 2;
    /// The thread's system calls cannot be dispatched: its child would lack memory.
    pub const UNPREPARED: u32 = 8;
    /// The program has filters of its own, and memfold manages it no more.
    pub const RELEASED: u32 = 16;
    /// The supervisor has seen that children of this program may make system calls as it may itself.
    pub const MAY_CALL: u32 = 4;
}

/// The thread that forks ([`own_thread`]); 0 if there is none. One at a time: it guards the other statics here.
static FORKING: AtomicUsize = AtomicUsize::new(0);
/// Changes when a thread has forked. What others sleep on.
static TURN: AtomicU32 = AtomicU32::new(0);
static WAITERS: AtomicU32 = AtomicU32::new(0);
/// How often that thread has begun to fork and not ended: a signal's handler may fork meanwhile.
static DEPTH: AtomicU32 = AtomicU32::new(0);
static STATE: AtomicU32 = AtomicU32::new(0);
/// The thread's signal mask before.
static MASK: AtomicU64 = AtomicU64::new(0);
/// The program's action for SIGSYS.
static ACTION: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// End of the stack on which this process was forked, its parent's.
static PARENTS_STACK: AtomicUsize = AtomicUsize::new(0);

/// The kernel's `sigaction`.
type Action = [usize; 4];

#[cfg(feature = "standalone")]
core::arch::global_asm!(
    ".pushsection .text.memfold_prepared, \"ax\"",
    ".hidden memfold_sigreturn",
    ".globl memfold_sigreturn",
    // The only system call that is never dispatched.
    "memfold_sigreturn:",
    "mov eax, 15",
    "syscall",
    "ud2",
    // (stack, function, argument): calls the function on that stack.
    ".hidden memfold_call_on",
    ".globl memfold_call_on",
    "memfold_call_on:",
    "push rbp",
    "mov rbp, rsp",
    "mov rsp, rdi",
    "mov rdi, rdx",
    "call rsi",
    "mov rsp, rbp",
    "pop rbp",
    "ret",
    ".popsection",
);

#[cfg(feature = "standalone")]
unsafe extern "C" {
    fn memfold_sigreturn();
    fn memfold_call_on(stack_top: usize, function: extern "C" fn(*mut Call), call: *mut Call);
}

/// Never called where the library is not loaded by the loader.
#[cfg(not(feature = "standalone"))]
unsafe extern "C" fn memfold_sigreturn() {}
#[cfg(not(feature = "standalone"))]
unsafe fn memfold_call_on(_: usize, function: extern "C" fn(*mut Call), call: *mut Call) {
    function(call);
}

/// Called by the thread that is about to fork, which has announced it in the channel.
pub fn prepare(channel: &'static Channel) {
    let is_filtered = system::is_filtered();
    // SeqCst: see `MANAGED`.
    if !is_filtered && MANAGED.load(Ordering::SeqCst) == 0 {
        return;
    }
    let own = own_thread();
    if FORKING.load(Ordering::Relaxed) == own {
        DEPTH.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // No handler of the program's may run until its child is there, and make system calls. Nor before that: one that
    // forks would find this fork begun, and its child lack memory.
    let mask = system::block_signals_but(SIGSYS_BIT);
    take_turn(own);
    DEPTH.store(1, Ordering::Relaxed);
    if is_filtered && ask(channel, ASK_FILTERS) != GRANTED {
        // Filters of the program's own: neither it nor its child may make system calls for us from here on. The
        // supervisor has let go of the program before it answered.
        STATE.store(state::RELEASED, Ordering::Relaxed);
        system::restore_signals(mask);
        return;
    }
    let may_call = if is_filtered { state::MAY_CALL } else { 0 };
    STATE.store(may_call, Ordering::Relaxed);
    MASK.store(mask, Ordering::Relaxed);
    if MANAGED.load(Ordering::SeqCst) != 0 {
        arm();
    }
}

/// What no other thread of this process has: its thread pointer. (Its TID takes a system call.)
pub fn own_thread() -> usize {
    let own: usize;
    // SAFETY: reads the first word that the thread pointer points to, which is that pointer itself.
    unsafe { core::arch::asm!("mov {}, fs:0", out(reg) own, options(nostack, readonly)) };
    own
}

/// The pages of this thread's restartable sequence, if the C library has one (glibc 2.35): the first, and how many.
fn own_sequence() -> (usize, usize) {
    if HAS_FORK_SITES.load(Ordering::Relaxed) != 0 {
        // No loader has told of it. It is near the thread pointer: one page above at most, or two below.
        let first = system::page_of(own_thread()).wrapping_sub(2 * PAGE_SIZE);
        return (first, 4);
    }
    // SAFETY: null, or the C library's variable, which is set before any program code runs.
    match unsafe { rseq_offset().as_ref() } {
        Some(offset) => (
            system::page_of(own_thread().wrapping_add_signed(*offset)),
            1,
        ),
        None => (0, 0),
    }
}

#[cfg(feature = "standalone")]
core::arch::global_asm!(
    ".weak __rseq_offset",
    ".pushsection .data.rel.ro.memfold, \"aw\"",
    ".balign 8",
    "memfold_rseq_offset: .quad __rseq_offset",
    ".popsection",
);

#[cfg(feature = "standalone")]
fn rseq_offset() -> *const isize {
    unsafe extern "C" {
        #[link_name = "memfold_rseq_offset"]
        static OFFSET: *const isize;
    }
    // SAFETY: a word that the loader has relocated: null, as the symbol is weak, or that variable's address.
    unsafe { core::ptr::read_volatile(&raw const OFFSET) }
}

#[cfg(not(feature = "standalone"))]
fn rseq_offset() -> *const isize {
    core::ptr::null()
}

fn take_turn(own: usize) {
    let is_taken = || {
        let exchanged = FORKING.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed);
        exchanged.is_err()
    };
    while is_taken() {
        WAITERS.fetch_add(1, Ordering::SeqCst);
        let turn = TURN.load(Ordering::SeqCst);
        if FORKING.load(Ordering::SeqCst) != 0 {
            let _ = futex::wait(&TURN, turn, None);
        }
        WAITERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The fork is over, in the parent.
pub fn end_in_parent() {
    if FORKING.load(Ordering::Relaxed) != own_thread() {
        return;
    }
    let is_released = STATE.load(Ordering::Relaxed) & state::RELEASED != 0;
    if !is_released {
        disarm();
    }
    if DEPTH.fetch_sub(1, Ordering::Relaxed) > 1 {
        // The fork around this one goes on.
        if !is_released && MANAGED.load(Ordering::SeqCst) != 0 {
            arm();
        }
        return;
    }
    let mask = MASK.load(Ordering::Relaxed);
    // SeqCst: a thread that waits either sees this, or is seen.
    FORKING.store(0, Ordering::SeqCst);
    TURN.fetch_add(1, Ordering::SeqCst);
    if WAITERS.load(Ordering::SeqCst) != 0 {
        futex::wake(&TURN, 1);
    }
    // Last: a handler that waits may fork.
    if !is_released {
        system::restore_signals(mask);
    }
}

/// The fork is over, in the child.
pub fn end_in_child() -> Child {
    WAITERS.store(0, Ordering::Relaxed);
    if FORKING.swap(0, Ordering::Relaxed) != own_thread() {
        // Nothing was managed when its thread decided; another may have been about to fork just then.
        STATE.store(0, Ordering::Relaxed);
        DEPTH.store(0, Ordering::Relaxed);
        return Child::ToStart { may_call: false };
    }
    let state = STATE.swap(0, Ordering::Relaxed);
    DEPTH.store(0, Ordering::Relaxed);
    if state & state::RELEASED != 0 {
        return Child::Complete;
    }
    system::restore_signals(MASK.load(Ordering::Relaxed));
    if state & (state::ARMED | state::UNPREPARED) != 0 {
        // It came past us, and lacks the memory that is managed.
        helper::fail_unprepared();
    }
    if state & state::PREPARED != 0 {
        Arena::unmap_inherited_stack(PARENTS_STACK.load(Ordering::Relaxed));
        return Child::Complete;
    }
    Child::ToStart {
        may_call: state & state::MAY_CALL != 0,
    }
}

/// Has this thread's system calls dispatched to [`on_system_call`].
fn arm() {
    const SA_RESTORER: usize = 0x0400_0000;
    // Nested: all signals but this one are blocked already.
    const SA_NODEFER: usize = 0x4000_0000;
    const ALL: usize = usize::MAX & !(SIGSYS_BIT as usize);
    let ours = [
        on_system_call as *const () as usize,
        SA_SIGINFO | SA_RESTORER | SA_NODEFER,
        memfold_sigreturn as *const () as usize,
        ALL,
    ];
    let before = exchange_action(&ours);
    for (place, word) in ACTION.iter().zip(before) {
        place.store(word, Ordering::Relaxed);
    }
    SELECTOR.store(0, Ordering::Relaxed);
    if dispatch(memfold_sigreturn as *const () as usize).is_err() {
        exchange_action(&before);
        STATE.fetch_or(state::UNPREPARED, Ordering::Relaxed);
        return;
    }
    STATE.fetch_or(state::ARMED, Ordering::Relaxed);
    SELECTOR.store(1, Ordering::Relaxed);
}

/// Undoes it, where it was done.
fn disarm() {
    SELECTOR.store(0, Ordering::Relaxed);
    if STATE.fetch_and(!state::ARMED, Ordering::Relaxed) & state::ARMED != 0 {
        allow_all();
        restore_action();
    }
}

fn restore_action() {
    let mut before: Action = [0; 4];
    for (word, place) in before.iter_mut().zip(&ACTION) {
        *word = place.load(Ordering::Relaxed);
    }
    exchange_action(&before);
}

fn exchange_action(new: &Action) -> Action {
    let mut old: Action = [0; 4];
    let (new, old_at) = (new.as_ptr() as usize, old.as_mut_ptr() as usize);
    // SAFETY: two live structures of the kernel's layout.
    unsafe { syscall(nr::RT_SIGACTION, [SIGSYS, new, old_at, 8, 0, 0]) };
    old
}

/// A system call of the forking thread, or another SIGSYS of any thread.
extern "C" fn on_system_call(signal: i32, information: *const [i32; 4], context: *mut Context) {
    const SYS_USER_DISPATCH: i32 = 2;
    // SAFETY: the kernel's structures on the signal's frame, which is this handler's.
    let (code, context) = unsafe { ((*information)[2], &mut *context) };
    if code != SYS_USER_DISPATCH {
        pass_on(signal, information, context);
        return;
    }
    SELECTOR.store(0, Ordering::Relaxed);
    match context.rax {
        nr::RT_SIGRETURN => {
            // Of a handler that began before the signals were blocked. Where it returns to does the same.
            context.rip = memfold_sigreturn as *const () as usize;
        }
        nr::RT_SIGPROCMASK => context.rax = set_mask(context, SIGSYS_BIT),
        nr::CLONE if context.rdi & CLONE_VM == 0 => return fork(context, context.rdi),
        nr::FORK => return fork(context, SIGCHLD),
        nr::CLONE | nr::VFORK | nr::CLONE3 => {
            // Not the C library's fork. It is made again, as it is. (By a handler of another library, before a fork:
            // the child of that says why it stops.)
            disarm();
            STATE.fetch_or(state::UNPREPARED, Ordering::Relaxed);
            context.rip -= 2;
            return;
        }
        number => {
            // SAFETY: the program's own system call, for which it vouches.
            context.rax = unsafe { syscall(number, context.arguments()) } as usize;
        }
    }
    SELECTOR.store(1, Ordering::Relaxed);
}

/// A SIGSYS that a filter raised, or another process.
fn pass_on(signal: i32, information: *const [i32; 4], context: *mut Context) {
    const DEFAULT_AND_IGNORE: core::ops::RangeInclusive<usize> = 0..=1;
    let [handler, flags, ..] = &ACTION;
    let (handler, flags) = (
        handler.load(Ordering::Relaxed),
        flags.load(Ordering::Relaxed),
    );
    if DEFAULT_AND_IGNORE.contains(&handler) {
        system::kill_program();
    }
    // SAFETY: the program's handler, called as the kernel would.
    unsafe {
        if flags & SA_SIGINFO != 0 {
            type Three = extern "C" fn(i32, *const [i32; 4], *mut Context);
            core::mem::transmute::<usize, Three>(handler)(signal, information, context);
        } else {
            core::mem::transmute::<usize, extern "C" fn(i32)>(handler)(signal);
        }
    }
}

/// A fork as the C library asked for it.
struct Call {
    flags: usize,
    arguments: [usize; 6],
    /// By the system call `fork`, which has no arguments.
    is_plain: bool,
    channel: &'static Channel,
    /// What `clone` returns, in each of the two.
    result: isize,
    /// End of the stack it runs on.
    stack_top: usize,
}

/// Forks. Returns in the parent, and in the child.
fn fork(context: &mut Context, flags: usize) {
    let Some(channel) = channel() else {
        // Cannot be: `prepare` had it.
        helper::fail_unprepared();
    };
    let call = Call {
        flags,
        arguments: context.arguments(),
        is_plain: context.rax == nr::FORK,
        channel,
        result: 0,
        stack_top: FORK_STACK_TOP.load(Ordering::Relaxed),
    };
    let copy = copied_to_stack(&call);
    // SAFETY: the stack is for this purpose alone, and one thread forks at a time; the copy is at its end, above
    // what the function uses.
    let result = unsafe {
        memfold_call_on(copy as usize, fork_on_own_stack, copy);
        (*copy).result
    };
    if result == 0 {
        restore_action();
        STATE.store(state::PREPARED, Ordering::Relaxed);
    } else {
        disarm();
    }
    context.rax = result as usize;
}

/// Puts the call at the end of the stack on which it is made: the thread's own stack may be paged out.
fn copied_to_stack(call: &Call) -> *mut Call {
    const ROOM: usize = (size_of::<Call>() + 15) & !15;
    let copy = (call.stack_top - ROOM) as *mut Call;
    // SAFETY: the end of a stack that nothing uses; the structure is plain data.
    unsafe { core::ptr::copy_nonoverlapping(call, copy, 1) };
    copy
}

extern "C" fn fork_on_own_stack(call: *mut Call) {
    // SAFETY: `fork` passes its copy, which lives on this stack.
    let call = unsafe { &mut *call };
    let channel = call.channel;
    let answer = ask(channel, ASK_FORK);
    if answer != GRANTED {
        call.result = -(Errno::EAGAIN.0 as isize);
        return;
    }
    let [_, stack, parent_tid, child_tid, tls, _] = match call.arguments {
        // `fork`, which has no arguments.
        _ if call.is_plain => [0; 6],
        arguments => arguments,
    };
    let mut result = -(Errno::ENOMEM.0 as isize);
    if give_to_child(channel) && stack == 0 {
        let token = channel.fork.token.load(Ordering::Relaxed);
        let flags = call.flags & !(CLONE_PARENT_SETTID | CLONE_CHILD_SETTID);
        // SAFETY: as the C library asked for it, but for two words, which are written below: the kernel would
        // write them to memory that may be out.
        result = unsafe { syscall(nr::CLONE, [flags, 0, parent_tid, child_tid, tls, 0]) };
        if result == 0 {
            run_in_child(call, token, child_tid);
            return;
        }
    }
    for span in spans(channel) {
        let (start, length) = place(span);
        // (What has moved meanwhile, the supervisor has withheld again.)
        let _ = system::keep_from_children(start, length);
    }
    let step = if result > 0 { FORKED } else { NOT_FORKED };
    channel.fork.step.store(step, Ordering::Release);
    // Empty again, for the next request.
    let _ = system::drop_pages(BEACON.load(Ordering::Relaxed), PAGE_SIZE);
    call.result = result;
    if call.flags & CLONE_PARENT_SETTID != 0 && result > 0 {
        // SAFETY: where the caller of `clone` wants it.
        unsafe { (parent_tid as *mut i32).write(result as i32) };
    }
}

/// Gives the listed VMAs to children, until none has changed meanwhile. `false` if the kernel refuses.
fn give_to_child(channel: &'static Channel) -> bool {
    const NAP_NS: u64 = 100_000_000;
    let step = &channel.fork.step;
    loop {
        let given = spans(channel).iter().all(|span| {
            let (start, length) = place(span);
            // What was unmapped since raised no event, or its place would be listed anew: it was not registered.
            matches!(
                system::give_to_children(start, length),
                Ok(()) | Err(Errno::ENOMEM)
            )
        });
        // It may have been given up meanwhile.
        let _ = step.compare_exchange(LISTED, GIVEN, Ordering::Release, Ordering::Relaxed);
        loop {
            match step.load(Ordering::Acquire) {
                GIVEN => {}
                LISTED => break,
                now => return now == GO && given,
            }
            if channel.alive.load(Ordering::Relaxed) & OWNER_DIED != 0 {
                helper::fail_orphaned();
            }
            let _ = futex::wait(step, GIVEN, Some(NAP_NS));
        }
    }
}

/// In the child, which touches nothing but this stack and the library until its helper is there.
fn run_in_child(call: &mut Call, token: u64, child_tid: usize) {
    PARENTS_STACK.store(call.stack_top, Ordering::Relaxed);
    // It has a beacon of its own soon.
    let _ = system::keep_from_children(BEACON.load(Ordering::Relaxed), PAGE_SIZE);
    if start(token, None) != READY {
        helper::fail_unprepared();
    }
    if let Some(channel) = channel() {
        for span in spans(channel) {
            let (start, length) = place(span);
            if system::keep_from_children(start, length).is_err() {
                helper::fail_unprepared();
            }
        }
    }
    if call.flags & CLONE_CHILD_SETTID != 0 {
        // SAFETY: where the caller of `clone` wants it.
        unsafe { (child_tid as *mut i32).write(system::own_thread() as i32) };
    }
    call.result = 0;
}

fn spans(channel: &'static Channel) -> &'static [Span] {
    let count = channel.fork.count.load(Ordering::Acquire) as usize;
    channel
        .fork
        .spans
        .get(..count.min(WITHHELD_MOST))
        .unwrap_or(&[])
}

fn place(span: &Span) -> (usize, usize) {
    let start = span.start.load(Ordering::Relaxed) as usize;
    (start, span.length.load(Ordering::Relaxed) as usize)
}

/// Asks the supervisor, by a touch of the beacon, which it fills with the answer. Without a supervisor the program
/// ends.
fn ask(channel: &Channel, what: u32) -> u64 {
    let beacon = BEACON.load(Ordering::Relaxed);
    let (sequence, pages) = own_sequence();
    let span = &channel.fork.sequence;
    span.start.store(sequence as u64, Ordering::Relaxed);
    let length = (pages * PAGE_SIZE) as u64;
    span.length.store(length, Ordering::Relaxed);
    channel.fork.asked.store(what, Ordering::Release);
    let answer = loop {
        // SAFETY: a mapped page of this library's. It is registered where forks are prepared, so the read faults.
        let answer = unsafe { core::ptr::read_volatile(beacon as *const u64) };
        if answer != UNASKED {
            break answer;
        }
        let _ = system::drop_pages(beacon, PAGE_SIZE);
        // The supervisor has found it paged out. (What is not mapped there is not.)
        for number in 0..pages {
            let page = sequence.wrapping_add(number * PAGE_SIZE);
            let _ = system::bring_in(page, PAGE_SIZE);
        }
    };
    channel.fork.asked.store(0, Ordering::Relaxed);
    match answer {
        GRANTED if what == ASK_FORK => {}
        // For good, as no system call may be made for another.
        DENIED if what == ASK_FILTERS => {}
        GRANTED | DENIED => {
            let _ = system::drop_pages(beacon, PAGE_SIZE);
        }
        _ => helper::fail_orphaned(),
    }
    answer
}
