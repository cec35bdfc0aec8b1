//! The system calls the library makes, by meaning.

use crate::arch;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use memfold_sys::hello::{FIRST_HELPER_USER, HELPER_USERS};
use memfold_sys::raw::{nr, syscall};
use memfold_sys::{Errno, PAGE_SIZE};

const PROT_NONE: usize = 0;
const PROT_READ_WRITE: usize = 3;
const MAP_SHARED: usize = 1;
const MAP_FIXED: usize = 0x10;
const MAP_FIXED_NOREPLACE: usize = 0x10_0000;
const MREMAP_MAYMOVE: usize = 1;
const MREMAP_FIXED: usize = 2;
const MREMAP_DONTUNMAP: usize = 4;
const MADV_NORMAL: usize = 0;
const MAP_PRIVATE_ANONYMOUS_NORESERVE: usize = 0x02 | 0x20 | 0x4000;
/// Has no effect on anonymous memory but how the kernel's own reclaim sees it.
const MADV_RANDOM: usize = 1;
/// Refused (EINVAL) for locked memory.
const MADV_DONTNEED: usize = 4;
const MADV_DONTFORK: usize = 10;
const MADV_DOFORK: usize = 11;
const MADV_UNMERGEABLE: usize = 13;
const MADV_NOHUGEPAGE: usize = 15;
const MADV_DONTDUMP: usize = 16;
const MADV_WIPEONFORK: usize = 18;
/// Refused (EINVAL) for locked memory; changes no contents.
const MADV_COLD: usize = 20;
const MADV_POPULATE_READ: usize = 22;
const MADV_POPULATE_WRITE: usize = 23;
/// Also where the program has locked all its memory.
const MADV_DONTNEED_LOCKED: usize = 24;
const SIG_SETMASK: usize = 2;
const SIGKILL: usize = 9;
const STDERR: usize = 2;

/// The first address of the page that an address is in.
pub fn page_of(address: usize) -> usize {
    address & !(PAGE_SIZE - 1)
}

/// Reserves address space without access, far from what the program maps: it may map something again where it has
/// unmapped, and take that for free.
pub fn reserve(length: usize) -> Result<usize, Errno> {
    /// From this library, which is beside the last thing that was mapped before it.
    const AWAY: usize = 64 << 30;
    /// Steps further away, as part of what this has reserved is there, also for a parent.
    const STEPS: usize = 4;
    let library = page_of(reserve as *const () as usize);
    for step in 1..=STEPS {
        let place = library.wrapping_sub(AWAY + 2 * step * length);
        if map_nothing(place, length, MAP_FIXED_NOREPLACE) == Ok(place) {
            return Ok(place);
        }
    }
    map_nothing(0, length, 0)
}

/// Maps private memory without access, at a place or anywhere.
fn map_nothing(place: usize, length: usize, flag: usize) -> Result<usize, Errno> {
    let flags = MAP_PRIVATE_ANONYMOUS_NORESERVE | flag;
    let arguments = [place, length, PROT_NONE, flags, usize::MAX, 0];
    // SAFETY: a new private mapping replaces none.
    Errno::result(unsafe { syscall(nr::MMAP, arguments) })
}

/// Makes part of a reservation readable and writable.
pub fn open_up(start: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the range lies in our own reservation.
    Errno::result(unsafe { syscall(nr::MPROTECT, [start, length, PROT_READ_WRITE, 0, 0, 0]) })
        .map(|_| ())
}

/// Maps a shared descriptor over part of a reservation.
pub fn map_shared(start: usize, length: usize, fd: i32) -> Result<(), Errno> {
    // SAFETY: the range lies in our own reservation, and nothing uses it yet.
    Errno::result(unsafe {
        syscall(
            nr::MMAP,
            [
                start,
                length,
                PROT_READ_WRITE,
                MAP_SHARED | MAP_FIXED,
                fd as usize,
                0,
            ],
        )
    })
    .map(|_| ())
}

