//! memfold's own failures: one line and an exit status.

use crate::format::printable;
use crate::patient;
use std::process::ExitCode;
use std::{fmt, io};

/// The program was not started, or memfold failed by itself.
pub const OWN: u8 = 125;
/// The program was found but could not be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// The program was not found.
pub const NOT_FOUND: u8 = 127;

/// Why memfold ends without the program's own exit status.
#[derive(Debug)]
pub struct Failure {
    message: String,
    status: u8,
}

impl Failure {
    /// A failure of memfold's own, exit status 125. `message` is one line, with the remedy.
    pub fn own(message: impl Into<String>) -> Failure {
        Failure::with_status(OWN, message)
    }

    /// A failure with another status.
    pub fn with_status(status: u8, message: impl Into<String>) -> Failure {
        Failure {
            message: message.into(),
            status,
        }
    }

    /// Prints the message, fit for a terminal, and returns the exit code. Names of files, and what programs, runs and
    /// other machines say, may be in it.
    pub fn report(&self) -> ExitCode {
        let line = format!("memfold: {}\n", printable(&self.message));
        // The status tells of it even where standard error is full or its reader gone.
        let _ = patient::write_all(&mut io::stderr(), line.as_bytes());
        ExitCode::from(self.status)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
