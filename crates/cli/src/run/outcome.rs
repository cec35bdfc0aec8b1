//! How the program ended, and how memfold ends after it.

use super::raise::die_by;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// By itself, with this status.
    Exited(u8),
    /// By this signal.
    Killed(i32),
}

impl Outcome {
    /// None while the process lives (it was stopped or continued).
    pub fn of(status: ExitStatus) -> Option<Outcome> {
        match (status.code(), status.signal()) {
            (Some(code), _) => Some(Outcome::Exited(code as u8)),
            (_, Some(signal)) => Some(Outcome::Killed(signal)),
            _ => None,
        }
    }

    /// As shells report it: 128 and the number of the signal.
    pub fn exit_code(self) -> u8 {
        match self {
            Outcome::Exited(code) => code,
            Outcome::Killed(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }

    /// The signal that ended it.
    pub fn signal(self) -> Option<i32> {
        match self {
            Outcome::Exited(_) => None,
            Outcome::Killed(signal) => Some(signal),
        }
    }

    /// Ends memfold the same way: its parent sees how the program ended. Returns the code to
    /// exit with, for a program that exited or where this process cannot die by the signal.
    pub fn follow(self) -> ExitCode {
        if let Outcome::Killed(signal) = self {
            die_by(signal);
        }
        ExitCode::from(self.exit_code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn end_of(script: &str) -> Outcome {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .spawn()
            .unwrap();
        Outcome::of(child.wait().unwrap()).unwrap()
    }

    #[test]
    fn ends_are_reported_as_shells_do() {
        assert_eq!(end_of("exit 0"), Outcome::Exited(0));
        assert_eq!(end_of("exit 255").exit_code(), 255);
        let killed = end_of("kill -TERM $$");
        assert_eq!(
            (killed, killed.exit_code(), killed.signal()),
            (Outcome::Killed(15), 143, Some(15))
        );
        // A real-time signal, which has no name.
        assert_eq!(end_of("kill -40 $$").exit_code(), 168);
    }
}