/// Unmaps our own mapping.
pub fn unmap(start: usize, length: usize) {
    // SAFETY: callers pass mappings of this library that nothing uses any more.
    unsafe { syscall(nr::MUNMAP, [start, length, 0, 0, 0, 0]) };
}

fn advise(start: usize, length: usize, advice: usize) -> Result<(), Errno> {
    // SAFETY: the advices used here change no contents the program can see, except DONTNEED,
    // which callers apply to our own pages only. (What is kept from children is given to those that the library
    // prepares.)
    Errno::result(unsafe { syscall(nr::MADVISE, [start, length, advice, 0, 0, 0]) }).map(|_| ())
}

/// Drops the pages of our own range. Before Linux 5.18, not of one that is locked.
pub fn drop_pages(start: usize, length: usize) -> Result<(), Errno> {
    match advise(start, length, MADV_DONTNEED_LOCKED) {
        Err(Errno::EINVAL) => advise(start, length, MADV_DONTNEED),
        dropped => dropped,
    }
}

/// Fails (EINVAL) if part of a range of the program's is locked in memory, which a page must not be taken from.
pub fn check_unlocked(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_COLD)
}

/// Moves the pages of a range of the program's to our own range, in place of what is mapped there. The first range stays
/// mapped, and registered with its userfaultfd, and its pages are missing from one moment on: no access in between sees
/// anything else. The second one is then registered as the first is.
///
/// Where the userfaultfd asks for its event, this waits until that is read.
///
/// # Errors
/// Nothing was moved; what was mapped at the second range may be gone.
pub fn carry_off(from: usize, to: usize, length: usize) -> Result<(), Errno> {
    let flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    // SAFETY: the second range is our own, and nothing but its userfaultfd's reader looks at it; the program finds the
    // pages of the first one by way of its own userfaultfd.
    Errno::result(unsafe { syscall(nr::MREMAP, [from, length, length, flags, to, 0]) }).map(|_| ())
}

/// Maps empty memory where our own range was unmapped. `false` if anything is mapped there, which may not be ours.
pub fn map_again(start: usize, length: usize) -> bool {
    let flags = MAP_PRIVATE_ANONYMOUS_NORESERVE | MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing that is mapped.
    let mapped = Errno::result(unsafe {
        syscall(
            nr::MMAP,
            [start, length, PROT_READ_WRITE, flags, usize::MAX, 0],
        )
    });
    match mapped {
        Ok(at) if at == start => {
            let _ = keep_from_dumps(start, length);
            let _ = keep_from_children(start, length);
            forbid_huge(start, length);
            true
        }
        Ok(elsewhere) => {
            unmap(elsewhere, length);
            false
        }
        Err(_) => false,
    }
}

/// Has the kernel bring in pages of the program's, as a read would.
pub fn bring_in(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_POPULATE_READ)
}

/// Takes back [`mark`].
pub fn unmark(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_NORMAL)
}

/// Whether a page of our own, which is empty, is locked in memory.
pub fn is_locked(page: usize) -> bool {
    advise(page, PAGE_SIZE, MADV_DONTNEED) == Err(Errno::EINVAL)
}

/// Unlocks our own range.
pub fn unlock(start: usize, length: usize) {
    // SAFETY: the range lies in our own mapping, and need not be in memory.
    unsafe { syscall(nr::MUNLOCK, [start, length, 0, 0, 0, 0]) };
}

/// Keeps khugepaged and the fault handler from backing our own range with huge pages. (One that knows none
/// refuses.)
pub fn forbid_huge(start: usize, length: usize) {
    let _ = advise(start, length, MADV_NOHUGEPAGE);
}

/// Keeps the kernel from merging pages of our own range with others (`PR_SET_MEMORY_MERGE`), and makes
/// those it merged single again: merged ones cannot be moved. (One that merges none refuses.)
pub fn forbid_merging(start: usize, length: usize) {
    let _ = advise(start, length, MADV_UNMERGEABLE);
}

