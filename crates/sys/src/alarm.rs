//! One thread's waits, which other threads end, or the CPU time that other processes take.
//!
//! A look at whether a process did anything costs a wake-up. A timer on its CPU time costs nothing while it
//! sleeps: the kernel looks at such timers at ticks in which the process runs, and where it sends their signals from
//! the process's own work, once a system call that is under way returns. The signal goes to the thread that waits, in
//! which it is blocked and taken by `sigtimedwait`. Other threads end the wait by the same signal.
//! (POSIX: `timer_create` with the clock that `clock_getcpuclockid` gives for any process. It takes no right.)

use crate::process::Process;
use crate::signal;
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// The thread that waits. Threads ring; one waits.
#[derive(Debug, Default)]
pub struct Alarm {
    /// Its TID; 0 before there is one, and after it.
    thread: AtomicU32,
    rung: AtomicBool,
}

/// The signal, which nothing uses. Not a real-time one: those are refused where a user has too many that are pending
/// (`RLIMIT_SIGPENDING`).
const SIGNAL: i32 = libc::SIGSTKFLT;

/// For a ring that comes late, in a thread that has the number of the one that waited. A handler rather than
/// ignoring, which programs started from here would inherit.
extern "C" fn nothing(_: i32, _: *mut signal::Info, _: *mut libc::c_void) {}

fn set_of_it() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call fills the set, to which the second adds a signal that there is.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), SIGNAL);
        set.assume_init()
    }
}

impl Alarm {
    /// The calling thread is the one that waits from now on.
    ///
    /// # Errors
    /// If there is such a thread already, or the signal cannot be had.
    pub fn adopt(&self) -> io::Result<()> {
        signal::install(SIGNAL, nothing)?;
        let set = set_of_it();
        // SAFETY: a live set, and no place for the previous one.
        let failed =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if failed != 0 {
            return Err(io::Error::from_raw_os_error(failed));
        }
        let own = crate::thread::current_id();
        let adopted = self.thread.compare_exchange(0, own, SeqCst, SeqCst);
        adopted
            .map(drop)
            .map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// That thread waits no more.
    pub fn disown(&self) {
        self.thread.store(0, SeqCst);
    }

    /// Ends the wait, or the next one.
    pub fn ring(&self) {
        // SeqCst, as are the waiter's: it stores its TID and then looks at the flag, this sets the flag and then looks
        // for a TID, so one of the two sees the other.
        if self.rung.swap(true, SeqCst) {
            return;
        }
        let thread = self.thread.load(SeqCst);
        if thread != 0 {
            // SAFETY: numbers only: this process, one of its threads, and a signal that has a handler since before
            // the TID was stored.
            unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, SIGNAL) };
        }
    }

    /// Waits until it rings, or a [`CpuTimer`] of this alarm expires, at most `timeout`. Returns whether such a timer
    /// ended it. It may end early without a reason. Only the thread that adopted it may call this.
    pub fn wait(&self, timeout: Duration) -> bool {
        if self.rung.swap(false, SeqCst) {
            return false;
        }
        let set = set_of_it();
        let timeout = timespec(timeout);
        let mut info = MaybeUninit::<signal::Info>::zeroed();
        // SAFETY: live structures. What is zero is valid as information about a signal, and says that a process sent it.
        let code = unsafe {
            libc::sigtimedwait(&raw const set, info.as_mut_ptr(), &raw const timeout);
            info.assume_init().si_code
        };
        // Who rang until now ended this wait.
        self.rung.store(false, SeqCst);
        code == libc::SI_TIMER
    }
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// The time between two of the kernel's ticks, at which it looks at timers on CPU time.
pub fn tick() -> Duration {
    let mut tick = timespec(Duration::ZERO);
    // SAFETY: a live structure that the kernel fills. It knows this clock, which goes by ticks.
    unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &raw mut tick) };
    Duration::new(tick.tv_sec as u64, tick.tv_nsec as u32)
}

/// Expires, and ends a wait, once another process has taken some CPU time: no sooner, and mostly at the next tick in which
/// it runs, but not while it is in a system call.
#[derive(Debug)]
pub struct CpuTimer(i32);

