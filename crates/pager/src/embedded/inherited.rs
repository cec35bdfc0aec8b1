//! Forked children: they have the registry of their parent's regions, and none of their memory.
//!
//! The addresses are unmapped in a child, which may map something else there and then read that in
//! place of a region's data. [`guard_inherited`] reserves them instead.

use super::limits::GRANULE;
use super::{registry, signals};
use memfold_sys::reserve::occupy;
use std::io;

/// To be called in a forked child before it maps anything, as by `pthread_atfork`. Makes the addresses
/// of its parents' regions inaccessible for good, so that nothing else is mapped there, and ends the
/// process with a message when it accesses one. Does nothing where there is no such region.
///
/// # Errors
/// If the signal handler cannot be installed, or the kernel refuses the reservation.
pub fn guard_inherited() -> io::Result<()> {
    let inherited = registry::inherited();
    if inherited.is_empty() {
        return Ok(());
    }
    signals::explain_inherited()?;
    for range in inherited {
        if occupy(range.start, range.len()).is_ok() {
            continue;
        }
        for granule in range.step_by(GRANULE) {
            match occupy(granule, GRANULE) {
                // A grandchild finds what its parent reserved.
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Whether an address is in a region of this process or of one that it was forked from. Takes no lock.
pub fn is_region(address: usize) -> bool {
    registry::is_area(address)
}

/// Whether an address is in a region of a process that this one was forked from. Takes no lock.
pub fn is_inherited_region(address: usize) -> bool {
    registry::is_inherited_area(address)
}
