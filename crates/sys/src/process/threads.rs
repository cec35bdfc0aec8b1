//! What the threads of a process do, as far as `/proc` tells.

use super::handle::folder_of;
use super::{Process, is_fork, living_thread_in, stat_field};
use std::io::{self, Read};
use std::os::fd::AsFd;

/// A thread at the moment at which it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadSample {
    /// TID.
    pub id: i32,
    /// Start, in clock ticks since boot: two threads with one TID differ in it.
    pub started: u64,
    /// It sleeps interruptibly, is stopped or has ended. Within a system call that waits for nothing but
    /// locks, a thread never does: it runs, or sleeps uninterruptibly.
    pub is_interruptible: bool,
    /// CPU time in clock ticks of 1/100 s, each of its two parts rounded down.
    pub cpu_ticks: u64,
}

/// Most threads that one look lists. The kernel lists more than about a thousand in several steps, between
/// which threads that live may be passed over.
const MOST_THREADS: u64 = 512;

/// Most children that are looked at. A program that has more cannot hold up the caller.
const MOST_CHILDREN: usize = 128;

impl Process {
    /// All threads that live from before this call to its end, and some of the others.
    ///
    /// # Errors
    /// If it is gone, threads came and went meanwhile, or it has more than 512.
    pub fn thread_samples(&self) -> io::Result<Vec<ThreadSample>> {
        let before: u64 = stat_field(&self.text("stat")?, 20).ok_or(io::ErrorKind::InvalidData)?;
        if before > MOST_THREADS {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let threads = self.threads();
        // The list is in the order of their starts, and ends early at a thread that ends meanwhile: if it is as
        // long as it must be, it lacks none of those that were there.
        if (threads.len() as u64) < before {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(threads
            .into_iter()
            .filter_map(|thread| self.thread_sample(thread))
            .collect())
    }

    /// `None` if it has ended.
    fn thread_sample(&self, thread: i32) -> Option<ThreadSample> {
        let mut buffer = [0u8; 1024];
        let text = self.thread_stat(thread.cast_unsigned(), &mut buffer)?;
        let state: char = stat_field(&text, 3)?;
        let ticks = |field| stat_field::<u64>(&text, field);
        Some(ThreadSample {
            id: thread,
            started: ticks(22)?,
            is_interruptible: matches!(state, 'S' | 'I' | 'T' | 't' | 'Z' | 'X'),
            cpu_ticks: ticks(14)? + ticks(15)?,
        })
    }

    /// Whether one of its children uses the same memory (`CLONE_VM`, as after `vfork`).
    ///
    /// # Errors
    /// If that cannot be told: the kernel lacks `kcmp`, a child may not be inspected, or there are more threads
    /// or children than this looks through.
    pub fn shares_memory_with_child(&self) -> io::Result<bool> {
        let threads = self.threads();
        // It has one, unless it is gone or descriptors are short.
        if threads.is_empty() || threads.len() as u64 > MOST_THREADS {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let own = self.living_thread().unwrap_or(self.pid());
        let mut left = MOST_CHILDREN;
        for thread in threads {
            for child in self.children_of(thread)? {
                left = left.checked_sub(1).ok_or(io::ErrorKind::Unsupported)?;
                match has_memory_of(own, child) {
                    Ok(false) => {}
                    // It was reaped.
                    Err(error)
                        if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => {}
                    shares_or_unknown => return shares_or_unknown,
                }
            }
        }
        Ok(false)
    }

    /// Whether it uses its parent's memory (`CLONE_VM`, as after `vfork`).
    ///
    /// # Errors
    /// If that cannot be told: the kernel lacks `kcmp`, or its parent may not be inspected.
    pub fn shares_memory_with_parent(&self) -> io::Result<bool> {
        let Some(parent) = self.parent().filter(|parent| *parent != 0) else {
            return Ok(false);
        };
        let living = |process: &Process| process.living_thread().unwrap_or(process.pid());
        let parents = Process::open(parent).map_or(parent, |parent| living(&parent));
        match has_same_memory(living(self), parents) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            shares_or_unknown => shares_or_unknown,
        }
    }

    /// Whether it may use its parent's memory: where `kcmp` does not tell, one that executed no program may as long as a
    /// thread of its parent waits in the kernel, as that of a `vfork` does.
    pub fn may_share_memory_with_parent(&self) -> bool {
        let has_waiting_thread = |parent: &Process| {
            let mut threads = parent.threads().into_iter();
            threads.any(|thread| parent.state(thread) == Some('D'))
        };
        let parent_waits = || {
            let parent = self.parent().and_then(|parent| Process::open(parent).ok());
            parent.as_ref().is_some_and(has_waiting_thread)
        };
        is_fork(self.pid())
            && self
                .shares_memory_with_parent()
                .unwrap_or_else(|_| parent_waits())
    }

    /// Whether one of its threads waits for a child that uses the same memory, as the parent of a `vfork` does.
    pub(crate) fn waits_for_vfork(&self, thread: i32) -> bool {
        let shares = |child: &i32| has_same_memory(self.pid(), *child).unwrap_or(false);
        self.state(thread) == Some('D')
            && self
                .children_of(thread)
                .is_ok_and(|children| children.iter().take(MOST_CHILDREN).any(shares))
    }

    /// Whether one of its threads waits in a system call that executes a program, as it does for a file server.
    pub(crate) fn waits_to_execute(&self, thread: i32) -> bool {
        let text = self.text(&format!("task/{thread}/syscall"));
        let number = text.ok().and_then(|text| {
            let number = text.split_ascii_whitespace().next()?;
            number.parse::<libc::c_long>().ok()
        });
        matches!(number, Some(libc::SYS_execve | libc::SYS_execveat))
    }

    /// The children of a thread; none if it has ended.
    fn children_of(&self, thread: i32) -> io::Result<Vec<i32>> {
        let mut buffer = [0u8; 4096];
        let mut file = match self.open_file(&format!("task/{thread}/children")) {
            Ok(file) => file,
            // Some kernels do not have it.
            Err(error) if self.has(&format!("task/{thread}")) => return Err(error),
            Err(_) => return Ok(Vec::new()),
        };
        let length = file.read(&mut buffer)?;
        if length == buffer.len() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let text = String::from_utf8_lossy(&buffer[..length]);
        let children = text.split_ascii_whitespace();
        Ok(children.filter_map(|child| child.parse().ok()).collect())
    }
}

/// Whether a child uses the memory of a thread that lives.
fn has_memory_of(thread: i32, child: i32) -> io::Result<bool> {
    if has_same_memory(thread, child)? {
        return Ok(true);
    }
    // A main thread that has ended has no memory, while others of the child may go on.
    let folder = folder_of(child)?;
    match living_thread_in(folder.as_fd(), child) {
        Some(living) if living != child => has_same_memory(thread, living),
        _ => Ok(false),
    }
}

/// Whether two processes use one address space, by their PIDs, or by TIDs of theirs.
fn has_same_memory(one: i32, other: i32) -> io::Result<bool> {
    /// `KCMP_VM` of the kernel's `linux/kcmp.h`.
    const MEMORY: i32 = 1;
    // SAFETY: numbers only.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, MEMORY, 0, 0) };
    match order {
        -1 => Err(io::Error::last_os_error()),
        order => Ok(order == 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::own_id;
    use std::sync::mpsc;

    #[test]
    fn threads_that_wait_differ_from_threads_that_run() {
        let process = Process::open(own_id()).unwrap();
        let (stop, stopped) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let waiting = std::thread::spawn(move || {
            // SAFETY: asks for the calling thread's TID.
            tell.send(unsafe { libc::gettid() }).unwrap();
            let _ = stopped.recv();
        });
        let waiting_id = told.recv().unwrap();
        // SAFETY: as above.
        let own = unsafe { libc::gettid() };
        let find = |id| {
            let samples = process.thread_samples().ok()?;
            samples.into_iter().find(|sample| sample.id == id)
        };
        // Threads of other tests come and go.
        let looks = || (0..1000).map(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
        assert!(looks().any(|()| find(waiting_id).is_some_and(|sample| sample.is_interruptible)));
        let sample = looks().find_map(|()| find(own)).unwrap();
        assert!(!sample.is_interruptible, "it runs: {sample:?}");
        drop(stop);
        waiting.join().unwrap();
        assert!(looks().any(|()| {
            let samples = process.thread_samples();
            samples.is_ok_and(|samples| samples.iter().all(|sample| sample.id != waiting_id))
        }));
    }

    #[test]
    fn children_with_the_same_memory_are_seen() {
        let process = Process::open(own_id()).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("5")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        assert!(!has_same_memory(own_id(), pid).unwrap());
        assert!(has_same_memory(pid, pid).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        let of_reaped = has_same_memory(own_id(), pid).unwrap_err();
        assert_eq!(of_reaped.raw_os_error(), Some(libc::ESRCH));
        // Those of other tests share it until they execute.
        let shares = || process.shares_memory_with_child().unwrap();
        assert!((0..1000).any(|_| !shares()));
    }

    #[test]
    fn an_executed_program_does_not_share_its_parents_memory() {
        let mut child = std::process::Command::new("sleep")
            .arg("5")
            .spawn()
            .unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        assert!(!process.shares_memory_with_parent().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
