//! The process that kills programs when the supervisor dies.

use crate::simulation::model::memory::Memory;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A process.
pub(crate) type ProcessHandle = Arc<Memory>;

/// Notes which programs it would kill, and counts them.
#[derive(Debug, Default)]
pub(crate) struct Guardian(AtomicU32);

/// A guarded program.
pub(crate) struct Guarded;

impl Guardian {
    /// Guards a program whose helper may wait for a page when the supervisor dies.
    pub(crate) fn guard_helped(&self, process: ProcessHandle) -> io::Result<Guarded> {
        self.0.fetch_add(1, Ordering::Relaxed);
        process.guarded.store(true, Ordering::Relaxed);
        Ok(Guarded)
    }
}
