//! A process that outlives this one by a moment, and kills the programs that depend on it.
//!
//! A child that has no helper depends on userfaultfds that only the supervisor holds: when it dies,
//! the kernel closes them and the child's missing pages read as zero. The guardian shares the
//! supervisor's descriptor table, so that they stay open, waits for the supervisor's end, kills the
//! children on its list, sees them gone, and ends.
//!
//! It keeps every userfaultfd open until the address space is gone, and ends what waits there (`spaces`). So a thread
//! that touches a missing page does not read zeros, also where the supervisor dies before it knows that a process depends
//! on it: one that was just forked without a helper, or shares the memory of one that has just ended.
//!
//! A helper that waits for a page which only the supervisor brings does not see the supervisor's end. The
//! guardian kills its program a moment later than the helper would, as the helper reports why.
//!
//! It also shares the supervisor's memory, where the list is: it costs a stack of its own and
//! nothing more, and there is nothing to send to it. (The OOM killer kills *all* processes that share an
//! mm, the guardian among them.)

use crate::PAGE_SIZE;
use crate::memory::Mapping;
use crate::process::{own_id, pidfd_of};
use crate::raw::{self, nr, syscall};
use crate::sync::lock;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

mod spaces;

const STACK: usize = 4 * PAGE_SIZE;
const LIST: usize = PAGE_SIZE;
/// As the size of the mapping comes out.
const PLACES: usize = LIST / size_of::<AtomicI32>() - 4;
const FREE: i32 = -1;
/// Added to the descriptor of a userfaultfd; that of a process stands as it is.
const SPACE: i32 = 1 << 30;
/// Added to the descriptor of a process that has a helper.
const HELPED: i32 = 1 << 29;
/// How long helpers have to end their programs themselves, in seconds. A longer time lets a program run on
/// without its memory's keeper: it waits where it touches what is out.
const HELPERS_TIME: i64 = 1;
const SIGKILL: usize = 9;
const POLLIN: u64 = 1;

const CLONE_VM: usize = 0x100;
const CLONE_FS: usize = 0x200;
const CLONE_FILES: usize = 0x400;

/// What the guardian reads, each in a mapping of its own.
#[repr(C)]
#[derive(Debug)]
struct List {
    /// The next list, or null.
    next: AtomicPtr<List>,
    /// A descriptor of the process whose end it waits for.
    supervisor: AtomicI32,
    unused: AtomicI32,
    /// Descriptors of the processes to kill, and of the address spaces whose end to wait for.
    places: [AtomicI32; PLACES],
}

const _: () = assert!(size_of::<List>() == LIST);

impl List {
    /// A mapping that begins with an empty list, with `behind` more bytes behind it.
    fn map(behind: usize) -> io::Result<Mapping> {
        let mapping = Mapping::anonymous(LIST + behind)?;
        // SAFETY: the mapping is page aligned, at least LIST long and outlives this reference; any bytes are a valid list
        // of atomics.
        let list = unsafe { mapping.start().cast::<List>().as_ref() };
        for place in &list.places {
            place.store(FREE, Ordering::Relaxed);
        }
        Ok(mapping)
    }

    /// The list in what [`List::map`] has mapped. Never unmapped: the guardian uses it after this process's end.
    fn keep(mapping: Mapping) -> &'static List {
        let mapping: &'static Mapping = Box::leak(Box::new(mapping));
        // SAFETY: `map` has made a list there, and the mapping is never unmapped.
        unsafe { mapping.start().cast::<List>().as_ref() }
    }

    /// This list and those behind it.
    fn all(&'static self) -> impl Iterator<Item = &'static List> {
        std::iter::successors(Some(self), |list| {
            // SAFETY: null, or a list made by `new`.
            unsafe { list.next.load(Ordering::SeqCst).as_ref() }
        })
    }

    fn free_place(&'static self) -> Option<&'static AtomicI32> {
        let mut places = self.all().flat_map(|list| &list.places);
        places.find(|place| place.load(Ordering::Relaxed) == FREE)
    }
}

/// What a descriptor on the list is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Process,
    Helped,
    Space,
}

