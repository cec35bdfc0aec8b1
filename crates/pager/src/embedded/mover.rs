//! By what pages get to the stage.
//!
//! `UFFDIO_MOVE` (Linux 6.8), or else `mremap` with `MREMAP_DONTUNMAP`, to a place of its own, and a copy: the mapping stays
//! where it is, and its pages are missing there. Both are atomic for every other thread. What the first one checks beside that holds here
//! otherwise: mappings of regions are the engine's alone, are not inherited by forks, and are not unmapped while the
//! area's gate is held. It also refuses pages that a device writes to just now (pinned by the kernel), which `mremap`
//! takes. So only [`Mode::Signal`] does without it, where memory for system calls is pinned by the program (`Region::pin`)
//! and stays.

use super::config::Mode;
use memfold_sys::memory::carry_off;
use memfold_sys::probe::{Managed, WITHOUT_MOVE, known_bugs};
use memfold_sys::uffd::{FEATURE_MOVE, Partial, Uffd};
use memfold_sys::{Errno, PAGE_SIZE};
use std::ptr::NonNull;

/// By what pages get to the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mover {
    /// `UFFDIO_MOVE`.
    Userfaultfd,
    /// `mremap`.
    Remap,
}

impl Mover {
    /// Makes the handshake of a new userfaultfd, and chooses.
    ///
    /// # Errors
    /// If the kernel lacks one of `features`, or `UFFDIO_MOVE` where the mode needs it.
    pub(super) fn introduce(uffd: Uffd, features: u64, mode: Mode) -> Result<Mover, Errno> {
        // Regions have no huge pages.
        let is_forbidden = std::env::var_os(WITHOUT_MOVE).is_some()
            || known_bugs(Managed::Started).forbid.is_some();
        let moved = if is_forbidden {
            Err(Errno::EINVAL)
        } else {
            uffd.api(features | FEATURE_MOVE)
        };
        match moved {
            Ok(_) => Ok(Mover::Userfaultfd),
            // The kernel lets it be tried again.
            Err(Errno::EINVAL) if mode == Mode::Signal => uffd.api(features).map(|_| Mover::Remap),
            Err(errno) => Err(errno),
        }
    }

    /// Moves present pages of a region to places of the stage.
    ///
    /// # Safety
    /// As [`carry_off`].
    pub(super) unsafe fn move_run(
        self,
        uffd: Uffd,
        place: NonNull<u8>,
        source: NonNull<u8>,
        pages: usize,
    ) -> Result<(), Partial> {
        let length = pages * PAGE_SIZE;
        match self {
            Mover::Userfaultfd => {
                uffd.move_pages(place.as_ptr() as u64, source.as_ptr() as u64, length as u64)
            }
            // SAFETY: the caller's promise.
            Mover::Remap => match unsafe { carry_off(source, place, length) } {
                // By advice on a part the program has made several mappings of a region, or locked one.
                Err(Errno::EFAULT | Errno::EINVAL) if pages > 1 => {
                    // SAFETY: the caller's promise.
                    unsafe { move_singly(place, source, pages) }
                }
                moved => moved.map_err(|errno| Partial { done: 0, errno }),
            },
        }
    }
}

/// # Safety
/// As [`carry_off`].
unsafe fn move_singly(
    place: NonNull<u8>,
    source: NonNull<u8>,
    pages: usize,
) -> Result<(), Partial> {
    for done in (0..pages).map(|page| page * PAGE_SIZE) {
        // SAFETY: within the ranges of the caller's promise.
        unsafe { carry_off(source.add(done), place.add(done), PAGE_SIZE) }.map_err(|errno| {
            Partial {
                done: done as u64,
                errno,
            }
        })?;
    }
    Ok(())
}