/// Keeps our own range mapped as it is for the life of the address space: nothing is mapped over it,
/// unmapped or moved, and its access stays.
///
/// # Errors
/// `ENOSYS` before Linux 6.10.
pub fn seal(start: usize, length: usize) -> Result<(), Errno> {
    // SAFETY: the range lies in our own mapping, which this library neither unmaps nor moves afterwards.
    Errno::result(unsafe { syscall(nr::MSEAL, [start, length, 0, 0, 0, 0]) }).map(|_| ())
}

/// Lets forked children have a range that was kept from them.
pub fn give_to_children(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_DOFORK)
}

/// Marks a range, for children that get it all the same: the mark is of the VMA, moves with it, and shows in
/// `smaps` (`rr`).
pub fn mark(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_RANDOM)
}

/// Keeps a range out of forked children.
pub fn keep_from_children(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_DONTFORK)
}

/// Lets children find our own range empty, whatever is in it here.
pub fn wipe_in_children(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_WIPEONFORK)
}

/// Keeps our own range out of core dumps (and apart from mappings without the mark).
pub fn keep_from_dumps(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_DONTDUMP)
}

/// Gives this process its own copy of each page of the range, as a write would, but of those that cannot be
/// written: it fails if that is none.
pub fn break_sharing(start: usize, length: usize) -> Result<(), Errno> {
    advise(start, length, MADV_POPULATE_WRITE).or_else(|errno| {
        // It stops at the first that is write-protected, for example, where the others can still be moved.
        let mut result = Err(errno);
        for page in (start..start + length).step_by(PAGE_SIZE) {
            result = result.or(advise(page, PAGE_SIZE, MADV_POPULATE_WRITE));
        }
        result
    })
}

/// Blocks all signals of the calling thread and returns the old mask.
pub fn block_signals() -> u64 {
    block_signals_but(0)
}

/// Blocks all signals of the calling thread but those in a mask.
pub fn block_signals_but(others: u64) -> u64 {
    let all = !others;
    let mut old = 0u64;
    set_mask(&all, Some(&mut old));
    old
}

/// Restores what [`block_signals`] returned.
pub fn restore_signals(mask: u64) {
    set_mask(&mask, None);
}

fn set_mask(new: &u64, old: Option<&mut u64>) {
    let old = old.map_or(0, |o| core::ptr::from_mut::<u64>(o) as usize);
    // SAFETY: both pointers are to live 8-byte masks, the size passed to the kernel.
    unsafe {
        syscall(
            nr::RT_SIGPROCMASK,
            [
                SIG_SETMASK,
                core::ptr::from_ref::<u64>(new) as usize,
                old,
                8,
                0,
                0,
            ],
        )
    };
}

/// The calling thread's number, as it knows itself.
pub fn own_thread() -> u64 {
    // SAFETY: takes nothing.
    unsafe { syscall(nr::GETTID, [0; 6]) as u64 }
}

/// The process's number, as it knows itself.
pub fn own_process() -> u32 {
    // SAFETY: takes nothing.
    unsafe { syscall(nr::GETPID, [0; 6]) as u32 }
}

/// Shows a file to `look`, part by part.
pub fn read_file(path: &CStr, mut look: impl FnMut(&[u8])) -> Result<(), Errno> {
    const AT_FDCWD: isize = -100;
    const O_RDONLY_CLOEXEC: usize = 0o2_000_000;
    let path = path.as_ptr() as usize;
    // SAFETY: a terminated path and flags.
    let file = unsafe {
        syscall(
            nr::OPENAT,
            [AT_FDCWD as usize, path, O_RDONLY_CLOEXEC, 0, 0, 0],
        )
    };
    let file = Errno::result(file)?;
    // Not filled beforehand, as there is no C library to do it.
    let mut buffer = MaybeUninit::<[u8; 512]>::uninit();
    let start = buffer.as_mut_ptr().cast::<u8>();
    let result = loop {
        // SAFETY: the kernel writes at most that length into a live buffer.
        let read = unsafe { syscall(nr::READ, [file, start as usize, 512, 0, 0, 0]) };
        match Errno::result(read) {
            Ok(0) => break Ok(()),
            // SAFETY: that many bytes of the buffer were written just now.
            Ok(read) => look(unsafe { core::slice::from_raw_parts(start, read) }),
            Err(errno) => break Err(errno),
        }
    };
    close(file as i32);
    result
}