impl Kind {
    /// The kind of an entry, and its descriptor.
    fn of(value: i32) -> (Kind, i32) {
        let kind = if value & SPACE != 0 {
            Kind::Space
        } else if value & HELPED != 0 {
            Kind::Helped
        } else {
            Kind::Process
        };
        (kind, value & !(SPACE | HELPED))
    }
}

/// The guardian process, once there is something to guard.
#[derive(Debug, Default)]
pub struct Guardian {
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    list: &'static List,
    process: i32,
}

/// A place on the list that is taken as long as this lives.
#[derive(Debug)]
pub struct Held(&'static AtomicI32);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::SeqCst);
    }
}

/// A process that is guarded as long as this lives.
#[derive(Debug)]
pub struct Guarded {
    _place: Held,
    /// Closed after its place is free.
    _descriptor: OwnedFd,
}

impl Running {
    fn start() -> io::Result<Running> {
        let mapping = List::map(STACK)?;
        let own = pidfd_of(own_id())?;
        let start = mapping.start();
        // SAFETY: `map` has made a list there, and the mapping outlives this use.
        let supervisor = unsafe { &start.cast::<List>().as_ref().supervisor };
        supervisor.store(own.as_raw_fd(), Ordering::Relaxed);
        let stack_top = start.as_ptr() as usize + LIST + STACK;
        let flags = CLONE_VM | CLONE_FS | CLONE_FILES;
        // Signals to all of this process's group are not meant for the guardian.
        let mask = block_signals();
        // SAFETY: the stack is new and stays mapped, as does the list, if there is a process that uses them: it is kept
        // below then. `guard` never returns and uses nothing of the C library's.
        let process = unsafe { raw::clone(flags, stack_top, guard, start.as_ptr()) };
        restore_signals(&mask);
        let process = i32::try_from(process).unwrap_or(-1);
        if process <= 0 {
            return Err(io::Error::from_raw_os_error(-process));
        }
        // Never closed, as the guardian needs it as long as it runs.
        let _ = own.into_raw_fd();
        let list = List::keep(mapping);
        Ok(Running { list, process })
    }

    /// Puts a value into a free place, of a new list if need be.
    fn place(&self, value: i32) -> io::Result<&'static AtomicI32> {
        if let Some(place) = self.list.free_place() {
            place.store(value, Ordering::SeqCst);
            return Ok(place);
        }
        let list = List::keep(List::map(0)?);
        list.places[0].store(value, Ordering::SeqCst);
        let last = self.list.all().last().unwrap_or(self.list);
        last.next
            .store(std::ptr::from_ref(list).cast_mut(), Ordering::SeqCst);
        Ok(&list.places[0])
    }
}

impl Guardian {
    /// Sees to it that `process` (a pidfd) does not outlive this process. Starts the guardian if
    /// this is its first.
    ///
    /// # Errors
    /// If it cannot be started, or there is no memory for a longer list.
    pub fn guard(&self, process: OwnedFd) -> io::Result<Guarded> {
        self.add(process, 0)
    }

    /// The same for a process with a helper, which ends it first unless it waits for this process itself.
    ///
    /// # Errors
    /// As [`Guardian::guard`].
    pub fn guard_helped(&self, process: OwnedFd) -> io::Result<Guarded> {
        self.add(process, HELPED)
    }

    /// Sees to it that an address space reads no zeros after this process's end: `uffd` stays open until it is no
    /// more, and a second later a missing page is a `SIGBUS` (from Linux 6.6; before, it blocks). What this returns is
    /// dropped before `uffd` is closed.
    ///
    /// # Errors
    /// As [`Guardian::guard`].
    pub fn hold(&self, uffd: BorrowedFd<'_>) -> io::Result<Held> {
        self.place(uffd.as_raw_fd() | SPACE).map(Held)
    }

