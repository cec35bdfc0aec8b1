//! By what programs' pages are taken away: `UFFDIO_MOVE`, or `mremap` where the kernel has none.

use super::move_bugs::{Managed, known_bugs};
use super::try_move::{WITHOUT_MOVE, try_move, works};
use super::{Check, NEWER_KERNEL, errno_of};
use crate::memory::Mapping;
use crate::owned_uffd::kernel_has;
use crate::uffd::FEATURE_MOVE;
use crate::{Errno, PAGE_SIZE};

/// By what programs' pages are taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mover {
    /// `UFFDIO_MOVE` (Linux 6.8).
    Userfaultfd,
    /// `mremap` with `MREMAP_DONTUNMAP`.
    Remap,
}

/// By what pages of these are taken away on this kernel: what works when it is tried, and has no known bug that may show.
///
/// # Errors
/// If neither works.
pub fn mover(of: Managed) -> Result<Mover, Errno> {
    if works() && known_bugs(of).forbid.is_none() {
        return Ok(Mover::Userfaultfd);
    }
    if try_carry()? {
        Ok(Mover::Remap)
    } else {
        Err(Errno::EINVAL)
    }
}

pub(super) fn check() -> Check {
    const NAME: &str = "userfaultfd-move";
    let why = match try_move() {
        _ if std::env::var_os(WITHOUT_MOVE).is_some() => format!("{WITHOUT_MOVE} is set"),
        Ok(true) if known_bugs(Managed::Started).forbid.is_none() => {
            return Check::ok(NAME, "a page was moved (UFFDIO_MOVE)");
        }
        Ok(true) => "a page was moved (UFFDIO_MOVE), but see uffdio-move-bugs".to_owned(),
        Ok(false) => "a page moved by UFFDIO_MOVE arrived changed".to_owned(),
        Err(_) if !kernel_has(FEATURE_MOVE) => {
            "this kernel has no UFFDIO_MOVE (Linux 6.8)".to_owned()
        }
        Err(errno) => format!("UFFDIO_MOVE: {errno}"),
    };
    match try_carry() {
        Ok(true) => Check::ok(
            NAME,
            format!(
                "{why}, so pages are taken away by mremap: slower, and buffers of O_DIRECT must be locked (docs/limits.md)"
            ),
        ),
        Ok(false) => Check::missing(
            NAME,
            format!("{why}; mremap left a page behind"),
            NEWER_KERNEL,
        ),
        Err(errno) => Check::missing(NAME, format!("{why}; mremap: {errno}"), NEWER_KERNEL),
    }
}

/// Takes the first of two pages away, over the second, and looks at both.
fn try_carry() -> Result<bool, Errno> {
    const WORD: u64 = 0x6d65_6d66_6f6c_6432;
    let pages = Mapping::anonymous(2 * PAGE_SIZE).map_err(|error| errno_of(&error))?;
    let source = pages.start();
    // SAFETY: the second page of a live mapping.
    let target = unsafe { source.add(PAGE_SIZE) };
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: both pages are of a live mapping, and nothing refers to them. (If it fails, the second one may be unmapped,
    // and is not touched.)
    unsafe {
        source.cast::<u64>().write_volatile(WORD);
        let moved = libc::mremap(
            source.as_ptr().cast(),
            PAGE_SIZE,
            PAGE_SIZE,
            flags,
            target.as_ptr(),
        );
        if moved == libc::MAP_FAILED {
            return Err(errno_of(&std::io::Error::last_os_error()));
        }
        let [left, there] = [source, target].map(|page| page.cast::<u64>().read_volatile());
        Ok(left == 0 && there == WORD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_away_by_mremap() {
        // Since Linux 5.7.
        assert_eq!(try_carry(), Ok(true));
    }

    #[test]
    fn what_is_used_is_what_works() {
        let moves = works() && known_bugs(Managed::Started).forbid.is_none();
        let expected = if moves {
            Mover::Userfaultfd
        } else {
            Mover::Remap
        };
        assert_eq!(mover(Managed::Started), Ok(expected));
        let by_move = !check().found.contains("mremap");
        assert_eq!(by_move, moves);
    }
}