/// Whether the program runs under Valgrind, which aborts a program that creates a thread without the C
/// library.
pub fn is_emulated() -> bool {
    const RUNNING_ON_VALGRIND: usize = 0x1001;
    let request = [RUNNING_ON_VALGRIND, 0, 0, 0, 0, 0];
    arch::ask_valgrind(&request) != 0
}

/// Names the calling thread, for `ps -L`, `top -H` and debuggers.
pub fn name_thread(name: &CStr) {
    const PR_SET_NAME: usize = 15;
    // SAFETY: a terminated name.
    unsafe { syscall(nr::PRCTL, [PR_SET_NAME, name.as_ptr() as usize, 0, 0, 0, 0]) };
}

/// Whether the calling thread's system calls are filtered.
pub fn is_filtered() -> bool {
    const PR_GET_SECCOMP: usize = 21;
    // SAFETY: queries only.
    unsafe { syscall(nr::PRCTL, [PR_GET_SECCOMP, 0, 0, 0, 0, 0]) != 0 }
}

/// The user namespace of this process, by the number of its inode.
pub fn own_user_namespace() -> Result<u64, Errno> {
    const ANY_FOLDER: usize = usize::MAX;
    // Not filled beforehand, as there is no C library to do it.
    let mut buffer = MaybeUninit::<[u8; 64]>::uninit();
    let start = buffer.as_mut_ptr().cast::<u8>();
    let path = c"/proc/self/ns/user".as_ptr() as usize;
    // SAFETY: a terminated path, which is absolute; the kernel writes at most that length into a live buffer.
    let read = unsafe { syscall(nr::READLINKAT, [ANY_FOLDER, path, start as usize, 64, 0, 0]) };
    let read = Errno::result(read)?;
    // SAFETY: that many bytes of the buffer were written just now.
    let link = unsafe { core::slice::from_raw_parts(start, read) };
    let digits = link.iter().filter(|byte| byte.is_ascii_digit());
    Ok(digits.fold(0, |number: u64, byte| {
        number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'))
    }))
}

/// Gives up what the calling thread needs no more. A program that drops its privileges later drops those
/// of its other threads alone, and code that takes it over can then make this one do anything: so it must
/// have nothing that the program has not.
///
/// A helper that may change its user (root's, also by its real or its saved user alone) takes one that no other process
/// has: of the program's own user it could do what that user may (root's files), and of one that others have, it could be
/// traced by them, and by way of it the program. Where there are no such users (in a user namespace), and for others than
/// root with capabilities, the supervisor ends this thread when the program's change. A thread without the
/// capabilities that the program has could be traced by any process of its user.
///
/// A supervisor that may inspect its own user's processes alone (`inspects_others` is false) reads this program by way
/// of this thread: there it keeps its user, and has no capabilities.
pub fn give_up_privileges(inspects_others: bool) {
    const PR_SET_NO_NEW_PRIVS: usize = 38;
    const PR_GET_SECUREBITS: usize = 27;
    const VERSION_3: u32 = 0x2008_0522;
    // Of the calling thread.
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, twice 32 bits of each.
    let none = [0u32; 6];
    let users = own_users();
    let is_root = users.is_none_or(|users| users.contains(&0));
    // SAFETY: numbers, and live structures of which the kernel reads the lengths that it knows.
    unsafe {
        syscall(nr::PRCTL, [PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0]);
        // A process none of whose users is root any more has lost its capabilities by that.
        let keeps_them = || syscall(nr::PRCTL, [PR_GET_SECUREBITS, 0, 0, 0, 0, 0]) != 0;
        let changes = |users: [u32; 3]| inspects_others && become_an_unused_user(users[EFFECTIVE]);
        if is_root && (!users.is_some_and(changes) || keeps_them()) {
            let (header, none) = (header.as_ptr() as usize, none.as_ptr() as usize);
            syscall(nr::CAPSET, [header, none, 0, 0, 0, 0]);
        }
    }
}

