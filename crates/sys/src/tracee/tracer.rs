//! The thread that traces, and how long it may take to seize another.
//!
//! The kernel seizes no thread of a process that executes a file until it has read from that what it needs
//! (`cred_guard_mutex`), for which it waits as long as a file server likes. A tracing thread that waits so is left behind:
//! once it has seized its thread, it ends, and lets that go by its end.

use super::Seized;
use crate::process::{Process, own_user};
use crate::sync::lock;
use crate::{deadline, privilege, thread};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Duration;

/// Threads that may wait to seize processes of this process's own user at the same time, and as many for all other users
/// together; each keeps its stack. Beyond them, nothing is seized any more.
const MOST_WAITING: usize = 32;
/// Threads that may wait for each other UID: one alone cannot keep the others' processes from being traced.
const MOST_OF_OTHER: usize = 4;

/// The processes of which a thread is being seized, and their users. Its lock is held for a look.
static BEING_SEIZED: Mutex<Vec<(Arc<Process>, u32)>> = Mutex::new(Vec::new());

fn being_seized() -> MutexGuard<'static, Vec<(Arc<Process>, u32)>> {
    lock(&BEING_SEIZED)
}

/// One of these, until this is dropped.
struct BeingSeized(Arc<Process>);

impl BeingSeized {
    /// None where a thread waits for that process already, or several for that user's.
    fn new(process: &Arc<Process>, user: u32) -> Option<BeingSeized> {
        let own = own_user();
        let mut all = being_seized();
        let count = |counts: &dyn Fn(u32) -> bool| {
            let counted = all.iter().filter(|(_, user)| counts(*user));
            counted.count()
        };
        let is_room = if user == own {
            count(&|other| other == own) < MOST_WAITING
        } else {
            count(&|other| other == user) < MOST_OF_OTHER
                && count(&|other| other != own) < MOST_WAITING
        };
        if !is_room || all.iter().any(|(other, _)| other.is_same(process)) {
            return None;
        }
        all.push((process.clone(), user));
        Some(BeingSeized(process.clone()))
    }
}

impl Drop for BeingSeized {
    fn drop(&mut self) {
        being_seized().retain(|(process, _)| !Arc::ptr_eq(process, &self.0));
    }
}

