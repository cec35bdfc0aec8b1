//! Checksums of pages.
//!
//! The checksum covers the uncompressed page: it is taken before compression and verified after
//! decompression, so it catches damage to the stored bytes and codec bugs alike. It is CRC-32, which
//! detects every burst error of up to 32 bits and is cheap with carry-less multiplication.

use crate::{error::Corruption, page::Page, slot::Slot};

/// Whether pages have checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksums {
    On,
    Off,
}

impl Checksums {
    /// The checksum of `page` in `slot`. It covers the slot, so that a page that is found under
    /// another slot is refused.
    pub(crate) fn seal(self, slot: Slot, page: &Page) -> u32 {
        match self {
            Self::On => crc32fast::hash(page) ^ slot.into_raw().wrapping_mul(0x9e37_79b1),
            Self::Off => 0,
        }
    }

    /// Compares `page` with its stored checksum.
    pub(crate) fn verify(self, slot: Slot, page: &Page, kept: u32) -> Result<(), Corruption> {
        if self.seal(slot, page) == kept {
            Ok(())
        } else {
            Err(Corruption::Checksum)
        }
    }
}
