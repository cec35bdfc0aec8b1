//! The registers of a thread that is stopped by ptrace.

use super::trace;
use crate::process::Process;
use std::io;
use std::mem::MaybeUninit;

/// The system call instruction.
pub(super) const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The general registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Registers(libc::user_regs_struct);

impl Registers {
    /// Reads those of a stopped thread.
    ///
    /// # Errors
    /// `ENOEXEC` if it runs 32-bit code.
    pub(super) fn read(thread: i32) -> io::Result<Registers> {
        // That of 64-bit code; the instructions of a 32-bit program are others.
        const CODE_SEGMENT: u64 = 0x33;
        let mut registers = MaybeUninit::<libc::user_regs_struct>::uninit();
        let place = registers.as_mut_ptr() as usize;
        trace(libc::PTRACE_GETREGS, thread, 0, place)?;
        // SAFETY: the kernel has filled it.
        let registers = unsafe { registers.assume_init() };
        if registers.cs != CODE_SEGMENT {
            return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
        }
        Ok(Registers(registers))
    }

    /// Gives them to a stopped thread.
    pub(super) fn write(&self, thread: i32) -> io::Result<()> {
        let place = (&raw const self.0) as usize;
        trace(libc::PTRACE_SETREGS, thread, 0, place)
    }

    /// Leaves to the kernel whether a system call that has ended with EINTR is made again, as it is for `pause`: a signal that
    /// has a handler ends it, whenever that comes, and a stop alone does not. (A timeout begins anew.) So do `epoll_wait`,
    /// sockets with a timeout, `io_uring_enter` and file systems by FUSE.
    ///
    /// None of these has done anything by then, as a call that has done a part returns that, but for `close`: the number may
    /// be of another file now.
    pub(super) fn begin_anew(&mut self) {
        const INTERRUPTED: u64 = -(libc::EINTR as i64) as u64;
        /// `ERESTARTNOHAND`, as `linux/errno.h` has it.
        const UNLESS_HANDLED: u64 = -514_i64 as u64;
        let registers = &mut self.0;
        let number = registers.orig_rax as i64;
        let is_in_call = number >= 0 && number != libc::SYS_close;
        if is_in_call && registers.rax == INTERRUPTED {
            registers.rax = UNLESS_HANDLED;
        }
    }

    /// With them the thread makes a system call by the instruction at `place`.
    pub(super) fn to_call(mut self, place: u64, number: usize, arguments: [u64; 6]) -> Registers {
        let registers = &mut self.0;
        registers.rip = place;
        registers.rax = number as u64;
        // No call is restarted that this is not.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = [arguments[0], arguments[1], arguments[2]];
        [registers.r10, registers.r8, registers.r9] = [arguments[3], arguments[4], arguments[5]];
        self
    }

    /// With them the thread runs from `entry` on a stack that ends at `stack_top`, as a function with one argument.
    pub(super) fn to_enter(mut self, entry: u64, stack_top: u64, argument: u64) -> Registers {
        self.0.rip = entry;
        self.0.rdi = argument;
        self.0.rsp = stack_top;
        self.0.rbp = 0;
        self.0.orig_rax = u64::MAX;
        self
    }

    /// The address of the next instruction.
    pub(super) fn place(&self) -> u64 {
        self.0.rip
    }

    /// What a system call or a function has returned.
    pub(super) fn result(&self) -> u64 {
        self.0.rax
    }
}

/// What a thread has besides. Nothing here: system calls keep the floating-point state, and so does the library's entry.
#[derive(Debug)]
pub(super) struct Vectors;

impl Vectors {
    /// Reads what a stopped thread has.
    #[expect(clippy::unnecessary_wraps, reason = "other architectures read them")]
    pub(super) fn read(_: i32) -> io::Result<Vectors> {
        Ok(Vectors)
    }

    /// Gives it back.
    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "other architectures write them"
    )]
    pub(super) fn write(&self, _: i32) -> io::Result<()> {
        Ok(())
    }
}

/// What of a sleep the kernel does not tell by the registers. Nothing here: they say that a call is to be restarted.
#[derive(Debug)]
pub(super) struct Sleep;

impl Sleep {
    /// Asked before the thread is stopped.
    pub(super) fn look(_: &Process, _: i32) -> Sleep {
        Sleep
    }

    /// Has the thread sleep on for as long as is left, if it was stopped in that sleep.
    #[expect(clippy::unused_self, reason = "other architectures know of one")]
    pub(super) fn resume(&self, _: &mut Registers) {}
}