impl Seized {
    /// Seizes a thread of a process and does `work` with it, in a thread that ends with that and has no capability of
    /// memfold's file.
    ///
    /// # Errors
    /// Those of [`Seized::new`]; `ETIMEDOUT` if it is not seized within `patience`, as the process executes a file that takes
    /// long: then `work` is not done, and as long as a thread waits for that process, nor is any other for it. The same where
    /// processes of that user hold up several others.
    pub fn with<T: Send + 'static>(
        process: &Arc<Process>,
        thread: i32,
        patience: Duration,
        work: impl FnOnce(Seized) -> T + Send + 'static,
    ) -> io::Result<T> {
        let timed_out = || io::Error::from_raw_os_error(libc::ETIMEDOUT);
        // Most that execute a file have one thread, so none has to be left behind for them.
        if process.waits_to_execute(thread) {
            return Err(timed_out());
        }
        let gone = |_| io::Error::from_raw_os_error(libc::ESRCH);
        let user = process.user().map_err(gone)?;
        let being_seized = BeingSeized::new(process, user).ok_or_else(timed_out)?;
        // The first of both sides decides: whether the work is done, or the thread is left behind.
        let is_decided = Arc::new(AtomicBool::new(false));
        let working = Arc::new(AtomicU32::new(0));
        let (sender, receiver) = mpsc::sync_channel(1);
        let (decided, begun, process) = (is_decided.clone(), working.clone(), process.clone());
        let trace = move || {
            // A hint: Relaxed.
            begun.store(thread::current_id(), Ordering::Relaxed);
            let given_up = privilege::give_up_in_thread();
            let seized = given_up.and_then(|()| Seized::new(&process, thread));
            if decided.swap(true, Ordering::AcqRel) {
                return None;
            }
            drop(being_seized);
            // Fails only past the patience, with the work decided on.
            let _ = sender.send(());
            Some(seized.map(work))
        };
        let tracer = std::thread::Builder::new().name("tracer".to_owned());
        let tracer = tracer.spawn(trace)?;
        let is_seized = deadline::receive(&receiver, &working, patience).is_some();
        if !is_seized && !is_decided.swap(true, Ordering::AcqRel) {
            return Err(timed_out());
        }
        let done = tracer.join().ok().flatten();
        done.unwrap_or_else(|| Err(io::Error::other("the tracing thread failed")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracee::tests::{Started, execute, start, start_threads, thread_named, wait_until};
    use std::ffi::CString;
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::time::Instant;

    /// A script whose interpreter the kernel waits to open until `gate` is dropped, as for a file server.
    struct Script {
        folder: PathBuf,
        gate: Option<OwnedFd>,
    }

    impl Script {
        /// None without the right to hold others up (`CAP_SYS_ADMIN`).
        fn new(name: &str) -> Option<Script> {
            let name = format!("memfold-{name}-{}", crate::process::own_id());
            let folder = std::env::temp_dir().join(name);
            std::fs::create_dir(&folder).unwrap();
            let interpreter = folder.join("interpreter");
            std::fs::copy("/bin/true", &interpreter).unwrap();
            let mut script = Script { folder, gate: None };
            std::fs::write(script.path(), format!("#!{}\n", interpreter.display())).unwrap();
            let executable = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(script.path(), executable).unwrap();
            let flags = libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC;
            // SAFETY: numbers only.
            let group = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) };
            if group == -1 {
                return None;
            }
            // SAFETY: a new descriptor, which nothing else has.
            let group = unsafe { OwnedFd::from_raw_fd(group) };
            let path = CString::new(interpreter.to_str().unwrap()).unwrap();
            let (add, event) = (libc::FAN_MARK_ADD, libc::FAN_OPEN_EXEC_PERM);
            let number = group.as_raw_fd();
            // SAFETY: our own descriptor, and a live string that ends with a zero.
            let marked =
                unsafe { libc::fanotify_mark(number, add, event, libc::AT_FDCWD, path.as_ptr()) };
            assert_eq!(marked, 0, "{}", io::Error::last_os_error());
            script.gate = Some(group);
            Some(script)
        }

        fn path(&self) -> PathBuf {
            self.folder.join("script")
        }
    }

    impl Drop for Script {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    /// A process whose other thread than the main one executes a script, for which the kernel waits.
    fn start_executing(script: &Script) -> (Started, Arc<Process>) {
        let (mut child, process) = start_threads(&script.path());
        wait_until(|| thread_named(&process, "other").is_some());
        let other = thread_named(&process, "other").unwrap();
        child.0.stdin.take().unwrap().write_all(b"!").unwrap();
        wait_until(|| process.waits_to_execute(other));
        (child, process)
    }

    #[test]
    fn a_process_whose_executable_is_waited_for_holds_no_other_up() {
        const PATIENCE: Duration = Duration::from_millis(100);
        let Some(mut script) = Script::new("waits-to-execute") else {
            return;
        };
        let (mut child, process) = start_executing(&script);
        let is_waited_for = || being_seized().iter().any(|(one, _)| one.is_same(&process));
        let try_it = || {
            let began = Instant::now();
            let traced = Seized::with(&process, process.pid(), PATIENCE, |_| ());
            assert_eq!(traced.unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
            assert!(is_waited_for());
            began.elapsed()
        };
        try_it();
        // One that waits takes no less; one that does not may lack a CPU.
        let shortest = (0..19).map(|_| try_it()).min().unwrap();
        assert!(shortest < PATIENCE, "it was waited for again");
        let (_sleeping, other) = start("/bin/sleep", &["10"]);
        let stop = |seized: Seized| seized.stop(Duration::from_secs(5)).map(drop);
        let traced = Seized::with(&other, other.pid(), Duration::from_secs(5), stop);
        traced.unwrap().unwrap();
        script.gate = None;
        assert!(child.0.wait().unwrap().success());
        wait_until(|| !is_waited_for());
    }

    /// As one that was sent into a library whose code the program has changed.
    #[test]
    #[ignore = "takes long: cargo test -- --include-ignored"]
    fn a_thread_that_waits_to_execute_a_file_is_not_waited_for() {
        let Some(script) = Script::new("sent-to-execute") else {
            return;
        };
        let (mut child, process) = start("/bin/sleep", &["100"]);
        let seized = Seized::new(&process, process.pid()).unwrap();
        let mut tracee = seized.stop(Duration::from_secs(5)).unwrap();
        let error = execute(&mut tracee, &script.path());
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let began = Instant::now();
        drop(tracee);
        assert!(began.elapsed() < Duration::from_secs(20));
        assert!(!child.0.wait().unwrap().success());
    }

    #[test]
    fn one_users_processes_are_not_all_waited_for() {
        // Of users that none of the other tests' processes are of.
        let (own, user) = (own_user(), own_user() + 1000);
        let mut sleeping: Vec<_> = (0..=MOST_WAITING)
            .map(|_| start("/bin/sleep", &["10"]))
            .collect();
        let (_child, last) = sleeping.pop().unwrap();
        let mut waits = Vec::new();
        for (number, (_child, process)) in sleeping.iter().enumerate() {
            let user = user + (number / MOST_OF_OTHER) as u32;
            let wait = BeingSeized::new(process, user);
            assert!(wait.is_some());
            assert!(BeingSeized::new(process, own).is_none(), "one for each");
            waits.extend(wait);
            let is_full = (number + 1).is_multiple_of(MOST_OF_OTHER);
            assert_eq!(BeingSeized::new(&last, user).is_none(), is_full);
        }
        assert!(BeingSeized::new(&last, user + 1000).is_none());
        assert!(BeingSeized::new(&last, own).is_some());
        waits.pop();
        assert!(BeingSeized::new(&last, user + 1000).is_some());
    }
}
