//! A thread of another process, stopped by ptrace, and work done in its name.
//!
//! ```text
//! running ── seize, interrupt ──► Stopped ── call (one system call), run (until a trap) ──► Stopped ── drop ──► running
//! ```
//! What the thread had in its registers and its signal mask is kept when it stops and put back before it goes on, so that
//! an interrupted system call is restarted by the kernel as after any stop. While it is stopped, the kernel kills
//! the process if the tracing thread ends (`PTRACE_O_EXITKILL`): with another's registers it would run anywhere.
//!
//! Memory is read and written through `/proc/PID/mem`, opened once while the thread is stopped, which shows that the file
//! is of its address space: if another thread executes a program, perhaps one with more rights, this one ends, and the
//! file is of nothing any more. The PID would be of that program.
//!
//! A thread may execute another program all the same, as other threads can change the code that it was sent to, and for a
//! tracer with `CAP_SYS_PTRACE` the kernel gives that program the rights of its file (set-user-ID). The thread stops before
//! the first instruction then (`PTRACE_O_TRACEEXEC`) and is let go as it is: registers are written only to a thread that was
//! found to stand still in the program in which it was stopped.
//!
//! The kernel knows a tracer by its thread, so a [`Tracee`] stays on the one that made it. Stops are found by asking for
//! their signal, not by `waitpid`: another thread of this process that waits for any child would take them.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
use aarch64::{Registers, SYSCALL, Sleep, Vectors};
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64::{Registers, SYSCALL, Sleep, Vectors};

mod tracer;
mod unfit;

use crate::deadline;
use crate::process::{MapsLine, Process, named_field, proc_text};
use crate::thread;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use unfit::{bit, catches, is_dispatched, is_in_sequence};

/// Between two looks whether it has stopped: short at first, as most stops take microseconds.
const NAPS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// How long a system call may take.
const CALL: Duration = Duration::from_secs(5);

/// How often it is looked in the shorter interval.
const EARLY: u32 = 100;

/// All signals but `SIGTRAP`: one that the kernel forces on a thread that blocks it loses its handler.
const ALL_BUT_TRAPS: u64 = !bit(libc::SIGTRAP);

/// How long reading or writing the program's memory may take: it may have mapped a file of its own FUSE server there.
const MEMORY_PATIENCE: Duration = Duration::from_secs(2);

/// How long a thread is waited for that is to be put back, and cannot be, as its process is frozen or waits for a file
/// server. Less would have the kernel kill it.
const PUTTING_BACK: Duration = Duration::from_secs(300);
/// The same for the parent of a `vfork`, and for one that executes a file which its server does not deliver: after that its
/// process is killed. What it was sent to do does neither, so the program has changed that, and other programs wait for the
/// thread that traces it.
const AFTER_CALL_OF_ITS_OWN: Duration = Duration::from_secs(5);

const MASK_BYTES: usize = 8;

/// Why a thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// By a trap of its own.
    Trap,
    /// As it was asked to, or with the whole process.
    Event,
    /// By another signal.
    Signal(i32),
}

/// A thread that is traced by this one, and runs. It is let go when this thread ends.
#[derive(Debug)]
pub struct Seized {
    process: Arc<Process>,
    thread: i32,
    sleep: Sleep,
    /// Not `Send`: see the module.
    _thread: PhantomData<*const ()>,
}

/// A stopped thread; it goes on as it was when this is dropped.
#[derive(Debug)]
pub struct Tracee {
    process: Arc<Process>,
    memory: Memory,
    thread: i32,
    registers: Registers,
    vectors: Vectors,
    mask: u64,
    /// Signals that are blocked while it is stopped.
    blocked: u64,
    /// Address of a system call instruction in the program.
    syscall: u64,
    /// Not `Send`: see the module.
    _thread: PhantomData<*const ()>,
}