    /// As [`Guardian::hold`], of an address space that nothing else is known of: `uffd` is never closed by
    /// this process, whatever happens: a thread that waits for a page would then read zeros.
    ///
    /// # Errors
    /// As [`Guardian::guard`]: then it is closed with this process.
    pub fn hold_for_good(&self, uffd: OwnedFd) -> io::Result<()> {
        self.place(uffd.into_raw_fd() | SPACE).map(|_| ())
    }

    fn add(&self, descriptor: OwnedFd, kind: i32) -> io::Result<Guarded> {
        Ok(Guarded {
            _place: Held(self.place(descriptor.as_raw_fd() | kind)?),
            _descriptor: descriptor,
        })
    }

    /// Puts a value on the guardian's list. Starts the guardian if this is its first.
    fn place(&self, value: i32) -> io::Result<&'static AtomicI32> {
        let mut running = lock(&self.running);
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(Running::start()?),
        };
        running.place(value)
    }

    /// The guardian's PID, if it was started.
    pub fn process(&self) -> Option<i32> {
        let running = lock(&self.running);
        running.as_ref().map(|running| running.process)
    }
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: live sets; the calling thread's mask is restored by the caller.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    }
}

fn restore_signals(mask: &libc::sigset_t) {
    // SAFETY: a live set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}

/// The guardian's life. It runs without the C library: no thread-local storage, no allocation.
extern "C" fn guard(list: *const u8) -> ! {
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "Running::start passes a list, at the start of a mapping"
    )]
    // SAFETY: `Running::start` passes its list, which is never unmapped.
    let list = unsafe { &*list.cast::<List>() };
    // SAFETY: takes nothing. A session of its own keeps signals to this process's group from it.
    unsafe { syscall(nr::SETSID, [0; 6]) };
    while !is_ended(list.supervisor.load(Ordering::Relaxed), None) {}
    let is_process = |kind| kind == Kind::Process;
    each(list, |process, kind| {
        if is_process(kind) {
            kill(process);
        }
    });
    // The descriptors that their faults wait for are closed when this process ends, not before
    // they have. A process that does not end within seconds is stuck in the kernel.
    each(list, |process, kind| {
        if is_process(kind) {
            is_ended(process, Some(5));
        }
    });
    let mut patience = HELPERS_TIME;
    each(list, |process, kind| {
        if kind == Kind::Helped && !is_ended(process, Some(patience)) {
            // The others had their time meanwhile.
            patience = 0;
            kill(process);
            is_ended(process, Some(5));
        }
    });
    close_all_but_spaces(list);
    spaces::see_them_gone(list);
    loop {
        // SAFETY: ends this process.
        unsafe { syscall(nr::EXIT_GROUP, [0; 6]) };
    }
}

/// Closes what nothing is held by: a program that is being admitted waits for an answer on a socket, and what reads a
/// pipe for its end.
fn close_all_but_spaces(list: &'static List) {
    let mut from = 0;
    loop {
        let mut held = i32::MAX;
        each(list, |uffd, kind| {
            if kind == Kind::Space && (from..held).contains(&uffd) {
                held = uffd;
            }
        });
        if held == i32::MAX && from == 0 {
            // The end of this process closes all, and waits for no socket that lingers.
            return;
        }
        if held > from {
            let last = if held == i32::MAX {
                u32::MAX as usize
            } else {
                held as usize - 1
            };
            // SAFETY: numbers. This process alone has the descriptors, and uses only those that are held from here on.
            unsafe { syscall(nr::CLOSE_RANGE, [from as usize, last, 0, 0, 0, 0]) };
        }
        if held == i32::MAX {
            return;
        }
        from = held + 1;
    }
}

fn kill(process: i32) {
    // SAFETY: a descriptor and numbers.
    unsafe {
        syscall(
            nr::PIDFD_SEND_SIGNAL,
            [process as usize, SIGKILL, 0, 0, 0, 0],
        )
    };
}

/// Hands over each descriptor that is listed, and what it is of.
fn each(list: &'static List, mut act: impl FnMut(i32, Kind)) {
    for place in list.all().flat_map(|list| &list.places) {
        let value = place.load(Ordering::SeqCst);
        if value != FREE {
            let (kind, descriptor) = Kind::of(value);
            act(descriptor, kind);
        }
    }
}