/// Which of [`own_users`] system calls are judged by.
const EFFECTIVE: usize = 1;

/// The calling thread's real, effective and saved user; `None` where a filter of the program's keeps the kernel from telling.
fn own_users() -> Option<[u32; 3]> {
    let mut users = [0; 3];
    let [real, effective, saved] = &mut users;
    let places = [real, effective, saved].map(|user| core::ptr::from_mut::<u32>(user) as usize);
    let [real, effective, saved] = places;
    // SAFETY: the kernel writes a number to each of three live ones.
    let told = unsafe { syscall(nr::GETRESUID, [real, effective, saved, 0, 0, 0]) };
    (told == 0).then_some(users)
}

/// Lets the calling thread, whose real, effective or saved user is root, take a user and group that no other process
/// has; `false` if it cannot: its effective user is the same as before. Whether the program may be dumped stays as it is:
/// the kernel takes that away from a process of which a thread changes its user.
fn become_an_unused_user(effective: u32) -> bool {
    const PR_GET_DUMPABLE: usize = 3;
    const PR_SET_DUMPABLE: usize = 4;
    const ROOT: usize = 0;
    const SAME: usize = u32::MAX as usize;
    let mut random = 0u32;
    // SAFETY: numbers, and a live buffer of that length. Of the system calls, each changes the calling
    // thread alone.
    unsafe {
        let length = core::mem::size_of_val(&random);
        let filled = syscall(
            nr::GETRANDOM,
            [(&raw mut random) as usize, length, 0, 0, 0, 0],
        );
        if filled != length as isize {
            return false;
        }
        let user = (FIRST_HELPER_USER + random % HELPER_USERS) as usize;
        let dumpable = syscall(nr::PRCTL, [PR_GET_DUMPABLE, 0, 0, 0, 0, 0]);
        // It is root's effective user that has the right to change the others.
        let done = syscall(nr::SETRESUID, [SAME, ROOT, SAME, 0, 0, 0]) == 0
            && syscall(nr::SETRESGID, [user, user, user, 0, 0, 0]) == 0
            && syscall(nr::SETGROUPS, [0; 6]) == 0
            && syscall(nr::SETRESUID, [user, user, user, 0, 0, 0]) == 0;
        if !done {
            syscall(nr::SETRESUID, [SAME, effective as usize, SAME, 0, 0, 0]);
        }
        // (The kernel makes it the value of `fs.suid_dumpable`, which may be more than it was.)
        if dumpable == 0 || dumpable == 1 {
            syscall(nr::PRCTL, [PR_SET_DUMPABLE, dumpable as usize, 0, 0, 0, 0]);
        }
        done
    }
}

/// Closes all descriptors of the calling thread's table.
pub fn close_all() -> Result<(), Errno> {
    // SAFETY: called by the helper on its own table only.
    Errno::result(unsafe { syscall(nr::CLOSE_RANGE, [0, u32::MAX as usize, 0, 0, 0, 0]) })
        .map(|_| ())
}

/// Keeps the helper from holding on to the directory in which the program was when it started it.
pub fn leave_working_directory() {
    // SAFETY: a terminated path; called by the helper, which has a working directory of its own.
    unsafe { syscall(nr::CHDIR, [c"/".as_ptr() as usize, 0, 0, 0, 0, 0]) };
}

/// Whether the helper's table has room for that many more descriptors.
pub fn has_room_for(descriptors: usize, any: i32) -> Result<(), Errno> {
    if descriptors == 0 {
        return Ok(());
    }
    // SAFETY: a descriptor of the helper's own table.
    let copy = Errno::result(unsafe { syscall(nr::DUP, [any as usize, 0, 0, 0, 0, 0]) })?;
    let rest = has_room_for(descriptors - 1, any);
    close(copy as i32);
    rest
}