impl Seized {
    /// Begins to trace a thread of a process.
    ///
    /// # Errors
    /// `EPERM` where this process may not trace that one, or another does; `ESRCH` if it is gone.
    pub fn new(process: &Arc<Process>, thread: i32) -> io::Result<Seized> {
        let sleep = Sleep::look(process, thread);
        trace(libc::PTRACE_SEIZE, thread, 0, 0).map_err(|error| {
            // To the kernel, one that has ended is one that may not be traced.
            if has_ended(process, thread) {
                io::Error::from_raw_os_error(libc::ESRCH)
            } else {
                error
            }
        })?;
        Ok(Seized {
            process: process.clone(),
            thread,
            sleep,
            _thread: PhantomData,
        })
    }

    /// Stops it, in its own code or in a system call that can be interrupted. Until then it may have executed another program
    /// than it was seized for, perhaps one with more rights: the caller must look again what it runs.
    ///
    /// # Errors
    /// `ETIMEDOUT` if it could not be stopped in time (it is in a system call that nothing interrupts, as the parent of a
    /// `vfork` is): then it stays traced until this thread ends; `EAGAIN` where it stopped in a sequence that must not be
    /// interrupted (`rseq`); `EOPNOTSUPP` where its system calls are dispatched to the program; `ENOEXEC` if it runs 32-bit
    /// code, or no system call instruction is found; `ESRCH` if it is gone.
    pub fn stop(self, patience: Duration) -> io::Result<Tracee> {
        let (process, thread) = (&self.process, self.thread);
        // While its handle shows that the process is not reaped, its PID is its own.
        let stopped = process
            .signal(0)
            .and_then(|()| trace(libc::PTRACE_INTERRUPT, thread, 0, 0))
            .and_then(|()| stop_by_event(process, thread, patience));
        stopped?;
        // The number may have been another process's by then. A thread that is stopped here keeps it.
        if has_ended(process, thread) {
            detach(thread);
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let kept = Tracee::keep(process, thread, &self.sleep);
        let tracee = kept.inspect_err(|_| detach(thread))?;
        tracee.guard()?;
        Ok(tracee)
    }
}

impl Tracee {
    /// Its number.
    pub fn thread(&self) -> i32 {
        self.thread
    }

    /// The address of the instruction with which it goes on; or of the one after a system call that it makes again.
    pub fn place(&self) -> u64 {
        self.registers.place()
    }

    /// Takes note of what is put back.
    fn keep(process: &Arc<Process>, thread: i32, sleep: &Sleep) -> io::Result<Tracee> {
        let memory = Memory {
            file: Arc::new(process.open_memory(thread)?),
            user: process.user()?,
        };
        // The thread is stopped, so it has not been ended by an `exec` before, and the file is of its memory.
        let mut registers = Registers::read(thread)?;
        sleep.resume(&mut registers);
        registers.begin_anew();
        if is_in_sequence(thread, &memory)? {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let mut blocked = ALL_BUT_TRAPS;
        match is_dispatched(thread, &memory)? {
            Some(true) => return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            // If it is, the first call stops the thread by this signal, which does not reach the handler then.
            None if catches(process, libc::SIGSYS) => blocked &= !bit(libc::SIGSYS),
            Some(false) | None => {}
        }
        let mut mask = 0u64;
        let place = (&raw mut mask) as usize;
        trace(libc::PTRACE_GETSIGMASK, thread, MASK_BYTES, place)?;
        Ok(Tracee {
            syscall: find_syscall(process, &memory)?,
            process: process.clone(),
            memory,
            thread,
            registers,
            vectors: Vectors::read(thread)?,
            mask,
            blocked,
            _thread: PhantomData,
        })
    }

    /// Blocks signals, has the process end with this thread, and the thread stop where it executes a program.
    fn guard(&self) -> io::Result<()> {
        let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACEEXEC;
        trace(libc::PTRACE_SETOPTIONS, self.thread, 0, options as usize)?;
        set_mask(self.thread, self.blocked)
    }

    /// Has the thread make a system call.
    ///
    /// # Errors
    /// The call's own, or those of tracing.
    pub fn call(&mut self, number: usize, arguments: [u64; 6]) -> io::Result<u64> {
        self.send(&self.registers.to_call(self.syscall, number, arguments))?;
        self.go_on_or_stop(libc::PTRACE_SINGLESTEP, CALL)?;
        let after = Registers::read(self.thread)?;
        if after.place() != self.syscall + SYSCALL.len() as u64 {
            return Err(io::Error::other("the thread is not where it was put"));
        }
        let result = after.result() as i64;
        if (-4095..0).contains(&result) {
            return Err(io::Error::from_raw_os_error(-result as i32));
        }
        Ok(after.result())
    }

    /// Has the thread run from `entry`, with an argument, on a stack that ends at `stack_top` until it traps. Returns what its
    /// functions return a number in then.
    ///
    /// # Errors
    /// `ETIMEDOUT` if it took longer than `patience`: the thread is stopped where it is, and goes on as it was.
    pub fn run(
        &mut self,
        (entry, argument): (u64, u64),
        stack_top: u64,
        patience: Duration,
    ) -> io::Result<u64> {
        self.send(&self.registers.to_enter(entry, stack_top, argument))?;
        self.go_on_or_stop(libc::PTRACE_CONT, patience)?;
        Ok(Registers::read(self.thread)?.result())
    }

    /// Gives it registers, where it stands still: it executes nothing in between.
    fn send(&self, registers: &Registers) -> io::Result<()> {
        match stop_of(&self.process, self.thread)? {
            Some(_) => registers.write(self.thread),
            None => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// The same as `go_on`; a thread that took too long is stopped where it is, if that can be.
    fn go_on_or_stop(&self, how: impl Into<i64> + Copy, patience: Duration) -> io::Result<()> {
        self.go_on(how, patience).inspect_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                let _ = self.interrupt(patience);
            }
        })
    }

