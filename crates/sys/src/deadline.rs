//! Work that another process can hold up for as long as it likes: a read of its memory or of its
//! executable waits for the FUSE server that it chose.

use crate::privilege;
use crate::process::{own_user, proc_text, stat_field};
use crate::sync::lock;
use crate::thread::{self, Standing};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Duration;

/// Threads that may wait past their deadline at the same time for processes of this process's own user, and as many for all
/// other users together; each keeps its stack. Beyond them, nothing of the kind is started any more.
const MOST_OVERDUE: u32 = 32;
/// Threads that may wait for each other UID: one alone cannot keep the others' processes from being looked at.
const MOST_OF_OTHER: u32 = 4;

/// Threads that are waiting past their deadline, by the users whose processes hold them up. Its lock is held for a look.
static OVERDUE: Mutex<Vec<(u32, u32)>> = Mutex::new(Vec::new());

/// Counts one more, or one less.
fn note_overdue(user: u32, is_more: bool) {
    let mut overdue = lock(&OVERDUE);
    let known = overdue.iter_mut().find(|(other, _)| *other == user);
    match (known, is_more) {
        (Some((_, count)), true) => *count += 1,
        (Some((_, count)), false) => *count -= 1,
        (None, true) => overdue.push((user, 1)),
        (None, false) => {}
    }
    overdue.retain(|(_, count)| *count > 0);
}

/// Whether another thread may be held up by a process of that user.
fn may_begin(user: u32) -> bool {
    let own = own_user();
    let overdue = lock(&OVERDUE);
    let sum = |counts: &dyn Fn(u32) -> bool| -> u32 {
        let counted = overdue.iter().filter(|(user, _)| counts(*user));
        counted.map(|(_, count)| count).sum()
    };
    if user == own {
        sum(&|other| other == own) < MOST_OVERDUE
    } else {
        sum(&|other| other == user) < MOST_OF_OTHER && sum(&|other| other != own) < MOST_OVERDUE
    }
}

/// Parts in which a deadline is waited for: a pause of this whole process or machine uses up one of them, and what
/// is to be waited for, which was paused as well, has the others.
const PARTS: u32 = 20;
/// A runnable thread gets `MOST` times the deadline: it may lack a CPU, as a virtual machine's can stall for seconds. A
/// larger value waits longer where other threads take all CPUs.
const MOST: u32 = 20;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that wait for work: to start one for each read of a starting program would cost more than the
/// read. A thread that works past its deadline does not come back. A thread inherits the capabilities of its
/// starter: those without any (the second) are for callers without any, and the others never are.
static IDLE: [Mutex<Vec<mpsc::Sender<Job>>>; 2] = [Mutex::new(Vec::new()), Mutex::new(Vec::new())];

/// Those for callers that gave the capabilities of memfold's file up, or did not.
fn idle(given_up: bool) -> MutexGuard<'static, Vec<mpsc::Sender<Job>>> {
    lock(&IDLE[usize::from(given_up)])
}

/// A thread that runs jobs until its sender is dropped, for a calling thread that gave capabilities up or did not.
fn worker(given_up: bool) -> Option<mpsc::Sender<Job>> {
    let known = idle(given_up).pop();
    known.or_else(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        let started = std::thread::Builder::new()
            .name("deadline".into())
            .stack_size(64 << 10)
            .spawn(move || {
                // It outlives what its starter raised them for.
                privilege::lower_in_thread();
                // What is read within a deadline takes microseconds: on a busy machine the wait would be for a CPU.
                thread::set_standing(thread::current_id(), Standing::Before);
                jobs.into_iter().for_each(|job| job());
            });
        started.ok().map(|_| sender)
    })
}

/// Whether a thread of this process runs, or would if it had a CPU; 0 is one that has not begun.
fn is_runnable(thread: u32) -> bool {
    let stat = || proc_text(&format!("/proc/self/task/{thread}/stat"));
    thread == 0 || stat().is_ok_and(|stat| stat_field(&stat, 3) == Some('R'))
}

