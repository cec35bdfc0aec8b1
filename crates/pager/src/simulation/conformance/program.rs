//! The program on Linux: threads that do what they are told over a socket.
//!
//! It is forked from a process that has other threads, and forks itself from threads without TLS. So
//! everything here is done by system calls alone, without memory of an allocator.

use crate::simulation::conformance::operation::{
    Call, FIRST_CHILD_THREAD, HELPER, Pages, THREADS, first_thread_of, page,
};
use crate::simulation::model::memory::spread;
use memfold_sys::raw::{self, nr, syscall};
use memfold_sys::uffd::Uffd;
use memfold_sys::{Errno, PAGE_SIZE};
use std::arch::asm;

/// What a thread begins with. All are made before the program is forked, in one array.
#[repr(C)]
pub(crate) struct ThreadSlot {
    /// The program's end of a socket of whole messages.
    pub socket: i32,
    /// Number of the thread.
    pub number: usize,
    /// The end of its stack.
    pub stack_end: usize,
    /// The array.
    pub slots: *const ThreadSlot,
}

/// A message in either direction.
pub(crate) type Words = [u64; 5];

/// What a program's thread answers.
pub(crate) mod answer {
    /// First word of an answer: success, with what was read or made.
    pub(crate) const DONE: u64 = 0;
    /// SIGSEGV.
    pub(crate) const UNMAPPED: u64 = 1;
    /// An error.
    pub(crate) const FAILED: u64 = 2;
    /// Pages moved, error.
    pub(crate) const MOVED: u64 = 3;
    /// What a thread says first: its TID, and for the helper the number of the userfaultfd.
    pub(crate) const STARTED: u64 = 4;
}

/// A call as a message.
pub(crate) fn words_of(call: Call) -> Words {
    let all = |kind, a, b, c, d| [kind, a, b, c, d];
    match call {
        Call::Map(Pages(start, pages)) => all(0, start, pages, 0, 0),
        Call::Read(page) => all(1, page, 0, 0, 0),
        Call::Write(page, tag) => all(2, page, tag, 0, 0),
        Call::Populate(page) => all(3, page, 0, 0, 0),
        Call::Drop(Pages(start, pages)) => all(4, start, pages, 0, 0),
        Call::Unmap(Pages(start, pages)) => all(5, start, pages, 0, 0),
        Call::Remap(Pages(start, pages), to, stays) => all(6, start, pages, to, u64::from(stays)),
        Call::Fork(child) => all(7, child as u64, 0, 0, 0),
        Call::Move(Pages(start, pages), to) => all(8, start, pages, to, 0),
        Call::Keep(Pages(start, pages)) => all(9, start, pages, 0, 0),
        Call::Give(Pages(start, pages)) => all(10, start, pages, 0, 0),
        Call::Mark(Pages(start, pages)) => all(11, start, pages, 0, 0),
        Call::Free(Pages(start, pages)) => all(12, start, pages, 0, 0),
        Call::ForkUnreported(child) => all(13, child as u64, 0, 0, 0),
        Call::Carry(Pages(start, pages), to) => all(14, start, pages, to, 0),
    }
}

/// The call of a message.
fn call_of([kind, a, b, c, d]: Words) -> Call {
    match kind {
        0 => Call::Map(Pages(a, b)),
        1 => Call::Read(a),
        2 => Call::Write(a, b),
        3 => Call::Populate(a),
        4 => Call::Drop(Pages(a, b)),
        5 => Call::Unmap(Pages(a, b)),
        6 => Call::Remap(Pages(a, b), c, d != 0),
        7 => Call::Fork(a as usize),
        8 => Call::Move(Pages(a, b), c),
        9 => Call::Keep(Pages(a, b)),
        10 => Call::Give(Pages(a, b)),
        11 => Call::Mark(Pages(a, b)),
        12 => Call::Free(Pages(a, b)),
        13 => Call::ForkUnreported(a as usize),
        _ => Call::Carry(Pages(a, b), c),
    }
}

/// A system call of numbers alone, of which memory of the program is at most an address range in the arena.
fn call(number: i64, arguments: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: callers name descriptors, numbers, and ranges of the arena, in which no object of Rust lies.
    Errno::result(unsafe { syscall(number as usize, arguments) })
}

fn end() -> ! {
    let _ = call(libc::SYS_exit_group, [0; 6]);
    unreachable!("the process has ended");
}

