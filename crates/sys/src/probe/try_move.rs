//! Whether `UFFDIO_MOVE` works here.

use super::errno_of;
use crate::memory::Mapping;
use crate::owned_uffd::{self, borrow};
use crate::uffd::FEATURE_MOVE;
use crate::{Errno, PAGE_SIZE};

/// Set in the environment, it has memfold do without `UFFDIO_MOVE`, for tests of how it does.
pub const WITHOUT_MOVE: &str = "MEMFOLD_WITHOUT_MOVE";

/// Whether `UFFDIO_MOVE` works when it is tried.
pub(super) fn works() -> bool {
    /// A page may be busy for a moment, and the other way is slower.
    const ATTEMPTS: usize = 10;
    std::env::var_os(WITHOUT_MOVE).is_none() && (0..ATTEMPTS).any(|_| try_move() == Ok(true))
}

/// Moves the first of two pages over the second and looks at it.
pub(super) fn try_move() -> Result<bool, Errno> {
    const WORD: u64 = 0x6d65_6d66_6f6c_6431;
    let pages = Mapping::anonymous(2 * PAGE_SIZE).map_err(|error| errno_of(&error))?;
    let descriptor = owned_uffd::create()?;
    let uffd = borrow(&descriptor);
    uffd.api(FEATURE_MOVE)?;
    let source = pages.start().as_ptr() as u64;
    let target = source + PAGE_SIZE as u64;
    // SAFETY: the first page of a live mapping, written before anything is registered.
    unsafe { pages.start().cast::<u64>().write_volatile(WORD) };
    uffd.register(target, PAGE_SIZE as u64)?;
    let moved = uffd.move_pages(target, source, PAGE_SIZE as u64);
    // Without this a read of the missing page below would wait for a handler that isn't there.
    uffd.unregister(target, PAGE_SIZE as u64)?;
    moved.map_err(|partial| partial.errno)?;
    // SAFETY: the second page of a live mapping, no longer registered.
    Ok(unsafe { (target as *const u64).read_volatile() } == WORD)
}