/// Runs `work`, which a process of `user` can hold up, in another thread and returns its result; `None` if the result is not
/// there within `patience` (pauses of this process do not count, nor does, up to a bound, that the thread lacks a CPU), no
/// thread can be had, or that user's processes hold up several others. The thread is left behind then and ends when its wait
/// does. For `work`, capabilities of memfold's file are effective if they are in the calling thread, and there are none if that
/// gave them up.
pub fn within<T: Send + 'static>(
    user: u32,
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    if !may_begin(user) {
        return None;
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    // 0 while the thread works in time, 1 once either side is through, 2 once both are.
    let sides = Arc::new(AtomicU32::new(0));
    let of_thread = sides.clone();
    let working = Arc::new(AtomicU32::new(0));
    let begun = working.clone();
    let given_up = privilege::are_given_up();
    let worker = worker(given_up)?;
    let is_raised = privilege::are_raised();
    let job = move || {
        // A hint: Relaxed.
        begun.store(thread::current_id(), Ordering::Relaxed);
        let result = {
            let _raised = is_raised.then(privilege::raised);
            work()
        };
        // Fails only past the deadline.
        let _ = sender.send(result);
        if of_thread.fetch_add(1, Ordering::AcqRel) == 1 {
            note_overdue(user, false);
        }
    };
    worker.send(Box::new(job)).ok()?;
    let result = receive(&receiver, &working, patience);
    if result.is_none() {
        note_overdue(user, true);
        if sides.fetch_add(1, Ordering::AcqRel) == 1 {
            note_overdue(user, false);
        }
    } else {
        idle(given_up).push(worker);
    }
    result
}

/// What a thread, whose number is in `working` once it has begun, sends within `patience`; see [`within`].
pub(crate) fn receive<T>(
    receiver: &mpsc::Receiver<T>,
    working: &AtomicU32,
    patience: Duration,
) -> Option<T> {
    let parts = (0..PARTS * MOST)
        .take_while(|part| *part < PARTS || is_runnable(working.load(Ordering::Relaxed)));
    let mut results = parts.map(|_| receiver.recv_timeout(patience / PARTS).ok());
    results.find_map(|result| result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    /// Says by its presence that this process is the one to be paused.
    const PAUSED: &str = "MEMFOLD_TEST_PAUSED";

    /// Pauses this process within the deadline, and works until a byte comes.
    fn be_paused() {
        let work = || {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::STOP).unwrap();
            std::io::stdin().read_exact(&mut [0])
        };
        let done = within(own_user(), Duration::from_millis(400), work);
        done.expect("it is done").expect("a byte");
    }

    #[test]
    fn a_pause_does_not_count() {
        if std::env::var_os(PAUSED).is_some() {
            return be_paused();
        }
        for _ in 0..8 {
            let mut paused = Command::new(std::env::current_exe().unwrap());
            paused.args([
                "--exact",
                "deadline::tests::a_pause_does_not_count",
                "--nocapture",
            ]);
            paused.env(PAUSED, "").stdin(Stdio::piped());
            let mut paused = paused.stdout(Stdio::null()).spawn().unwrap();
            let pid = rustix::process::Pid::from_child(&paused);
            let stopped =
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED);
            let (_, status) = stopped.unwrap().expect("it is waited for");
            assert!(status.stopped(), "{status:?}");
            std::thread::sleep(Duration::from_millis(600));
            paused.stdin.as_mut().unwrap().write_all(b"!").unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
            assert!(paused.wait().unwrap().success());
        }
    }

    #[test]
    fn a_thread_that_has_no_cpu_is_waited_for() {
        let patience = Duration::from_millis(200);
        let compute = move || {
            let began = std::time::Instant::now();
            while began.elapsed() < 2 * patience {
                std::hint::spin_loop();
            }
        };
        assert_eq!(within(own_user(), patience, compute), Some(()));
        let wait = || std::thread::sleep(Duration::from_secs(10));
        let waited = within(own_user(), patience, wait);
        assert_eq!(waited, None, "it does not compute");
    }

    #[test]
    fn overdue_threads_are_bounded_and_end() {
        let forever = Duration::from_secs(60);
        let (own, user) = (own_user(), own_user() + 1000);
        let seven = |user| within(user, forever, || 7);
        assert_eq!(seven(own), Some(7));
        let (gate, waiters) = mpsc::channel::<()>();
        let waiters = Arc::new(std::sync::Mutex::new(waiters));
        let wait = |user| {
            let waiters = waiters.clone();
            let waited = within(user, Duration::ZERO, move || {
                // Answers when the other end is gone.
                let _ = waiters.lock().unwrap().recv();
            });
            assert_eq!(waited, None);
        };
        (0..MOST_OF_OTHER).for_each(|_| wait(user));
        assert_eq!(seven(user), None, "too many of that user's are overdue");
        assert_eq!(seven(user + 1), Some(7));
        for others in 1..MOST_OVERDUE / MOST_OF_OTHER {
            (0..MOST_OF_OTHER).for_each(|_| wait(user + others));
        }
        assert_eq!(seven(user + 1000), None, "too many of others are");
        assert_eq!(seven(own), Some(7));
        // One of another test may be overdue, too.
        (1..MOST_OVERDUE).for_each(|_| wait(own));
        wait(own);
        assert_eq!(seven(own), None);
        drop(gate);
        let began = std::time::Instant::now();
        while [own, user, user + 1000].map(seven) != [Some(7); 3] {
            assert!(began.elapsed() < forever);
            std::thread::yield_now();
        }
    }
}
