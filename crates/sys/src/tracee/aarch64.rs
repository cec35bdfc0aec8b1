//! The registers of a thread that is stopped by ptrace.

use super::trace;
use crate::process::Process;
use std::io;
use std::mem::MaybeUninit;

/// The system call instruction: `svc #0`.
pub(super) const SYSCALL: [u8; 4] = [0x01, 0x00, 0x00, 0xd4];

/// Sets of registers, as `linux/elf.h` numbers them.
const NT_PRSTATUS: usize = 1;
const NT_PRFPREG: usize = 2;
const NT_ARM_SYSTEM_CALL: usize = 0x404;
const NT_ARM_SVE: usize = 0x405;
const NT_ARM_SSVE: usize = 0x40b;

/// The general registers (`user_pt_regs`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Registers {
    general: [u64; 31],
    stack_pointer: u64,
    program_counter: u64,
    state: u64,
}

impl Registers {
    /// Reads those of a stopped thread.
    ///
    /// # Errors
    /// `ENOEXEC` if it runs 32-bit code.
    pub(super) fn read(thread: i32) -> io::Result<Registers> {
        let mut registers = MaybeUninit::<Registers>::uninit();
        let place = registers.as_mut_ptr().cast();
        // A 32-bit thread has fewer, and smaller ones.
        if read_set(thread, NT_PRSTATUS, place, size_of::<Registers>())? != size_of::<Registers>() {
            return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
        }
        // SAFETY: the kernel has filled it.
        Ok(unsafe { registers.assume_init() })
    }

    /// Gives them to a stopped thread.
    pub(super) fn write(&self, thread: i32) -> io::Result<()> {
        let place = (&raw const *self).cast();
        write_set(thread, NT_PRSTATUS, place, size_of::<Registers>())?;
        // The kernel takes the thread to be in no system call any more, and restarts none by itself: where one was
        // interrupted, it had put the registers before the instruction when the thread stopped.
        let none = -1_i32;
        write_set(
            thread,
            NT_ARM_SYSTEM_CALL,
            (&raw const none).cast(),
            size_of::<i32>(),
        )
    }

    /// Nothing here: the first argument of a system call that a stop ended is not known any more.
    #[expect(clippy::unused_self, reason = "other architectures know it")]
    pub(super) fn begin_anew(&mut self) {}

    /// With them the thread makes a system call by the instruction at `place`.
    pub(super) fn to_call(mut self, place: u64, number: usize, arguments: [u64; 6]) -> Registers {
        self.jump(place);
        self.general[..6].copy_from_slice(&arguments);
        self.general[NUMBER] = number as u64;
        self
    }

    /// With them the thread runs from `entry` on a stack that ends at `stack_top`, as a function with one argument.
    pub(super) fn to_enter(mut self, entry: u64, stack_top: u64, argument: u64) -> Registers {
        self.jump(entry);
        self.general[0] = argument;
        self.stack_pointer = stack_top;
        self.general[FRAME] = 0;
        self
    }

    /// With them the thread goes on there, wherever it was stopped.
    fn jump(&mut self, place: u64) {
        /// Of the processor state, right after an indirect branch: a guarded page (BTI) takes none but at its landing pads, and
        /// that of the vDSO may be one.
        const BRANCH_TYPE: u64 = 3 << 10;
        self.program_counter = place;
        self.state &= !BRANCH_TYPE;
    }

    /// The address of the next instruction.
    pub(super) fn place(&self) -> u64 {
        self.program_counter
    }

    /// What a system call or a function has returned.
    pub(super) fn result(&self) -> u64 {
        self.general[0]
    }
}

/// The register of a system call's number.
const NUMBER: usize = 8;
/// The register of the frame's address.
const FRAME: usize = 29;

/// The floating-point and vector registers: a system call spoils what SVE adds to them, and the library's code any.
#[derive(Debug)]
pub(super) struct Vectors {
    set: usize,
    bytes: Vec<u8>,
}

impl Vectors {
    /// Reads what a stopped thread has.
    ///
    /// # Errors
    /// `EAGAIN` if it is in streaming mode (SME), which ends with a system call.
    pub(super) fn read(thread: i32) -> io::Result<Vectors> {
        /// Bytes of a `user_sve_header`, whose first word is the size with the registers, if they are in use.
        const HEADER: u32 = 16;
        /// More than any: 32 registers of 256 bytes, 17 of 32, and others.
        const MOST: usize = 16 << 10;
        let mut bytes = vec![0; MOST];
        for set in [NT_ARM_SSVE, NT_ARM_SVE, NT_PRFPREG] {
            let length = match read_set(thread, set, bytes.as_mut_ptr(), MOST) {
                Ok(length) => length,
                // The CPU has none of these.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => continue,
                Err(error) => return Err(error),
            };
            if set != NT_ARM_SSVE {
                bytes.truncate(length);
                return Ok(Vectors { set, bytes });
            }
            let [a, b, c, d, ..] = bytes[..] else {
                continue;
            };
            if u32::from_ne_bytes([a, b, c, d]) > HEADER {
                return Err(io::Error::from_raw_os_error(libc::EAGAIN));
            }
        }
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// Gives it back.
    pub(super) fn write(&self, thread: i32) -> io::Result<()> {
        write_set(thread, self.set, self.bytes.as_ptr(), self.bytes.len())
    }
}

/// A sleep that the kernel restarts, when it is interrupted, for the time that is left. Unlike on x86-64 the registers do
/// not say so once the thread has stopped: they are those of a call that begins anew.
#[derive(Debug)]
pub(super) struct Sleep {
    /// Number, arguments, stack pointer and program counter, where a thread was in such a call.
    words: Option<[u64; 9]>,
}

impl Sleep {
    /// Asked before the thread is stopped.
    pub(super) fn look(process: &Process, thread: i32) -> Sleep {
        let text = process.text(&format!("task/{thread}/syscall"));
        let words = text.ok().and_then(|text| parse(&text));
        Sleep {
            words: words.filter(is_relative_sleep),
        }
    }

