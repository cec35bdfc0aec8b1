//! Work that another process can hold up for as long as it likes: a read of its memory or of its
//! executable waits for the FUSE server that it chose.

use crate::process::{proc_text, stat_field};
use crate::thread::{self, Standing};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// Threads that may be waiting past their deadline at the same time; each keeps its stack. With more,
/// nothing of the kind is started any more.
const OVERDUE_MAX: u32 = 32;

/// Threads that are waiting past their deadline.
static OVERDUE: AtomicU32 = AtomicU32::new(0);

/// A deadline is waited for in so many parts: a pause of this whole process or machine uses up one of them, and what
/// is to be waited for, which was paused as well, has the others.
const PARTS: u32 = 20;
/// A runnable thread gets so many times the deadline: it may lack a CPU, as a virtual machine's can stall for seconds. A
/// larger value waits longer where other threads take all CPUs.
const MOST: u32 = 20;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that wait for work: to start one for each read of a starting program would cost more than the
/// read. A thread that works past its deadline does not come back.
static IDLE: Mutex<Vec<mpsc::Sender<Job>>> = Mutex::new(Vec::new());

/// A thread that runs jobs until its sender is dropped.
fn worker() -> Option<mpsc::Sender<Job>> {
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    idle.or_else(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        let started = std::thread::Builder::new()
            .name("deadline".into())
            .stack_size(64 << 10)
            .spawn(move || {
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

/// Runs `work` in another thread and returns its result; `None` if the result is not there within
/// `patience` (pauses of this process do not count, nor does, up to a bound, that the thread lacks a CPU), or no thread
/// can be had. The thread is left behind then and ends when its wait does.
pub fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    if OVERDUE.load(Ordering::Relaxed) >= OVERDUE_MAX {
        return None;
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    // 0 while the thread works in time, 1 once either side is through, 2 once both are.
    let sides = Arc::new(AtomicU32::new(0));
    let of_thread = sides.clone();
    let working = Arc::new(AtomicU32::new(0));
    let begun = working.clone();
    let worker = worker()?;
    let job = move || {
        // A hint: Relaxed.
        begun.store(thread::current_id(), Ordering::Relaxed);
        // Fails only past the deadline.
        let _ = sender.send(work());
        if of_thread.fetch_add(1, Ordering::AcqRel) == 1 {
            OVERDUE.fetch_sub(1, Ordering::Relaxed);
        }
    };
    worker.send(Box::new(job)).ok()?;
    let parts = (0..PARTS * MOST)
        .take_while(|part| *part < PARTS || is_runnable(working.load(Ordering::Relaxed)));
    let mut results = parts.map(|_| receiver.recv_timeout(patience / PARTS).ok());
    let result = results.find_map(|result| result);
    if result.is_none() {
        OVERDUE.fetch_add(1, Ordering::Relaxed);
        if sides.fetch_add(1, Ordering::AcqRel) == 1 {
            OVERDUE.fetch_sub(1, Ordering::Relaxed);
        }
    } else {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(worker);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    /// Says by its presence that this process is the one to be paused.
    const PAUSED: &str = "MEMFOLD_TEST_PAUSED";

    /// Works until a byte comes, and says when it begins.
    fn be_paused() {
        let work = || {
            std::io::stderr().write_all(b"!").unwrap();
            std::io::stdin().read_exact(&mut [0])
        };
        let done = within(Duration::from_millis(400), work);
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
            let mut paused = paused
                .stderr(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let pid = rustix::process::Pid::from_child(&paused);
            let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
            paused
                .stderr
                .as_mut()
                .unwrap()
                .read_exact(&mut [0])
                .unwrap();
            signal(rustix::process::Signal::STOP);
            std::thread::sleep(Duration::from_millis(600));
            paused.stdin.as_mut().unwrap().write_all(b"!").unwrap();
            signal(rustix::process::Signal::CONT);
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
        assert_eq!(within(patience, compute), Some(()));
        let wait = || std::thread::sleep(Duration::from_secs(10));
        assert_eq!(within(patience, wait), None, "it does not compute");
    }

    #[test]
    fn overdue_threads_are_bounded_and_end() {
        let forever = Duration::from_secs(60);
        assert_eq!(within(forever, || 7), Some(7));
        let (gate, waiters) = mpsc::channel::<()>();
        let waiters = Arc::new(std::sync::Mutex::new(waiters));
        let wait = || {
            let waiters = waiters.clone();
            within(Duration::ZERO, move || {
                // Answers when the other end is gone.
                let _ = waiters.lock().unwrap().recv();
            })
        };
        for _ in 0..OVERDUE_MAX {
            assert_eq!(wait(), None);
        }
        assert_eq!(within(forever, || 7), None, "too many are overdue");
        drop(gate);
        let began = std::time::Instant::now();
        while within(forever, || 7) != Some(7) {
            assert!(began.elapsed() < forever);
            std::thread::yield_now();
        }
    }
}