    fn interrupt(&self, patience: Duration) -> io::Result<()> {
        trace(libc::PTRACE_INTERRUPT, self.thread, 0, 0)?;
        stop_by_event(&self.process, self.thread, patience)
    }

    /// Resumes the thread until it traps.
    fn go_on(&self, how: impl Into<i64> + Copy, patience: Duration) -> io::Result<()> {
        let deadline = Instant::now() + patience;
        let mut pass_on = 0;
        loop {
            trace(how, self.thread, 0, pass_on)?;
            let rest = deadline.saturating_duration_since(Instant::now());
            pass_on = match wait(&self.process, self.thread, rest)? {
                Stop::Trap => return Ok(()),
                _ if rest.is_zero() => return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
                // Of the whole process, perhaps: this thread goes on, the others stay, and it joins them when let go.
                Stop::Event => 0,
                // It cannot be blocked.
                Stop::Signal(libc::SIGSTOP) => libc::SIGSTOP as usize,
                Stop::Signal(signal) => {
                    return Err(io::Error::other(format!(
                        "its thread was stopped by signal {signal}"
                    )));
                }
            };
        }
    }

    /// Waits until the thread stands still, and gives it its own registers. `false` if it is gone, has executed another
    /// program, or has to be killed: with the tracing thread, or now.
    fn put_registers_back(&self) -> bool {
        let since = Instant::now();
        while since.elapsed() < PUTTING_BACK {
            match stop_of(&self.process, self.thread) {
                Ok(Some(_)) if self.registers.write(self.thread).is_ok() => return true,
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return false,
                _ if is_lost(&self.process, self.thread) => return false,
                _ => {}
            }
            // It runs, or waits in the kernel.
            if self.interrupt(Duration::from_secs(1)).is_err() {
                let [_, nap] = NAPS;
                std::thread::sleep(nap);
            }
            if since.elapsed() >= AFTER_CALL_OF_ITS_OWN && self.is_in_call_of_its_own() {
                // Fails only if the process is gone. It runs nothing of the program's any more.
                let _ = self.process.signal(libc::SIGKILL);
                return false;
            }
        }
        false
    }

    /// Whether it waits for a child in its memory, or for a file that it executes.
    fn is_in_call_of_its_own(&self) -> bool {
        // It may have become the main thread by now.
        let has_ended = has_ended(&self.process, self.thread);
        let number = if has_ended {
            self.process.pid()
        } else {
            self.thread
        };
        self.process.waits_for_vfork(number) || self.process.waits_to_execute(number)
    }

    /// Reads the program's memory.
    ///
    /// # Errors
    /// If not all of it can be read.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.memory.read(address, bytes.len())?);
        Ok(())
    }

