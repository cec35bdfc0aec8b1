//! What memfold says on standard error while a program runs, its libraries included.
//!
//! One way for all: the `log` facade, so that the libraries need not know who listens (a program
//! that embeds them has a logger of its own), and `--quiet` is a level. Errors, which tell why a
//! program was stopped, are always shown.

use log::{LevelFilter, Log, Metadata, Record};
use std::io::Write;

struct StandardError;

static LOGGER: StandardError = StandardError;

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("memfold")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // In one piece, as the program writes there too. Standard error may be closed: that must
            // not end the supervisor.
            let line = format!("memfold: {}\n", record.args());
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
}

/// Shows messages from now on: only errors if `quiet`.
pub fn show(quiet: bool) {
    // A second logger is refused, and the first is the same.
    let _ = log::set_logger(&LOGGER);
    log::set_max_level(if quiet {
        LevelFilter::Error
    } else {
        LevelFilter::Info
    });
}
