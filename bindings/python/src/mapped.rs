//! The memory of arrays, counted: a process that has some forks with a warning.

use memfold::{Error, Memfold, Region};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many are there. Relaxed: no data depends on it.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A region, counted as long as it is there.
pub struct Mapped(Region);

impl Mapped {
    /// A region of at least `length` bytes, which reads as zeros.
    pub fn new(memfold: &Memfold, length: usize) -> Result<Mapped, Error> {
        let region = memfold.map(length)?;
        COUNT.fetch_add(1, Ordering::Relaxed);
        Ok(Mapped(region))
    }
}

impl Deref for Mapped {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // A forked child counts its own from zero.
        if !self.0.is_inherited() {
            COUNT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Whether this process has arrays of its own.
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// In a forked child, which has none.
pub fn forget_inherited() {
    COUNT.store(0, Ordering::Relaxed);
}