/// Closes one descriptor of this library's.
pub fn close(fd: i32) {
    // SAFETY: as above.
    unsafe { syscall(nr::CLOSE, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// Ends the calling thread. The status counts where it is the last.
pub fn exit_thread(status: usize) -> ! {
    loop {
        // SAFETY: ends only this thread.
        unsafe { syscall(nr::EXIT, [status, 0, 0, 0, 0, 0]) };
    }
}

/// Ends the program, of which the calling thread is the last, with a status as `wait` has it. One of a
/// signal is that of a thread that the kernel ended alone, for a system call that a filter forbids.
pub fn end_program(status: u32) -> ! {
    let signal = status & 0x7f;
    if signal == 0 {
        exit_thread(status as usize >> 8);
    }
    let by_default = [0usize; 4];
    let others = !(1u64 << (signal - 1));
    set_mask(&others, None);
    // SAFETY: a live structure of the kernel's, which means "default action", and numbers. No other thread is left
    // whose handler this was.
    unsafe {
        let action = by_default.as_ptr() as usize;
        syscall(nr::RT_SIGACTION, [signal as usize, action, 0, 8, 0, 0]);
        let pid = syscall(nr::GETPID, [0; 6]);
        if pid > 0 {
            syscall(nr::KILL, [pid as usize, signal as usize, 0, 0, 0, 0]);
        }
    }
    kill_program()
}

/// Writes to what the *program* has as standard error (the helper's own table has none), unless that would wait for a
/// reader (a full pipe, a terminal after Ctrl-S): the program would run on meanwhile.
fn complain(text: &[u8]) {
    // SAFETY: queries and descriptors of our own process; the text outlives the write.
    unsafe {
        let pid = syscall(nr::GETPID, [0; 6]) as usize;
        let Ok(handle) = Errno::result(syscall(nr::PIDFD_OPEN, [pid, 0, 0, 0, 0, 0])) else {
            return;
        };
        let Ok(stderr) = Errno::result(syscall(nr::PIDFD_GETFD, [handle, STDERR, 0, 0, 0, 0]))
        else {
            return;
        };
        if can_write(stderr) {
            let text_at = text.as_ptr() as usize;
            syscall(nr::WRITE, [stderr, text_at, text.len(), 0, 0, 0]);
        }
    }
}

/// Whether a write of less than a page would not wait.
fn can_write(fd: usize) -> bool {
    const POLLOUT: i16 = 4;
    #[repr(C)]
    struct Polled {
        fd: i32,
        events: i16,
        found: i16,
    }
    let mut polled = Polled {
        fd: fd as i32,
        events: POLLOUT,
        found: 0,
    };
    let mut at_once = [0usize; 2];
    let (polled_at, time) = ((&raw mut polled) as usize, at_once.as_mut_ptr() as usize);
    // SAFETY: one live structure of the kernel's layout, and a time, which it may write to.
    let ready = unsafe { syscall(nr::PPOLL, [polled_at, 1, time, 0, 0, 0]) };
    ready == 1 && polled.found & POLLOUT != 0
}

/// Kills the whole program, and says why.
pub fn die(reason: &[u8]) -> ! {
    complain(reason);
    kill_program()
}

/// Kills the whole program, at once, also where a filter refuses system calls.
pub fn kill_program() -> ! {
    // SAFETY: the calls take numbers only. What a filter answers in place of the process's own number
    // is not used, as it could mean others.
    unsafe {
        let pid = syscall(nr::GETPID, [0; 6]);
        if pid > 0 {
            syscall(nr::KILL, [pid as usize, SIGKILL, 0, 0, 0, 0]);
        }
        syscall(nr::EXIT_GROUP, [128 + SIGKILL, 0, 0, 0, 0, 0]);
    }
    arch::end_by_signal()
}
