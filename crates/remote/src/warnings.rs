//! Warnings on standard error, for programs that have no logger.

use log::{Level, LevelFilter, Log, Metadata, Record};

struct StandardError;

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn && metadata.target().starts_with("memfold")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = format!("memfold: {}\n", record.args());
            // Not by std's stream: a fault may have interrupted the thread while it writes there.
            let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
        }
    }

    fn flush(&self) {}
}

/// Has warnings of stores written to standard error from now on: that one may evict pages, is full, does not answer or is
/// not encrypted. Without effect if the program has a logger of the `log` crate, which gets them then.
pub fn show_warnings() {
    if log::set_logger(&StandardError).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
