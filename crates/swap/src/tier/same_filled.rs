//! Pages that repeat one 64-bit word.
//!
//! The word is encoded in the entry's 52 bits of location: two for the encoding, 50 for the value.
//! Counters, pointers and small numbers fit as they are, round floating-point numbers without their
//! low zeros, bytes and 32-bit words as a half. Any other word goes to the slot's annex.

use crate::{
    entry::{Location, TierKind},
    error::{LoadError, StoreError},
    page::{Page, fill, fill_word},
    scratch::Scratch,
    slot::Slot,
    tier::{Placed, Stored, Tier},
};

const VALUE_BITS: u32 = 50;
const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;
const LOW_ZEROS: u32 = u64::BITS - VALUE_BITS;

const AS_IT_IS: u64 = 0;
const HIGH_BITS: u64 = 1;
const REPEATED_HALF: u64 = 2;
const IN_ANNEX: u64 = 3;

/// The location that encodes a word, if there is one.
fn encode(word: u64) -> Option<Location> {
    let (how, value) = if word <= VALUE_MASK {
        (AS_IT_IS, word)
    } else if word.trailing_zeros() >= LOW_ZEROS {
        (HIGH_BITS, word >> LOW_ZEROS)
    } else if word == word.rotate_left(32) {
        (REPEATED_HALF, word & u64::from(u32::MAX))
    } else {
        return None;
    };
    Some(Location::from_raw(how << VALUE_BITS | value))
}

/// Same-filled pages, which need no storage besides their entry.
#[derive(Debug)]
pub(crate) struct SameFilledTier;

impl Tier for SameFilledTier {
    fn kind(&self) -> TierKind {
        TierKind::SameFilled
    }

    fn store(&self, _: Slot, page: &Page, _: &mut Scratch) -> Result<Placed, StoreError> {
        let Some(word) = fill_word(page) else {
            return Ok(Placed::Declined);
        };
        Ok(match encode(word) {
            Some(location) => Placed::At(location),
            None => Placed::WithAnnex(Location::from_raw(IN_ANNEX << VALUE_BITS), word),
        })
    }

    fn load(&self, stored: Stored<'_>, out: &mut Page, _: &mut Scratch) -> Result<(), LoadError> {
        let value = stored.location().into_raw() & VALUE_MASK;
        let word = match stored.location().into_raw() >> VALUE_BITS {
            AS_IT_IS => value,
            HIGH_BITS => value << LOW_ZEROS,
            REPEATED_HALF => value << 32 | value,
            _ => stored.annex(),
        };
        fill(out, word);
        Ok(())
    }

    fn free(&self, _: &mut [Location]) {}

    fn bytes(&self, _: Location) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_SIZE, sync::atomic::AtomicU64};

    fn survives(word: u64) -> Placed {
        let mut page = [0; PAGE_SIZE];
        fill(&mut page, word);
        let mut scratch = Scratch::new();
        let slot = Slot::from_raw(600);
        let placed = SameFilledTier.store(slot, &page, &mut scratch).unwrap();
        let (location, annex) = match placed {
            Placed::At(location) => (location, 0xdead),
            Placed::WithAnnex(location, annex) => (location, annex),
            Placed::Declined => panic!("a page of {word:#x} was declined"),
        };
        let annex = AtomicU64::new(annex);
        let mut out = [0xee; PAGE_SIZE];
        SameFilledTier
            .load(Stored::new(slot, location, &annex), &mut out, &mut scratch)
            .unwrap();
        assert_eq!(out, page, "{word:#x}");
        placed
    }

    #[test]
    fn every_word_survives() {
        for shift in 0..64 {
            for pattern in [1, 0b101, 0xff, u64::MAX, 0x0123_4567_89ab_cdef] {
                survives(pattern << shift);
                survives(pattern >> shift);
                survives(!(pattern << shift));
            }
        }
    }

    #[test]
    fn common_words_need_no_annex() {
        for word in [
            0,
            42,
            0x7fff_1234_5678,
            1.0_f64.to_bits(),
            1e3_f64.to_bits(),
            u64::MAX,
        ] {
            assert!(matches!(survives(word), Placed::At(_)), "{word:#x}");
        }
        let halves = u64::from(0.1_f32.to_bits()) << 32 | u64::from(0.1_f32.to_bits());
        assert!(matches!(survives(halves), Placed::At(_)));
        assert!(matches!(survives(0.1_f64.to_bits()), Placed::WithAnnex(..)));
    }
}