    /// Has the thread sleep on for as long as is left, if it was stopped in that sleep.
    pub(super) fn resume(&self, registers: &mut Registers) {
        const RESTART_SYSCALL: u64 = 128;
        let Some([number, .., stack, after]) = self.words else {
            return;
        };
        let is_in_it = registers.general[NUMBER] == number
            && registers.stack_pointer == stack
            && registers.program_counter + SYSCALL.len() as u64 == after;
        if is_in_it {
            registers.general[NUMBER] = RESTART_SYSCALL;
        }
    }
}

/// The words of `/proc/PID/syscall`; none if the thread runs.
fn parse(text: &str) -> Option<[u64; 9]> {
    let mut words = text.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let hexadecimal = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let rest: Vec<u64> = words.map_while(hexadecimal).collect();
    let mut all = [number; 9];
    all[1..].copy_from_slice(rest.get(..8).filter(|_| rest.len() == 8)?);
    Some(all)
}

/// Whether a call sleeps for a time, not until one.
fn is_relative_sleep(words: &[u64; 9]) -> bool {
    const TIMER_ABSTIME: u64 = 1;
    const FUTEX_COMMAND: u64 = 0x7f;
    const FUTEX_WAIT: u64 = 0;
    const NANOSLEEP: u64 = libc::SYS_nanosleep as u64;
    const CLOCK_NANOSLEEP: u64 = libc::SYS_clock_nanosleep as u64;
    const FUTEX: u64 = libc::SYS_futex as u64;
    match *words {
        [NANOSLEEP, ..] => true,
        [CLOCK_NANOSLEEP, _, flags, ..] => flags & TIMER_ABSTIME == 0,
        [FUTEX, _, command, _, timeout, ..] => {
            command & FUTEX_COMMAND == FUTEX_WAIT && timeout != 0
        }
        _ => false,
    }
}

/// Reads a set of registers into `length` bytes at `place`. Returns how many there are.
fn read_set(thread: i32, set: usize, place: *mut u8, length: usize) -> io::Result<usize> {
    let mut vector = libc::iovec {
        iov_base: place.cast(),
        iov_len: length,
    };
    let vector_at = (&raw mut vector) as usize;
    trace(libc::PTRACE_GETREGSET, thread, set, vector_at)?;
    Ok(vector.iov_len)
}

fn write_set(thread: i32, set: usize, place: *const u8, length: usize) -> io::Result<()> {
    let vector = libc::iovec {
        iov_base: place.cast_mut().cast(),
        iov_len: length,
    };
    let vector_at = (&raw const vector) as usize;
    trace(libc::PTRACE_SETREGSET, thread, set, vector_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_branch_is_under_way_where_a_thread_is_sent() {
        const AFTER_CALL: u64 = 2 << 10;
        const CARRY: u64 = 1 << 29;
        let registers = Registers {
            general: [7; 31],
            stack_pointer: 0x8000,
            program_counter: 0x4000,
            state: AFTER_CALL | CARRY,
        };
        for sent in [
            registers.to_call(0x5000, 172, [0; 6]),
            registers.to_enter(0x5000, 0x9000, 1),
        ] {
            assert_eq!((sent.program_counter, sent.state), (0x5000, CARRY));
        }
    }

    #[test]
    fn a_relative_sleep_is_told_from_others() {
        let is_sleep = |text: &str| parse(text).is_some_and(|words| is_relative_sleep(&words));
        assert!(is_sleep("101 0xff 0xff 0x0 0x0 0x0 0x0 0xfff0 0x4000"));
        assert!(is_sleep("115 0x0 0x0 0xff 0xff 0x0 0x0 0xfff0 0x4000"));
        assert!(!is_sleep("115 0x0 0x1 0xff 0xff 0x0 0x0 0xfff0 0x4000"));
        assert!(is_sleep("98 0x10 0x80 0x0 0x77 0x0 0x0 0xfff0 0x4000"));
        assert!(!is_sleep("98 0x10 0x80 0x0 0x0 0x0 0x0 0xfff0 0x4000"));
        assert!(!is_sleep("98 0x10 0x189 0x0 0x77 0x0 0x0 0xfff0 0x4000"));
        assert!(!is_sleep("running\n"));
        assert!(!is_sleep("-1 0xfff0 0x4000"));
        assert!(!is_sleep("101 0xff"));
    }
}
