//! Executing a program whose environment names its own PID, which is known only after the fork.
//!
//! systemd says by such variables which process descriptors, the watchdog and the unit are meant for, and
//! `sd_listen_fds` and `sd_watchdog_enabled` compare them with their process. They would name the process that
//! forked.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::ptr::null;

/// Variables that name the process that they are meant for.
const PIDS: [&str; 3] = ["LISTEN_PID", "WATCHDOG_PID", "SYSTEMD_EXEC_PID"];
/// The inode of that process's pidfd, beside `LISTEN_PID`. Without it, the PID decides alone.
const PIDFD: &str = "LISTEN_PIDFDID";
/// Digits of a PID at most.
const DIGITS: usize = 10;

/// A program to be executed, made before the fork: what comes after it allocates nothing.
#[derive(Debug)]
pub struct Exec {
    program: CString,
    arguments: Vec<CString>,
    /// `NAME=VALUE` with a zero behind each.
    variables: Vec<Vec<u8>>,
    /// Which of them get the PID, and where in them.
    pids: Vec<(usize, usize)>,
    /// Null, and set from the strings in [`execute`](Self::execute).
    argument_pointers: Vec<*const libc::c_char>,
    variable_pointers: Vec<*const libc::c_char>,
}

// SAFETY: the pointers are null until `execute`, which sets them by `&mut self` and returns after their last
// use. They lead into strings that the same structure owns.
unsafe impl Send for Exec {}
// SAFETY: as above; nothing reads the pointers by `&self`.
unsafe impl Sync for Exec {}

impl Exec {
    /// A program with its arguments, the name first, and its environment. Where that names this process, the
    /// program is named instead.
    ///
    /// # Errors
    /// If there is no name, or a string has a zero in it.
    pub fn new(
        arguments: &[OsString],
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> io::Result<Self> {
        let own = std::process::id().to_string();
        let mut environment: Vec<_> = environment.into_iter().collect();
        let names_us =
            |name: &OsStr, value: &OsStr| *value == *own && PIDS.iter().any(|of| name == *of);
        if environment
            .iter()
            .any(|(name, value)| name == PIDS[0] && names_us(name, value))
        {
            environment.retain(|(name, _)| name != PIDFD);
        }
        let mut variables = Vec::new();
        let mut pids = Vec::new();
        for (name, value) in environment {
            let gets_pid = names_us(&name, &value);
            let mut variable = name.into_vec();
            variable.push(b'=');
            if gets_pid {
                pids.push((variables.len(), variable.len()));
                variable.extend([b'0'; DIGITS]);
            } else {
                variable.extend(value.as_bytes());
            }
            variables.push(CString::new(variable)?.into_bytes_with_nul());
        }
        let text = |argument: &OsString| CString::new(argument.as_bytes());
        let arguments: Vec<CString> = arguments.iter().map(text).collect::<Result<_, _>>()?;
        let program = arguments.first().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            program: program.clone(),
            argument_pointers: vec![null(); arguments.len() + 1],
            variable_pointers: vec![null(); variables.len() + 1],
            arguments,
            variables,
            pids,
        })
    }

    /// Executes it in this process, found by `PATH` as by `execvp`. Returns only with an error. May be called
    /// between fork and exec.
    pub fn execute(&mut self) -> io::Error {
        for (index, start) in &self.pids {
            write_decimal(&mut self.variables[*index][*start..], std::process::id());
        }
        for (pointer, argument) in self.argument_pointers.iter_mut().zip(&self.arguments) {
            *pointer = argument.as_ptr();
        }
        for (pointer, variable) in self.variable_pointers.iter_mut().zip(&self.variables) {
            *pointer = variable.as_ptr().cast();
        }
        // SAFETY: both arrays end with a null, as they are longer by one than what was set, and the strings with
        // a zero. All of it is this structure's, and lives as long as the call.
        unsafe {
            libc::execvpe(
                self.program.as_ptr(),
                self.argument_pointers.as_ptr(),
                self.variable_pointers.as_ptr(),
            );
        }
        io::Error::last_os_error()
    }
}

/// Writes a number and a zero; there is room.
fn write_decimal(place: &mut [u8], number: u32) {
    let mut length = 1;
    let mut rest = number / 10;
    while rest > 0 {
        rest /= 10;
        length += 1;
    }
    let mut rest = number;
    for digit in place[..length].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    place[length] = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(environment: &[(&str, &str)]) -> Vec<String> {
        let pairs = environment
            .iter()
            .map(|(name, value)| (name.into(), value.into()));
        let mut exec = Exec::new(&["/no/such/program".into()], pairs).unwrap();
        assert_eq!(exec.execute().kind(), io::ErrorKind::NotFound);
        let text = |variable: &Vec<u8>| {
            let end = variable.iter().position(|byte| *byte == 0).unwrap();
            String::from_utf8(variable[..end].to_vec()).unwrap()
        };
        exec.variables.iter().map(text).collect()
    }

    #[test]
    fn variables_that_name_this_process_name_the_program() {
        // This process executes: the PID stays.
        let own = std::process::id().to_string();
        let of_unit = [
            ("LISTEN_PID", &*own),
            ("LISTEN_FDS", "1"),
            ("LISTEN_PIDFDID", "4711"),
            ("WATCHDOG_PID", &own),
        ];
        let named = [
            format!("LISTEN_PID={own}"),
            "LISTEN_FDS=1".into(),
            format!("WATCHDOG_PID={own}"),
        ];
        assert_eq!(made(&of_unit), named);
        // Another's, and another variable of that value.
        let of_others = [
            ("LISTEN_PID", "1"),
            ("LISTEN_PIDFDID", "4711"),
            ("A", &own),
            ("B", ""),
        ];
        let kept = [
            "LISTEN_PID=1".into(),
            "LISTEN_PIDFDID=4711".into(),
            format!("A={own}"),
            "B=".into(),
        ];
        assert_eq!(made(&of_others), kept);
    }

    #[test]
    fn numbers_of_any_length_are_written() {
        for number in [0, 9, 10, 4_194_304, u32::MAX] {
            let mut place = [b'x'; DIGITS + 1];
            write_decimal(&mut place, number);
            let text = number.to_string();
            assert_eq!(&place[..text.len()], text.as_bytes());
            assert_eq!(place[text.len()], 0);
        }
    }

    #[test]
    fn strings_with_a_zero_and_no_program_are_refused() {
        assert!(Exec::new(&[], []).is_err());
        assert!(Exec::new(&["a\0b".into()], []).is_err());
        assert!(Exec::new(&["a".into()], [("b".into(), "c\0d".into())]).is_err());
    }
}
