//! Compressed pages in the pool.
//!
//! An object is a header and the compressed data. The header names the slot, so that an entry that
//! points to another page's data is detected, and so that compaction can find the entry of an
//! object.

use std::sync::Arc;

use zsmalloc::{ObjectWord, PageSource, Pool};

use crate::{
    PAGE_SIZE,
    checksum::Checksums,
    codec::Codec,
    entry::{Location, TierKind},
    error::{Corruption, LoadError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    tier::{Placed, Stored, Tier},
    zstd::Uncompressed,
};

/// Bytes of a header: slot, checksum, and 12 bits for the length of the data with 4 for its codec.
const HEADER: usize = 4 + 4 + 2;

const LENGTH_BITS: u32 = 12;
const LENGTH_MASK: u16 = (1 << LENGTH_BITS) - 1;

/// The longest object, in bytes. A longer one takes as much of its zspage as a whole page would.
const MAX_OBJECT: usize = PAGE_SIZE / 16 * 15;

const _: () = assert!(MAX_OBJECT <= LENGTH_MASK as usize);
// The highest bit of a location tells blocks apart.
const _: () = assert!(ObjectWord::BITS < Location::BITS);

/// The slot that an object of a compressed tier was stored for.
pub(crate) fn slot_of(object: &[u8]) -> Option<Slot> {
    object
        .first_chunk()
        .map(|bytes| Slot::from_raw(u32::from_le_bytes(*bytes)))
}

/// The object at a location of a tier that lies in the pool.
pub(super) fn object_at(location: Location) -> Option<ObjectWord> {
    ObjectWord::from_raw(location.into_raw())
}

/// Frees objects of a tier that lies in the pool.
pub(super) fn free_objects<S: PageSource>(pool: &Pool<S>, locations: &[Location]) {
    let word = |location: &Location| {
        object_at(*location).unwrap_or_else(|| {
            panic!(
                "invalid swap entry: {:#x} names no object",
                location.into_raw()
            )
        })
    };
    match locations {
        [location] => pool.free(word(location)),
        _ => free_words(pool, &mut locations.iter().map(word).collect::<Vec<_>>()),
    }
}

/// Frees objects of the pool.
pub(super) fn free_words<S: PageSource>(pool: &Pool<S>, words: &mut [ObjectWord]) {
    match words {
        [] => {}
        [word] => pool.free(*word),
        _ => pool.free_bulk(words),
    }
}

/// Bytes of the slot of the object at `location`, from its word.
pub(super) fn object_bytes<S: PageSource>(pool: &Pool<S>, location: Location) -> u64 {
    let bytes = object_at(location).and_then(|word| pool.slot_bytes(word));
    bytes.map_or(0, |bytes| bytes as u64)
}

/// Pages compressed with one codec.
#[derive(Debug)]
pub(crate) struct CompressedTier<S: PageSource> {
    kind: TierKind,
    codec: Codec,
    checksums: Checksums,
    pool: Arc<Pool<S>>,
}

impl<S: PageSource> CompressedTier<S> {
    pub(crate) fn new(
        kind: TierKind,
        codec: Codec,
        checksums: Checksums,
        pool: Arc<Pool<S>>,
    ) -> Self {
        Self {
            kind,
            codec,
            checksums,
            pool,
        }
    }

    fn decode(
        &self,
        slot: Slot,
        object: &[u8],
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), Corruption> {
        if slot_of(object) != Some(slot) {
            return Err(Corruption::WrongSlot);
        }
        let (header, data) = object
            .split_first_chunk::<HEADER>()
            .ok_or(Corruption::BadLength)?;
        let &[_, _, _, _, c0, c1, c2, c3, l0, l1] = header;
        let length_and_codec = u16::from_le_bytes([l0, l1]);
        let length = usize::from(length_and_codec & LENGTH_MASK);
        let data = data.get(..length).ok_or(Corruption::BadLength)?;
        let codec =
            Codec::of_tag(length_and_codec >> LENGTH_BITS).ok_or(Corruption::Undecodable)?;
        if !codec.decompress(data, out, scratch) {
            return Err(Corruption::Undecodable);
        }
        self.checksums
            .verify(slot, out, u32::from_le_bytes([c0, c1, c2, c3]))
    }
}

impl<S: PageSource> Tier for CompressedTier<S> {
    fn kind(&self) -> TierKind {
        self.kind
    }

    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError> {
        let data = match self.codec.compress(page, MAX_OBJECT - HEADER, scratch) {
            Ok(data) => data,
            Err(Uncompressed::TooLong) => return Ok(Placed::Declined),
            Err(Uncompressed::Failed) => {
                return Err(StoreError::Tier {
                    tier: self.kind,
                    reason: "the codec failed",
                });
            }
        };
        let checksum = self.checksums.seal(slot, page);
        let word = self.pool.store_with(HEADER + data.len(), |object| {
            object[..4].copy_from_slice(&slot.into_raw().to_le_bytes());
            object[4..8].copy_from_slice(&checksum.to_le_bytes());
            let length_and_codec = data.len() as u16 | self.codec.tag() << LENGTH_BITS;
            object[8..HEADER].copy_from_slice(&length_and_codec.to_le_bytes());
            object[HEADER..].copy_from_slice(data);
        })?;
        Ok(Placed::At(Location::from_raw(word.into_raw())))
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let slot = stored.slot();
        let corrupt = |what| LoadError::Corrupt {
            slot,
            tier: self.kind,
            what,
        };
        let word = object_at(stored.location()).ok_or(corrupt(Corruption::NoObject))?;
        self.pool
            .try_read_slot(word, |object| self.decode(slot, object, out, scratch))
            .unwrap_or(Err(Corruption::NoObject))
            .map_err(corrupt)
    }

    fn free(&self, locations: &mut [Location]) {
        free_objects(&self.pool, locations);
    }

    fn bytes(&self, location: Location) -> u64 {
        object_bytes(&self.pool, location)
    }

    fn reads(&self, other: TierKind) -> bool {
        // Both kinds are in the same pool, and an object's header names its codec.
        matches!(other, TierKind::Compressed | TierKind::Recompressed)
    }
}