impl CpuTimer {
    /// A timer on the CPU time of all threads of `process`, for the thread that waits for `alarm`. Not set.
    ///
    /// # Errors
    /// If the process has ended, the kernel refuses it (`RLIMIT_SIGPENDING`), or there is no such thread.
    pub fn new(process: &Process, alarm: &Alarm) -> io::Result<CpuTimer> {
        let thread = alarm.thread.load(SeqCst);
        if thread == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        let mut clock = 0;
        // SAFETY: the clock's number is written to a live place.
        let failed = unsafe { libc::clock_getcpuclockid(process.pid(), &raw mut clock) };
        if failed != 0 {
            return Err(io::Error::from_raw_os_error(failed));
        }
        // SAFETY: numbers and a pointer that may be null.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_signo = SIGNAL;
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_notify_thread_id = thread as i32;
        let mut timer = 0i32;
        // SAFETY: a live structure, which is the kernel's, and a live place for the timer's number, which is an `int` to it.
        let result = unsafe {
            libc::syscall(
                libc::SYS_timer_create,
                clock,
                &raw const event,
                &raw mut timer,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let timer = CpuTimer(timer);
        // It lives: so the PID was its own when the timer was made.
        if process.has_ended() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(timer)
    }

    /// It expires once, after so much more CPU time. What was set before does not.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn set(&self, time: Duration) -> io::Result<()> {
        let once = libc::itimerspec {
            it_interval: timespec(Duration::ZERO),
            it_value: timespec(time),
        };
        // SAFETY: a timer of this process by its number, a live structure, and no place for what was set.
        let result = unsafe {
            libc::syscall(
                libc::SYS_timer_settime,
                self.0,
                0,
                &raw const once,
                std::ptr::null_mut::<libc::itimerspec>(),
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for CpuTimer {
    fn drop(&mut self) {
        // SAFETY: the number of this timer, which nothing uses afterwards.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use std::sync::Arc;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    fn adopted() -> Arc<Alarm> {
        let alarm = Arc::new(Alarm::default());
        alarm.adopt().unwrap();
        alarm
    }

    fn started(script: &str) -> (Child, Process) {
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        (child, process)
    }

    #[test]
    fn a_ring_ends_a_wait_that_goes_on_or_begins_later() {
        let alarm = adopted();
        let began = Instant::now();
        alarm.ring();
        alarm.wait(LONG);
        let ringer = alarm.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            ringer.ring();
        });
        // What was rung for the first wait may end one more.
        alarm.wait(Duration::from_millis(1));
        alarm.wait(LONG);
        thread.join().unwrap();
        assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn a_wait_ends_by_itself() {
        let alarm = adopted();
        let began = Instant::now();
        assert!(!alarm.wait(Duration::from_millis(30)));
        assert!(began.elapsed() >= Duration::from_millis(30));
    }

    #[test]
    fn a_tick_takes_milliseconds() {
        assert!((1..=10).contains(&tick().as_millis()), "{:?}", tick());
    }

    #[test]
    fn one_thread_waits() {
        let alarm = adopted();
        let other = alarm.clone();
        let refused = std::thread::spawn(move || other.adopt().is_err());
        assert!(refused.join().unwrap());
        alarm.disown();
        assert!(alarm.adopt().is_ok());
    }

    #[test]
    fn a_process_that_computes_ends_a_wait() {
        let alarm = adopted();
        let (mut child, process) = started("while :; do :; done");
        let timer = CpuTimer::new(&process, &alarm).unwrap();
        for _ in 0..3 {
            let began = Instant::now();
            timer.set(Duration::from_millis(5)).unwrap();
            assert!(alarm.wait(LONG));
            assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(CpuTimer::new(&process, &alarm).is_err(), "it is gone");
    }

    #[test]
    fn a_process_that_sleeps_ends_none() {
        let alarm = adopted();
        let (mut child, process) = started("exec sleep 100");
        let timer = CpuTimer::new(&process, &alarm).unwrap();
        // More than the start of the program takes.
        timer.set(Duration::from_secs(5)).unwrap();
        assert!(!alarm.wait(Duration::from_millis(200)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
