//! What must be true of a helper's memory before the helper gets commands.

use crate::supervised::space::AddressSpace;
use crate::time::Instant;
use memfold_sys::process;
use std::sync::OnceLock;
use std::time::Duration;

/// Time after which memory that did not show as sealed is looked at again, for the last time. An address
/// space that is being taken down shows parts of itself; longer hides longer that a helper is unusable.
const CONFIRMED_AFTER: Duration = Duration::from_millis(100);

/// Whether memory is sealed, as far as it is known. The reclaimer looks; nothing blocks.
#[derive(Debug, Default)]
pub(crate) struct Seal {
    known: OnceLock<bool>,
    /// Time of the look that did not show it.
    missed: OnceLock<Instant>,
}

impl Seal {
    /// Whether the memory is known to be sealed. `look` returns whether it shows as such at the time
    /// `now`; it is called once, and a second time if it returned `false`. `None`: not known now.
    fn looked_at(&self, now: Instant, look: impl FnOnce() -> bool) -> Option<bool> {
        if let Some(known) = self.known.get() {
            return Some(*known);
        }
        let missed = self.missed.get();
        if missed.is_some_and(|missed| now.duration_since(*missed) < CONFIRMED_AFTER) {
            return None;
        }
        let is_sealed = look();
        if is_sealed || missed.is_some() {
            return Some(*self.known.get_or_init(|| is_sealed));
        }
        self.missed.get_or_init(|| now);
        None
    }
}

impl AddressSpace {
    /// Whether the stage is sealed anonymous memory, so that reading it never waits for a file that the
    /// program maps over it; always where the kernel does not seal, or pages are carried off. Read once, before the first command,
    /// and a second time where the seal did not show: the kernel takes some time for each VMA.
    pub(crate) fn is_sealed(&self) -> bool {
        let Some(attached) = self.attached() else {
            return false;
        };
        let (stage, inspector) = (attached.arena.stage, &attached.inspector);
        let range = (stage.start.address(), stage.end.address());
        let was_known = self.seal.known.get().is_some();
        let known = self.seal.looked_at(Instant::now(), || {
            let must_be_sealed = process::kernel_seals() && !self.resources.carries();
            !must_be_sealed || inspector.has_sealed(&[range]).unwrap_or(false)
        });
        if !was_known && known.is_some() {
            if !self.resources.prepares_forks() {
                inspector.close_flags();
            }
            if known == Some(false) && !inspector.stands_still() {
                log::warn!(
                    "cannot page out process {}: its helper's memory is not sealed (mseal); the limit may be \
                     exceeded by its size",
                    inspector.pid()
                );
            }
        }
        known == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_unsealed_only_if_the_seal_is_missing_twice() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let missed = || {
            let seal = Seal::default();
            assert_eq!(seal.looked_at(at(0), || false), None);
            assert_eq!(seal.looked_at(at(50), || panic!("too soon")), None);
            seal
        };
        let seal = missed();
        assert_eq!(seal.looked_at(at(100), || true), Some(true));
        assert_eq!(seal.looked_at(at(900), || panic!("known")), Some(true));
        let seal = missed();
        assert_eq!(seal.looked_at(at(100), || false), Some(false));
        assert_eq!(seal.looked_at(at(900), || panic!("known")), Some(false));
        assert_eq!(Seal::default().looked_at(at(0), || true), Some(true));
    }
}
