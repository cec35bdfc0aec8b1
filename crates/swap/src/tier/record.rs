//! A page as it is kept outside of memory: a checksum, the data, compressed where that makes it shorter,
//! and an authentication tag, encrypted up to the tag.

use crate::{
    PAGE_SIZE,
    checksum::Checksums,
    codec::Codec,
    entry::{Location, TierKind},
    error::{Corruption, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    tier::{
        Stored,
        cipher::{Cipher, TAG, TierKey},
    },
    zstd::Uncompressed,
};

/// Bytes of the checksum before a page's data.
const CHECKSUM: usize = 4;
/// Bytes of a record beside a page's data.
pub(super) const OVERHEAD: usize = CHECKSUM + TAG;
/// The longest compressed data, in bytes; a page that needs more is stored uncompressed.
pub(super) const MAX_DATA: usize = PAGE_SIZE - PAGE_SIZE / 16;

const _: () = assert!(MAX_DATA < PAGE_SIZE, "the length tells what is compressed");

/// Makes records of a tier's pages, and pages of its records.
pub(super) struct RecordCodec {
    tier: TierKind,
    cipher: Cipher,
    codec: Codec,
}

impl RecordCodec {
    /// For a tier with this key, at a level of zstd.
    pub(super) fn new(tier: TierKind, key: &TierKey, level: i32) -> Self {
        Self {
            tier,
            cipher: Cipher::new(key),
            codec: Codec::Zstd { level },
        }
    }

    /// Appends a page's checksum and data to `out`, with room for the tag. Returns the length of the
    /// compressed data; 0 if it is not compressed. Appends nothing on failure.
    pub(super) fn pack(
        &self,
        slot: Slot,
        page: &Page,
        scratch: &mut Scratch,
        out: &mut Vec<u8>,
    ) -> Result<u16, StoreError> {
        let (data, length) = match self.codec.compress(page, MAX_DATA, scratch) {
            Ok(data) => (data, data.len() as u16),
            Err(Uncompressed::TooLong) => (&page[..], 0),
            Err(Uncompressed::Failed) => {
                return Err(StoreError::Tier {
                    tier: self.tier,
                    reason: "the codec failed",
                });
            }
        };
        out.reserve(data.len() + OVERHEAD);
        out.extend_from_slice(&Checksums::On.seal(slot, page).to_le_bytes());
        out.extend_from_slice(data);
        out.resize(out.len() + TAG, 0);
        Ok(length)
    }

    /// Encrypts a packed page for its place. Returns the annex word of its entry.
    pub(super) fn seal(&self, slot: Slot, location: Location, record: &mut [u8]) -> u64 {
        self.cipher.seal(slot, location, record)
    }

    /// Decrypts a record, in place, and unpacks its page, if both are what was stored.
    pub(super) fn open(
        &self,
        stored: Stored<'_>,
        record: &mut [u8],
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), Corruption> {
        let opened = self
            .cipher
            .open(stored.slot(), stored.location(), stored.annex(), record);
        let plain = opened.ok_or(Corruption::Forged)?;
        let (checksum, data) = plain.split_first_chunk().ok_or(Corruption::BadLength)?;
        match <&Page>::try_from(data) {
            Ok(page) => *out = *page,
            Err(_) if self.codec.decompress(data, out, scratch) => {}
            Err(_) => return Err(Corruption::Undecodable),
        }
        Checksums::On.verify(stored.slot(), out, u32::from_le_bytes(*checksum))
    }
}