    /// Writes to the program's memory. Where the program may not write itself, most kernels write all the same.
    ///
    /// # Errors
    /// If not all of it can be written.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        let bytes = bytes.to_vec();
        self.memory
            .within(move |file| file.write_all_at(&bytes, address))
    }
}

/// The program's memory. It may have mapped files there whose server does not answer.
#[derive(Debug)]
struct Memory {
    file: Arc<File>,
    /// The program's.
    user: u32,
}

impl Memory {
    fn read(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        self.within(move |file| {
            let mut bytes = vec![0; length];
            file.read_exact_at(&mut bytes, address).map(|()| bytes)
        })
    }

    fn within<T: Send + 'static>(
        &self,
        work: impl FnOnce(&File) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let file = self.file.clone();
        let done = deadline::within(self.user, MEMORY_PATIENCE, move || work(&file));
        done.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if !self.put_registers_back() {
            // What was kept is written nowhere.
            return;
        }
        // These fail only if the process is gone.
        let _ = self.vectors.write(self.thread);
        let _ = set_mask(self.thread, self.mask);
        let _ = trace(libc::PTRACE_SETOPTIONS, self.thread, 0, 0);
        detach(self.thread);
    }
}

fn set_mask(thread: i32, mask: u64) -> io::Result<()> {
    trace(
        libc::PTRACE_SETSIGMASK,
        thread,
        MASK_BYTES,
        (&raw const mask) as usize,
    )
}

fn detach(thread: i32) {
    // Fails only if the process is gone.
    let _ = trace(libc::PTRACE_DETACH, thread, 0, 0);
}