/// The program's first thread, which is the helper.
pub(crate) extern "C" fn begin_program(slot: *const u8) -> ! {
    // SAFETY: `Linux::start` passes a slot. Its array is in memory that the program has a copy of, and never
    // unmaps or writes.
    let slot = unsafe { &*slot.cast::<ThreadSlot>() };
    let _ = call(
        libc::SYS_prctl,
        [libc::PR_SET_THP_DISABLE as usize, 1, 0, 0, 0, 0],
    );
    skip_what_is_unmapped();
    close_others(slot);
    let Ok(Uffd(number)) = Uffd::create() else {
        end();
    };
    for other in 1..FIRST_CHILD_THREAD {
        // SAFETY: `slots` is the array of all, in which this number is.
        let other = unsafe { &*slot.slots.add(other) };
        let flags = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM;
        spawn(other, flags);
    }
    run(slot, number);
}

/// Starts a thread, or a process with one thread.
fn spawn(slot: &ThreadSlot, flags: i32) -> isize {
    let argument = std::ptr::from_ref(slot).cast();
    // SAFETY: each slot has its own stack, which one thread of a process uses: `modelled` gives each number to
    // one thread. `begin_thread` takes a slot, and uses system calls alone.
    unsafe { raw::clone(flags as usize, slot.stack_end, begin_thread, argument) }
}

extern "C" fn begin_thread(slot: *const u8) -> ! {
    // SAFETY: `spawn` passes a slot, which stays as `begin_program` says.
    run(unsafe { &*slot.cast::<ThreadSlot>() }, -1);
}

/// Closes what belongs to the process that this was forked from, such as its ends of the sockets: they must
/// be closed when it ends, whatever lives of this.
fn close_others(slot: &ThreadSlot) {
    let mut first = 3;
    loop {
        // The lowest socket from here on. (There is no memory to sort them in.)
        let next = (0..THREADS)
            // SAFETY: `slots` is the array of all, in which this number is.
            .map(|other| unsafe { (*slot.slots.add(other)).socket } as usize)
            .filter(|socket| *socket >= first)
            .min();
        let last = next.map_or(u32::MAX as usize, |next| next - 1);
        if first <= last {
            let _ = call(libc::SYS_close_range, [first, last, 0, 0, 0, 0]);
        }
        match next {
            Some(next) => first = next + 1,
            None => return,
        }
    }
}

/// Does what is told, until the other end of the socket is closed.
fn run(slot: &ThreadSlot, uffd: i32) -> ! {
    let thread = call(libc::SYS_gettid, [0; 6]).unwrap_or(0);
    let mut answer: Words = [answer::STARTED, thread as u64, uffd as u64, 0, 0];
    let length = size_of::<Words>();
    loop {
        // SAFETY: sends a live array of that length.
        let sent = unsafe {
            let data = (&raw const answer) as usize;
            syscall(nr::WRITE, [slot.socket as usize, data, length, 0, 0, 0])
        };
        let mut told: Words = [0; 5];
        // SAFETY: the kernel writes plain numbers into a live array of that length.
        let read = unsafe {
            let data = (&raw mut told) as usize;
            syscall(nr::READ, [slot.socket as usize, data, length, 0, 0, 0])
        };
        if sent != length as isize || read != length as isize {
            end();
        }
        answer = obey(slot, uffd, call_of(told));
    }
}

/// First address and length.
fn span(pages: Pages) -> [usize; 2] {
    [
        page(pages.0).address() as usize,
        pages.1 as usize * PAGE_SIZE,
    ]
}

