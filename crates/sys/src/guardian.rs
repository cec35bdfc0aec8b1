//! A process that outlives this one by a moment, and ends those who cannot do without it.
//!
//! A child that has no helper depends on userfaultfds that only the supervisor holds: when it dies,
//! the kernel closes them and the child's missing pages read as zero. The guardian shares the
//! supervisor's descriptor table, so that they stay open, waits for the supervisor's end, kills the
//! children on its list, sees them gone, and ends.
//!
//! It also shares the supervisor's memory, where the list is: it costs a stack of its own and
//! nothing more, and there is nothing to send to it. (Whoever kills *all* processes that use that
//! memory, as the kernel does when it runs out, kills it too.)

use crate::PAGE_SIZE;
use crate::memory::Mapping;
use crate::raw::{self, nr, syscall};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

const STACK: usize = 4 * PAGE_SIZE;
const LIST: usize = 4 * PAGE_SIZE;
const PLACES: usize = LIST / size_of::<AtomicI32>() - 2;
const FREE: i32 = -1;
const SIGKILL: usize = 9;
const POLLIN: u64 = 1;

const CLONE_VM: usize = 0x100;
const CLONE_FS: usize = 0x200;
const CLONE_FILES: usize = 0x400;

/// What the guardian reads, at the start of its own mapping.
#[repr(C)]
struct List {
    /// A descriptor of the process whose end it waits for.
    supervisor: AtomicI32,
    unused: AtomicI32,
    /// Descriptors of the processes to kill.
    places: [AtomicI32; PLACES],
}

const _: () = assert!(size_of::<List>() == LIST);

/// The guardian process, once there is something to guard.
#[derive(Default)]
pub struct Guardian {
    running: Mutex<Option<Running>>,
}

struct Running {
    /// List and stack. Never unmapped: the guardian uses it after this process's end.
    mapping: &'static Mapping,
    process: i32,
    next: usize,
}

/// A process that is guarded as long as this lives.
pub struct Guarded {
    place: &'static AtomicI32,
    /// Closed after its place is free.
    _process: OwnedFd,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.place.store(FREE, Ordering::SeqCst);
    }
}

impl Running {
    fn list(&self) -> &'static List {
        // SAFETY: the mapping is page aligned, at least LIST long and never unmapped; any bytes are
        // a valid list of atomics.
        unsafe { self.mapping.start().cast::<List>().as_ref() }
    }

    fn start() -> io::Result<Running> {
        let mapping: &'static Mapping = Box::leak(Box::new(Mapping::anonymous(LIST + STACK)?));
        // SAFETY: numbers only.
        let own = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) } as i32;
        if own < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut running = Running {
            mapping,
            process: 0,
            next: 0,
        };
        let list = running.list();
        for place in &list.places {
            place.store(FREE, Ordering::Relaxed);
        }
        list.supervisor.store(own, Ordering::Relaxed);
        let stack_top = mapping.start().as_ptr() as usize + LIST + STACK;
        let flags = CLONE_VM | CLONE_FS | CLONE_FILES;
        // Signals to all of this process's group are not meant for the guardian.
        let mask = block_signals();
        // SAFETY: the stack is new and stays mapped, as does the list; `guard` never returns and
        // uses nothing of the C library's.
        let process = unsafe { raw::clone(flags, stack_top, guard, (&raw const *list).cast()) };
        restore_signals(&mask);
        running.process = i32::try_from(process).unwrap_or(-1);
        if running.process <= 0 {
            return Err(io::Error::from_raw_os_error(-(process as i32)));
        }
        Ok(running)
    }
}

impl Guardian {
    /// Sees to it that `process` (a pidfd) does not outlive this process. Starts the guardian if
    /// this is its first.
    ///
    /// # Errors
    /// If it cannot be started, or guards as many as it can.
    pub fn guard(&self, process: OwnedFd) -> io::Result<Guarded> {
        let mut running = self
            .running
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(Running::start()?),
        };
        let places = &running.list().places;
        for step in 0..PLACES {
            let place = &places[(running.next + step) % PLACES];
            if place.load(Ordering::Relaxed) == FREE {
                place.store(process.as_raw_fd(), Ordering::SeqCst);
                running.next = (running.next + step + 1) % PLACES;
                return Ok(Guarded {
                    place,
                    _process: process,
                });
            }
        }
        Err(io::ErrorKind::QuotaExceeded.into())
    }

    /// The guardian's process number, if there is one.
    pub fn process(&self) -> Option<i32> {
        let running = self
            .running
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        running.as_ref().map(|running| running.process)
    }
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: live sets; the calling thread's mask is restored by the caller.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

fn restore_signals(mask: &libc::sigset_t) {
    // SAFETY: a live set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}

/// The guardian's life. It runs without the C library: no thread-local storage, no allocation.
extern "C" fn guard(list: *const u8) -> ! {
    // SAFETY: `Running::start` passes its list, which is never unmapped.
    let list = unsafe { &*list.cast::<List>() };
    // SAFETY: takes nothing. Whoever kills this process's group does not mean the guardian.
    unsafe { syscall(nr::SETSID, [0; 6]) };
    while !is_ended(list.supervisor.load(Ordering::Relaxed), None) {}
    for place in &list.places {
        let process = place.load(Ordering::SeqCst);
        if process != FREE {
            // SAFETY: a descriptor and numbers.
            unsafe {
                syscall(
                    nr::PIDFD_SEND_SIGNAL,
                    [process as usize, SIGKILL, 0, 0, 0, 0],
                )
            };
        }
    }
    // The descriptors that their faults wait for are closed when this process ends, not before
    // they have. A process that does not end within seconds is stuck in the kernel.
    for place in &list.places {
        let process = place.load(Ordering::SeqCst);
        if process != FREE {
            is_ended(process, Some(5));
        }
    }
    loop {
        // SAFETY: ends this process.
        unsafe { syscall(nr::EXIT_GROUP, [0; 6]) };
    }
}

/// Waits for the end of a process, at most so many seconds.
fn is_ended(process: i32, seconds: Option<i64>) -> bool {
    let mut poll = process as u32 as u64 | POLLIN << 32;
    let timeout = [seconds.unwrap_or(0), 0];
    let timeout = match seconds {
        Some(_) => timeout.as_ptr() as usize,
        None => 0,
    };
    // SAFETY: a live `pollfd` (descriptor, then events and results) and a live time, or none.
    let ready = unsafe { syscall(nr::PPOLL, [&raw mut poll as usize, 1, timeout, 0, 8, 0]) };
    // An error but an interruption cannot be waited out.
    ready != 0 && ready != -4
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;
    use std::process::{Command, Stdio};

    fn pidfd(pid: i32) -> OwnedFd {
        // SAFETY: numbers only; the descriptor is fresh.
        unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd)
        }
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
            drop(released);
            println!(
                "pids {} {} {}",
                spared.id(),
                child.id(),
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
        while !(gone(pids[1]) && gone(pids[2])) {
            assert!(began.elapsed().as_secs() < 10, "still there: {pids:?}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(!gone(pids[0]), "what is not guarded any more lives on");
        // SAFETY: numbers only; its own grandchild.
        unsafe { libc::kill(pids[0], libc::SIGKILL) };
    }
}