/// Requests are of either sign: libc declares some as `int` and others as `unsigned int`, and for musl not the same ones as
/// for glibc. The callers pass, where a request takes an address, that of a live value of the size that the kernel expects.
fn trace(request: impl Into<i64>, thread: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: what the kernel writes is the value at `data`, as promised above; the tracee is another process.
    let result = unsafe { libc::ptrace(request.into() as _, thread, address, data) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether this process may trace its children: neither a filter nor Yama forbids it. (Some of them may not be traced all
/// the same, as they have more rights.)
pub fn may_trace() -> bool {
    /// From here on it takes a right (`kernel.yama.ptrace_scope`).
    const RESTRICTED: u32 = 2;
    /// No process has this PID.
    const NONE: i32 = i32::MAX;
    let scope = proc_text("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.map_or(0, |text| text.trim().parse().unwrap_or(RESTRICTED));
    let refused = trace(libc::PTRACE_SEIZE, NONE, 0, 0).err();
    let is_allowed = refused.is_some_and(|error| error.raw_os_error() == Some(libc::ESRCH));
    scope < RESTRICTED && is_allowed
}

/// Waits for a thread that was asked to stop. A signal that comes first is delivered.
fn stop_by_event(process: &Process, thread: i32, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let rest = deadline.saturating_duration_since(Instant::now());
        let signal = match wait(process, thread, rest)? {
            Stop::Event => return Ok(()),
            Stop::Trap => libc::SIGTRAP,
            Stop::Signal(signal) => signal,
        };
        trace(libc::PTRACE_CONT, thread, 0, signal as usize)?;
    }
}

/// Waits for a thread to stop. If this process or the machine stands still meanwhile, so does the thread: that takes a small
/// part of the patience.
fn wait(process: &Process, thread: i32, patience: Duration) -> io::Result<Stop> {
    const PARTS: u32 = 20;
    let mut left = patience;
    let mut last = Instant::now();
    for look in 0_u32.. {
        if let Some(stop) = stop_of(process, thread)? {
            return Ok(stop);
        }
        if look > EARLY && is_lost(process, thread) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let now = Instant::now();
        left = left.saturating_sub(now.duration_since(last).min(patience / PARTS));
        last = now;
        if left.is_zero() {
            break;
        }
        std::thread::sleep(NAPS[usize::from(look > EARLY)]);
    }
    Err(io::Error::from_raw_os_error(libc::ETIMEDOUT))
}

/// Why a thread stands still; none if it runs, or is gone. It stands still until this thread has it go on, or it is killed.
///
/// # Errors
/// `ESRCH` if it has executed another program, as which it is let go.
fn stop_of(process: &Process, thread: i32) -> io::Result<Option<Stop>> {
    const EVENT_STOP: i32 = 128;
    // One that executes a program becomes the main thread.
    let main = Some(process.pid()).filter(|main| *main != thread);
    main.into_iter().for_each(take_stop);
    for number in std::iter::once(thread).chain(main) {
        let stop = match signal_of(number)? {
            // (A program can only feign that its thread has stopped so, for which that is let go as well.)
            Some((_, libc::PTRACE_EVENT_EXEC)) => {
                detach(number);
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Some((_, EVENT_STOP)) => Stop::Event,
            Some((libc::SIGTRAP, _)) => Stop::Trap,
            Some((signal, _)) => Stop::Signal(signal),
            None => continue,
        };
        if number == thread {
            return Ok(Some(stop));
        }
    }
    Ok(None)
}

/// Waits for a stop of a thread that this one traces, if there is one: as long as nothing has, the kernel has no request reach
/// a thread that has got another number (since Linux 5.13).
fn take_stop(thread: i32) {
    let mut found = MaybeUninit::<libc::siginfo_t>::uninit();
    // No stop of a child of another thread, nor the end of any.
    let options = libc::WSTOPPED | libc::WNOHANG | libc::__WNOTHREAD;
    // SAFETY: the kernel writes at most one such structure.
    unsafe {
        libc::waitid(
            libc::P_PID,
            thread as libc::id_t,
            found.as_mut_ptr(),
            options,
        )
    };
}

/// The signal by which a thread was stopped, and the event; none if it runs, or is gone.
fn signal_of(thread: i32) -> io::Result<Option<(i32, i32)>> {
    let mut found = MaybeUninit::<libc::siginfo_t>::uninit();
    let place = found.as_mut_ptr() as usize;
    match trace(libc::PTRACE_GETSIGINFO, thread, 0, place) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    }
    // SAFETY: the kernel has filled it.
    let found = unsafe { found.assume_init() };
    Ok(Some((found.si_signo, found.si_code >> 8)))
}

/// Whether a thread that this one seized is gone: it has ended, or its number is that of another one, which has executed a
/// program.
fn is_lost(process: &Process, thread: i32) -> bool {
    let is_traced = |number: i32| match process.text(&format!("task/{number}/status")) {
        Ok(status) => {
            let tracer = named_field(&status, "TracerPid").and_then(|tracer| tracer.parse().ok());
            let state = named_field(&status, "State").unwrap_or_default();
            tracer == Some(thread::current_id()) && !state.starts_with(['Z', 'X'])
        }
        // Descriptors may be short.
        Err(error) => !matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)),
    };
    // It becomes the main thread before it is stopped as one that has executed a program.
    !is_traced(thread) && !is_traced(process.pid())
}

fn has_ended(process: &Process, thread: i32) -> bool {
    matches!(process.state(thread), None | Some('Z' | 'X'))
}

/// Address of a system call instruction of the program's: one of the kernel's own in each process (the vDSO), whose name
/// no mapping of the program's has.
fn find_syscall(process: &Process, memory: &Memory) -> io::Result<u64> {
    let none = || io::Error::from_raw_os_error(libc::ENOEXEC);
    let (start, end) = process.find_mapping(vdso)?.ok_or_else(none)?;
    /// It has a few pages.
    const LONGEST: u64 = 1 << 20;
    let length = end.checked_sub(start).filter(|length| *length <= LONGEST);
    let bytes = memory.read(start, length.ok_or_else(none)? as usize)?;
    let found = bytes.windows(SYSCALL.len()).position(|two| two == SYSCALL);
    Ok(start + found.ok_or_else(none)? as u64)
}

/// The addresses in a line of `maps`, if that is of the vDSO.
fn vdso(line: MapsLine<'_>) -> Option<(u64, u64)> {
    let is_vdso = line.is_of_no_file && line.access == "r-xp" && line.name == "[vdso]";
    is_vdso.then_some((line.range.start, line.range.end))
}

#[cfg(test)]
mod tests;