fn obey(slot: &ThreadSlot, uffd: i32, told: Call) -> Words {
    let advise = |pages: Pages, advice: i32| {
        let [start, length] = span(pages);
        call(libc::SYS_madvise, [start, length, advice as usize, 0, 0, 0])
    };
    let remap = |from: Pages, to: u64, stays: bool| {
        let [start, length] = span(from);
        let stays = if stays { libc::MREMAP_DONTUNMAP } else { 0 };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | stays;
        let to = page(to).address() as usize;
        let arguments = [start, length, length, flags as usize, to, 0];
        call(libc::SYS_mremap, arguments)
    };
    let result = match told {
        Call::Map(pages) => {
            let [start, length] = span(pages);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let arguments = [
                start,
                length,
                access as usize,
                flags as usize,
                usize::MAX,
                0,
            ];
            call(libc::SYS_mmap, arguments).map(|_| 0)
        }
        Call::Read(number) => match load(page(number).address()) {
            Some(contents) => Ok(contents as usize),
            None => return [answer::UNMAPPED, 0, 0, 0, 0],
        },
        Call::Write(number, tag) => match store(page(number).address(), tag) {
            Some(()) => Ok(0),
            None => return [answer::UNMAPPED, 0, 0, 0, 0],
        },
        Call::Populate(number) => advise(Pages(number, 1), libc::MADV_POPULATE_WRITE),
        Call::Drop(pages) => advise(pages, libc::MADV_DONTNEED),
        Call::Unmap(pages) => {
            let [start, length] = span(pages);
            call(libc::SYS_munmap, [start, length, 0, 0, 0, 0])
        }
        Call::Remap(from, to, stays) => remap(from, to, stays).map(|_| 0),
        Call::Carry(from, to) => {
            let places = Pages(to, from.1);
            let carried = remap(from, to, true);
            carried
                .and_then(|_| advise(places, libc::MADV_DONTFORK))
                .and_then(|_| advise(places, libc::MADV_NORMAL))
        }
        Call::Keep(pages) => advise(pages, libc::MADV_DONTFORK),
        Call::Give(pages) => advise(pages, libc::MADV_DOFORK),
        Call::Mark(pages) => advise(pages, libc::MADV_RANDOM),
        Call::Free(pages) => advise(pages, libc::MADV_FREE),
        Call::Fork(child) | Call::ForkUnreported(child) => {
            let number = first_thread_of(child);
            // SAFETY: `slots` is the array of all, in which this number is.
            let child = unsafe { &*slot.slots.add(number) };
            // A child of the test, which can wait for it whatever became of the parent.
            Errno::result(spawn(child, libc::CLONE_PARENT | libc::SIGCHLD))
        }
        Call::Move(from, to) => {
            debug_assert_eq!(slot.number, HELPER);
            return move_run(Uffd(uffd), from, page(to).address());
        }
    };
    match result {
        Ok(value) => [answer::DONE, value as u64, 0, 0, 0],
        Err(errno) => [answer::FAILED, errno.0 as u64, 0, 0, 0],
    }
}

/// Moves a run as the helper does.
fn move_run(uffd: Uffd, from: Pages, target: u64) -> Words {
    let (source, pages) = (page(from.0).address(), from.1);
    let (mut moved, mut chunk) = (0, pages);
    while moved < pages {
        let done = moved * PAGE_SIZE as u64;
        let step = chunk.min(pages - moved);
        match uffd.move_pages(target + done, source + done, step * PAGE_SIZE as u64) {
            Ok(()) => (moved, chunk) = (moved + step, pages),
            Err(partial) if partial.done > 0 => moved += partial.done / PAGE_SIZE as u64,
            Err(partial) if partial.errno == Errno::EINVAL && step > 1 => chunk = step / 2,
            Err(partial) => return [answer::MOVED, moved, partial.errno.0 as u64, 0, 0],
        }
    }
    [answer::MOVED, moved, 0, 0, 0]
}

/// Length of the instructions of `load` and `store` that may fault.
const ACCESS_BYTES: i64 = 3;

/// Reads the first word of a page; `None` if nothing is mapped there.
fn load(address: u64) -> Option<u64> {
    let (contents, failed): (u64, u64);
    // SAFETY: the page is of the arena, where no object of Rust lies, or not mapped: then the signal handler
    // skips the instruction and sets rdx.
    unsafe {
        asm!(
            "mov rax, [rdi]",
            in("rdi") address,
            inlateout("rax") 0u64 => contents,
            inlateout("rdx") 0u64 => failed,
            options(nostack),
        );
    }
    (failed == 0).then_some(contents)
}

/// Writes a page; `None` if nothing is mapped there.
fn store(address: u64, tag: u64) -> Option<()> {
    let failed: u64;
    // SAFETY: as in `load`.
    unsafe {
        asm!(
            "mov [rdi], rsi",
            in("rdi") address,
            in("rsi") tag,
            inlateout("rdx") 0u64 => failed,
            options(nostack),
        );
    }
    if failed != 0 {
        return None;
    }
    // SAFETY: the page is mapped, as the write to it went through and nothing else is done to it before this
    // has answered; it is of the arena, where no object of Rust lies.
    let whole = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, PAGE_SIZE) };
    spread(tag, whole);
    Some(())
}

/// Has SIGSEGV skip the instruction of `load` or `store` and set the register that tells.
fn skip_what_is_unmapped() {
    extern "C" fn skip(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel passes the registers of the interrupted thread, whose handler runs on it.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
        // SAFETY: it has just been executed.
        let code = unsafe { *(registers[libc::REG_RIP as usize] as *const [u8; 2]) };
        if !matches!(code, [0x48, 0x89 | 0x8b]) {
            end();
        }
        registers[libc::REG_RIP as usize] += ACCESS_BYTES;
        registers[libc::REG_RDX as usize] = 1;
    }
    // SAFETY: all zeros is a valid action, filled in here; the handler is one of three arguments, as the
    // flag says, and uses no memory but its registers.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = skip as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut());
    }
}