/// Sleeps a tenth of a second.
fn pause() {
    let time = [0i64, 100_000_000];
    // SAFETY: no descriptors, and a live time.
    unsafe { syscall(nr::PPOLL, [0, 0, time.as_ptr() as usize, 0, 8, 0]) };
}

/// Waits for the end of a process, at most that many seconds.
fn is_ended(process: i32, seconds: Option<i64>) -> bool {
    let (ready, _) = poll(process, seconds);
    // An error but an interruption cannot be waited out.
    ready != 0 && ready != -4
}

/// Waits until a descriptor has something to read, at most that many seconds. Returns what the kernel does, and what is
/// there.
fn poll(descriptor: i32, seconds: Option<i64>) -> (isize, u64) {
    let mut poll = u64::from(descriptor as u32) | POLLIN << 32;
    let time = seconds.map(|seconds| [seconds, 0]);
    let timeout = time.as_ref().map_or(0, |time| time.as_ptr() as usize);
    // SAFETY: a live `pollfd` (descriptor, then events and results) and a live time, or none.
    let ready = unsafe { syscall(nr::PPOLL, [&raw mut poll as usize, 1, timeout, 0, 8, 0]) };
    (ready, poll >> 48)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd};
    use std::process::{Command, Stdio};
    use std::time::Duration;

    fn pidfd(pid: i32) -> OwnedFd {
        // SAFETY: numbers only; the descriptor is fresh.
        unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd)
        }
    }

    #[test]
    fn as_many_are_guarded_as_there_are() {
        let running = Running {
            list: List::keep(List::map(0).unwrap()),
            process: 0,
        };
        let places: Vec<_> = (0..5000)
            .map(|descriptor| {
                running
                    .place(descriptor | (SPACE * (descriptor & 1)))
                    .unwrap()
            })
            .collect();
        let mut seen = Vec::new();
        each(running.list, |descriptor, kind| {
            let expected = [Kind::Process, Kind::Space][descriptor as usize & 1];
            assert_eq!(kind, expected);
            seen.push(descriptor);
        });
        assert!(seen.into_iter().eq(0..5000));
        for place in &places[..4000] {
            place.store(FREE, Ordering::SeqCst);
        }
        assert!(std::ptr::eq(running.place(7).unwrap(), places[0]));
        let mut left = 0;
        each(running.list, |_, _| left += 1);
        assert_eq!(left, 1001);
    }

    /// Runs this test's binary anew, as one that may have no more processes.
    #[test]
    fn a_guardian_that_cannot_be_started_leaves_nothing_open() {
        const ROLE: &str = "MEMFOLD_TEST_GUARDIAN_FAILS";
        if std::env::var_os(ROLE).is_some() {
            const OTHER: u32 = 65534;
            // SAFETY: numbers, and a live limit. Root's processes are not limited; if this is not root's, it stays as it is.
            unsafe {
                let none: libc::rlimit = std::mem::zeroed();
                libc::setresuid(OTHER, OTHER, OTHER);
                assert_eq!(libc::setrlimit(libc::RLIMIT_NPROC, &raw const none), 0);
            }
            let open = || std::fs::File::open("/dev/null").unwrap();
            let (held, lowest) = (open(), open().as_raw_fd());
            let guardian = Guardian::default();
            for _ in 0..50 {
                let error = guardian.hold(held.as_fd()).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
            }
            assert_eq!(open().as_raw_fd(), lowest, "descriptors are left open");
            return;
        }
        let status = Command::new(std::env::current_exe().unwrap())
            .arg("--exact")
            .arg("guardian::tests::a_guardian_that_cannot_be_started_leaves_nothing_open")
            .args(["--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
    }

    /// Runs this test's binary anew: the process that is to die. An address space that is its own is never gone for
    /// its guardian, which shares it.
    #[test]
    fn nothing_but_address_spaces_stays_open() {
        const ROLE: &str = "MEMFOLD_TEST_GUARDIAN_HOLDS";
        if std::env::var_os(ROLE).is_some() {
            let guardian = Guardian::default();
            // SAFETY: numbers only; the descriptor is fresh. Any process may have one for its own faults.
            let held = unsafe {
                let uffd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) as i32;
                assert!(uffd >= 0);
                OwnedFd::from_raw_fd(uffd)
            };
            guardian.hold_for_good(held).unwrap();
            println!("guardian {}", guardian.process().unwrap());
            std::process::exit(0);
        }
        let mut dying = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "guardian::tests::nothing_but_address_spaces_stays_open",
                "--nocapture",
            ])
            .env(ROLE, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = dying.stdout.take().unwrap();
        let (told, tells) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let mut part = [0; 512];
            while let Ok(length @ 1..) = std::io::Read::read(&mut output, &mut part) {
                text += &String::from_utf8_lossy(&part[..length]);
                let _ = told.send((text.clone(), false));
            }
            let _ = told.send((text, true));
        });
        dying.wait().unwrap();
        let (mut text, mut is_closed) = (String::new(), false);
        while let Ok(found) = tells.recv_timeout(Duration::from_secs(10)) {
            (text, is_closed) = found;
            if is_closed {
                break;
            }
        }
        let number = text
            .split("guardian ")
            .nth(1)
            .and_then(|rest| rest.lines().next());
        let guardian: i32 = number.and_then(|number| number.parse().ok()).expect(&text);
        // SAFETY: numbers only; the guardian holds what is never gone, so it is there.
        assert_eq!(unsafe { libc::kill(guardian, SIGKILL as i32) }, 0);
        assert!(is_closed, "the guardian keeps the pipe: {text}");
    }

    /// Runs this test's binary anew: the process that is to die.
    #[test]
    #[expect(
        clippy::zombie_processes,
        reason = "the children outlive the one that would wait for them"
    )]
    fn what_is_guarded_ends_with_its_supervisor() {
        const ROLE: &str = "MEMFOLD_TEST_GUARDIAN";
        if std::env::var_os(ROLE).is_some() {
            let guardian = Guardian::default();
            let spared = Command::new("sleep").arg("60").spawn().unwrap();
            let child = Command::new("sleep").arg("60").spawn().unwrap();
            let released = guardian.guard(pidfd(spared.id() as i32)).unwrap();
            let _guarded = guardian.guard(pidfd(child.id() as i32)).unwrap();
            // Whose helper does nothing about it.
            let helped = [(); 2].map(|()| Command::new("sleep").arg("60").spawn().unwrap());
            let _helped = helped
                .each_ref()
                .map(|child| guardian.guard_helped(pidfd(child.id() as i32)).unwrap());
            drop(released);
            println!(
                "pids {} {} {} {} {}",
                spared.id(),
                child.id(),
                helped[0].id(),
                helped[1].id(),
                guardian.process().unwrap()
            );
            // SAFETY: ends this process at once, as any other signal of the kind would.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--nocapture", "--exact"])
            .arg("guardian::tests::what_is_guarded_ends_with_its_supervisor")
            .env(ROLE, "1")
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .stdout(
                std::fs::File::create(std::env::temp_dir().join("memfold-guardian-test")).unwrap(),
            )
            .status()
            .unwrap();
        assert!(!output.success());
        let path = std::env::temp_dir().join("memfold-guardian-test");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let line = text.lines().find_map(|line| line.split("pids ").nth(1));
        let pids: Vec<i32> = line
            .unwrap()
            .split(' ')
            .map(|pid| pid.parse().unwrap())
            .collect();
        let state = |pid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(") ").next().unwrap_or("").chars().next()
        };
        let gone = |pid: i32| matches!(state(pid), None | Some('Z'));
        let began = std::time::Instant::now();
        while !pids[1..].iter().all(|pid| gone(*pid)) {
            assert!(began.elapsed().as_secs() < 10, "still there: {pids:?}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(!gone(pids[0]), "what is not guarded any more lives on");
        // SAFETY: numbers only; its own grandchild.
        unsafe { libc::kill(pids[0], libc::SIGKILL) };
    }
}
