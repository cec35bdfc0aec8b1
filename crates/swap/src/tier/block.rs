//! Blocks: several pages compressed as one, with a slot each.
//!
//! A block is a head object, which its record names, and full pages for what does not fit it:
//!
//! ```text
//!  head  [ record | number | length | pages, full pages | slot, checksum of each page | words of
//!          full pages | end of the data ]
//! ```
//!
//! Compaction moves the head under its record. A full page fills its zspage, which is never sparse,
//! so its word stays. The number of a block is used once in the life of the process, so that a thread
//! which has decompressed a block last knows it again: neighbours come out of one decompression.

use std::sync::Arc;

use zsmalloc::{ObjectWord, PageSource, Pool};

use crate::{
    PAGE_SIZE,
    block_record::{BlockRecord, FreedPage, MAX_BLOCK_PAGES},
    checksum::Checksums,
    entry::{Location, TierKind},
    error::{Corruption, LoadError, StoreError},
    page::Page,
    scratch::{BlockBuffer, Scratch},
    slot::Slot,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    tier::{Placed, Stored, Tier, block_records::BlockRecords, compressed::free_words},
    zstd::{Uncompressed, ZstdContexts},
};

const PLACE_BITS: u32 = 4;
const _: () = assert!(1 << PLACE_BITS == MAX_BLOCK_PAGES);
const _: () = assert!(PAGE_SIZE.is_multiple_of(HEAD_UNIT));

/// Record, number, length of the data, pages, full pages.
const FIXED: usize = 4 + 8 + 4 + 1 + 1;
/// Slot and checksum.
const PER_PAGE: usize = 4 + 4;
const PER_FULL_PAGE: usize = 8;
/// Bytes of which the size of a head is a multiple. More wastes more in each; fewer spreads the heads of a small pool over
/// more size classes, each with a zspage that is not full.
const HEAD_UNIT: usize = 64;

fn location(id: u32, place: usize) -> Location {
    Location::from_raw(u64::from(id) << PLACE_BITS | place as u64)
}

fn parts(location: Location) -> (u32, usize) {
    let raw = location.into_raw();
    let place = raw & ((1 << PLACE_BITS) - 1);
    ((raw >> PLACE_BITS) as u32, place as usize)
}

/// A number for a block.
fn next_number() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// A head, parsed.
struct Head<'a> {
    record: u32,
    number: u64,
    length: usize,
    pages: usize,
    /// Slot and checksum of each page.
    seals: &'a [u8],
    full_pages: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Head<'a> {
    fn parse(object: &'a [u8]) -> Option<Self> {
        let (fixed, rest) = object.split_first_chunk::<FIXED>()?;
        let (record, after) = fixed.split_first_chunk::<4>()?;
        let (number, after) = after.split_first_chunk::<8>()?;
        let (length, counts) = after.split_first_chunk::<4>()?;
        let &[pages, full_pages] = counts else {
            return None;
        };
        let (pages, full_pages) = (usize::from(pages), usize::from(full_pages));
        let (seals, rest) = rest.split_at_checked(pages * PER_PAGE)?;
        let (full_pages, rest) = rest.split_at_checked(full_pages * PER_FULL_PAGE)?;
        Some(Self {
            record: u32::from_le_bytes(*record),
            number: u64::from_le_bytes(*number),
            length: u32::from_le_bytes(*length) as usize,
            pages,
            seals,
            full_pages,
            rest,
        })
    }

    /// Slot and checksum of the page at a place.
    fn seal(&self, place: usize) -> Option<(Slot, u32)> {
        let seal = self
            .seals
            .get(place * PER_PAGE..)?
            .first_chunk::<PER_PAGE>()?;
        let &[s0, s1, s2, s3, c0, c1, c2, c3] = seal;
        let slot = Slot::from_raw(u32::from_le_bytes([s0, s1, s2, s3]));
        Some((slot, u32::from_le_bytes([c0, c1, c2, c3])))
    }

    /// The objects with the full pages of data.
    fn full_pages(&self) -> impl Iterator<Item = Option<ObjectWord>> {
        let (words, _) = self.full_pages.as_chunks::<PER_FULL_PAGE>();
        words
            .iter()
            .map(|word| ObjectWord::from_raw(u64::from_le_bytes(*word)))
    }
}

/// Full pages of data beside a head: as few as leave a head that fits a page.
fn full_pages(pages: usize, length: usize) -> usize {
    let fits = |full: &usize| {
        let header = FIXED + pages * PER_PAGE + full * PER_FULL_PAGE;
        header + length.saturating_sub(full * PAGE_SIZE) <= PAGE_SIZE
    };
    (0..=MAX_BLOCK_PAGES)
        .find(fits)
        .expect("a block is shorter than its pages")
}

/// The record that a head names.
fn record_of(object: &[u8]) -> Option<u32> {
    object.first_chunk().map(|id| u32::from_le_bytes(*id))
}

/// Pages in blocks.
#[derive(Debug)]
pub(crate) struct BlockTier<S: PageSource> {
    checksums: Checksums,
    pool: Arc<Pool<S>>,
    records: BlockRecords,
    /// Bytes charged to pages that were freed, in blocks that are there. A sum of wrapping differences.
    dead_bytes: AtomicU64,
}

impl<S: PageSource> BlockTier<S> {
    /// No blocks yet.
    pub(crate) fn new(checksums: Checksums, pool: Arc<Pool<S>>) -> Self {
        Self {
            checksums,
            pool,
            records: BlockRecords::new(),
            dead_bytes: AtomicU64::new(0),
        }
    }

    fn record(&self, location: Location) -> &BlockRecord {
        self.records.get(parts(location).0).unwrap_or_else(|| {
            panic!(
                "invalid swap entry: {:#x} names no block",
                location.into_raw()
            )
        })
    }

    /// Whether at most half of the pages of the block at `location` are in use, so that it is to be
    /// taken apart. May be outdated at once.
    pub(crate) fn is_sparse(&self, location: Location) -> bool {
        let record = self.record(location);
        record.live_pages() * 2 <= record.pages()
    }

    /// Whether all pages of the block are in use.
    pub(crate) fn is_whole(&self, location: Location) -> bool {
        let record = self.record(location);
        record.live_pages() == record.pages()
    }

    /// Bytes that would be freed for the page at `location` if the whole block moved.
    pub(crate) fn held_bytes(&self, location: Location) -> u64 {
        let record = self.record(location);
        record.bytes() / record.live_pages().max(1) as u64
    }

    /// Bytes of freed pages in blocks with others that are in use.
    pub(crate) fn dead_bytes(&self) -> u64 {
        let bytes = self.dead_bytes.load(Relaxed);
        // The last page may be freed before an earlier one is counted.
        if bytes > u64::MAX / 2 { 0 } else { bytes }
    }

    pub(crate) fn heap_bytes(&self) -> u64 {
        self.records.heap_bytes()
    }

    /// Changes the word of a head that compaction moved. `false` if it is no head that is in use.
    pub(crate) fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        let record = record_of(object).and_then(|id| self.records.get(id));
        record.is_some_and(|record| record.relocate(old.into_raw(), new.into_raw()))
    }

    fn failed(reason: &'static str) -> StoreError {
        StoreError::Tier {
            tier: TierKind::Block,
            reason,
        }
    }

    /// Compresses pages as a block into the buffer. `None` if that does not make them shorter.
    fn compress(
        (pages, level): (&[(Slot, &Page)], i32),
        buffer: &mut BlockBuffer,
        zstd: &mut ZstdContexts,
    ) -> Result<Option<usize>, StoreError> {
        let (plain, packed) = buffer.begin(pages.len()).ok_or(StoreError::NoMemory)?;
        for (copy, (_, page)) in plain.iter_mut().zip(pages) {
            *copy = **page;
        }
        let most = pages.len() * (PAGE_SIZE / 16 * 15);
        match zstd.compress(level, plain.as_flattened(), &mut packed[..most]) {
            Ok(length) => {
                // The end of the last full page.
                let end = length.next_multiple_of(PAGE_SIZE);
                packed[length..end].fill(0);
                Ok(Some(length))
            }
            Err(Uncompressed::TooLong) => Ok(None),
            Err(Uncompressed::Failed) => Err(Self::failed("the codec failed")),
        }
    }

    /// Stores the objects of a block. Returns the head's word and the bytes of all; keeps none on
    /// failure.
    fn store_objects(
        &self,
        id: u32,
        pages: &[(Slot, &Page)],
        data: &[u8],
        length: usize,
    ) -> Result<(ObjectWord, u64), StoreError> {
        let count = full_pages(pages.len(), length);
        let mut words = Vec::with_capacity(count + 1);
        let (full, _) = data.as_chunks::<PAGE_SIZE>();
        let rest = data.get(count * PAGE_SIZE..length).unwrap_or(&[]);
        let header_size = FIXED + pages.len() * PER_PAGE + count * PER_FULL_PAGE;
        let size = (header_size + rest.len()).next_multiple_of(HEAD_UNIT);
        let mut stored = full[..count]
            .iter()
            .try_for_each(|page| self.pool.store(&[page]).map(|word| words.push(word)));
        if stored.is_ok() {
            let head = self.pool.store_with(size, |object| {
                let mut header = Vec::with_capacity(header_size);
                header.extend_from_slice(&id.to_le_bytes());
                header.extend_from_slice(&next_number().to_le_bytes());
                header.extend_from_slice(&(length as u32).to_le_bytes());
                header.extend_from_slice(&[pages.len() as u8, count as u8]);
                for (slot, page) in pages {
                    header.extend_from_slice(&slot.into_raw().to_le_bytes());
                    header.extend_from_slice(&self.checksums.seal(*slot, page).to_le_bytes());
                }
                for word in &words {
                    header.extend_from_slice(&word.into_raw().to_le_bytes());
                }
                let (start, end) = object.split_at_mut(header.len());
                start.copy_from_slice(&header);
                let (data, unused) = end.split_at_mut(rest.len());
                data.copy_from_slice(rest);
                unused.fill(0);
            });
            stored = head.map(|word| words.push(word));
        }
        let bytes = |word: &ObjectWord| self.pool.slot_bytes(*word).unwrap_or(0) as u64;
        match (stored, words.last()) {
            (Ok(()), Some(&head)) => Ok((head, words.iter().map(bytes).sum())),
            (Err(error), _) => {
                free_words(&self.pool, &mut words);
                Err(error.into())
            }
            (Ok(()), None) => Err(Self::failed("no object")),
        }
    }

    /// Stores pages as one block. `None` if nothing is gained.
    fn store_together(
        &self,
        pages: &[(Slot, &Page)],
        level: i32,
        scratch: &mut Scratch,
    ) -> Result<Option<u32>, StoreError> {
        let (buffer, zstd) = scratch.block_parts();
        let Some(length) = Self::compress((pages, level), buffer, zstd)? else {
            return Ok(None);
        };
        let (id, record) = self.records.take()?;
        match self.store_objects(id, pages, buffer.packed(), length) {
            Ok((head, bytes)) => {
                record.open(head.into_raw(), pages.len(), bytes);
                Ok(Some(id))
            }
            Err(error) => {
                self.records.give_back(id, record);
                Err(error)
            }
        }
    }

    /// Gets a block's data together in `packed`.
    fn gather(&self, head: &Head<'_>, packed: &mut [u8]) -> Result<(), Corruption> {
        let mut at = 0;
        for word in head.full_pages() {
            let word = word.ok_or(Corruption::NoObject)?;
            let to = packed.get_mut(at..at + PAGE_SIZE);
            let to = to.ok_or(Corruption::BadLength)?;
            self.pool
                .try_read_slot(word, |object| match object.get(..PAGE_SIZE) {
                    Some(page) => {
                        to.copy_from_slice(page);
                        Ok(())
                    }
                    None => Err(Corruption::BadLength),
                })
                .unwrap_or(Err(Corruption::NoObject))?;
            at += PAGE_SIZE;
        }
        let left = head.length.saturating_sub(at);
        let to = packed.get_mut(at..at + left);
        let from = head.rest.get(..left);
        let (to, from) = to.zip(from).ok_or(Corruption::BadLength)?;
        to.copy_from_slice(from);
        Ok(())
    }

    /// Copies the page at a place of a block to `out`.
    fn read_page(
        &self,
        (slot, id, place): (Slot, u32, usize),
        object: &[u8],
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), Unread> {
        let head = Head::parse(object).ok_or(Corruption::BadLength)?;
        if head.record != id || head.pages > MAX_BLOCK_PAGES {
            return Err(Corruption::WrongSlot.into());
        }
        let (owner, checksum) = head.seal(place).ok_or(Corruption::BadLength)?;
        if owner != slot {
            return Err(Corruption::WrongSlot.into());
        }
        let (buffer, zstd) = scratch.block_parts();
        if !buffer.holds(head.number) {
            let (plain, packed) = buffer.begin(head.pages).ok_or(Unread::NoMemory)?;
            self.gather(&head, packed)?;
            let data = packed.get(..head.length).ok_or(Corruption::BadLength)?;
            if !zstd.decompress(data, plain.as_flattened_mut()) {
                return Err(Corruption::Undecodable.into());
            }
            buffer.end(head.number);
        }
        *out = *buffer.page(place).ok_or(Corruption::BadLength)?;
        Ok(self.checksums.verify(slot, out, checksum)?)
    }
}

/// Why a page of a block was not read.
enum Unread {
    Corrupt(Corruption),
    NoMemory,
}

impl From<Corruption> for Unread {
    fn from(what: Corruption) -> Self {
        Self::Corrupt(what)
    }
}

impl<S: PageSource> Tier for BlockTier<S> {
    fn kind(&self) -> TierKind {
        TierKind::Block
    }

    /// Declines: a single page is no block.
    fn store(&self, _: Slot, _: &Page, _: &mut Scratch) -> Result<Placed, StoreError> {
        Ok(Placed::Declined)
    }

    fn store_block(
        &self,
        pages: &[(Slot, &Page)],
        level: i32,
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        let stored = if (2..=MAX_BLOCK_PAGES).contains(&pages.len()) {
            self.store_together(pages, level, scratch)
        } else {
            Ok(None)
        };
        out.extend((0..pages.len()).map(|place| {
            stored.map(|block| match block {
                Some(id) => Placed::At(location(id, place)),
                None => Placed::Declined,
            })
        }));
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let (slot, tier) = (stored.slot(), TierKind::Block);
        let (id, place) = parts(stored.location());
        let word = self.records.get(id).map(BlockRecord::word);
        let word = word.and_then(ObjectWord::from_raw);
        let read = match word {
            None => Err(Corruption::NoObject.into()),
            Some(word) => self
                .pool
                .try_read_slot(word, |object| {
                    self.read_page((slot, id, place), object, out, scratch)
                })
                .unwrap_or(Err(Corruption::NoObject.into())),
        };
        read.map_err(|unread| match unread {
            Unread::Corrupt(what) => LoadError::Corrupt { slot, tier, what },
            Unread::NoMemory => LoadError::Tier {
                slot,
                tier,
                reason: "no memory to decompress a block",
            },
        })
    }

    fn free(&self, locations: &mut [Location]) {
        let mut words = Vec::new();
        for &location in &*locations {
            let record = self.record(location);
            let (id, place) = parts(location);
            let (share, all) = (record.share(place), record.bytes());
            let FreedPage::Last(head) = record.free(place) else {
                self.dead_bytes.fetch_add(share, Relaxed);
                continue;
            };
            self.dead_bytes.fetch_sub(all.wrapping_sub(share), Relaxed);
            let head = ObjectWord::from_raw(head).expect("an open record has a word");
            // The block is this thread's alone, so the head stays where it is.
            self.pool.read_slot(head, |object| {
                let head = Head::parse(object).expect("a stored head is whole");
                words.extend(
                    head.full_pages()
                        .map(|word| word.expect("a head has words")),
                );
            });
            words.push(head);
            self.records.give_back(id, record);
        }
        free_words(&self.pool, &mut words);
    }

    fn bytes(&self, location: Location) -> u64 {
        self.record(location).share(parts(location).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_names_block_and_place() {
        for (id, place) in [(0, 0), (7, 15), (u32::MAX, 3)] {
            assert_eq!(parts(location(id, place)), (id, place));
        }
    }

    #[test]
    fn every_length_fits_its_objects() {
        for pages in 2..=MAX_BLOCK_PAGES {
            for length in (1..pages * (PAGE_SIZE / 16 * 15)).step_by(13) {
                let full = full_pages(pages, length);
                let rest = length.saturating_sub(full * PAGE_SIZE);
                let head = FIXED + pages * PER_PAGE + full * PER_FULL_PAGE + rest;
                assert!(
                    head <= PAGE_SIZE && full < pages,
                    "{pages}, {length}: {full}"
                );
                assert!(full == 0 || length > (full - 1) * PAGE_SIZE);
            }
        }
    }
}

/// What Miri cannot run.
#[cfg(test)]
mod with_codec {
    use super::*;

    /// A tier with two blocks of related pages, and their slots and locations.
    fn two_blocks() -> (BlockTier<zsmalloc::HeapSource>, Vec<(Slot, Location, Page)>) {
        let config = zsmalloc::Config::with_capacity_pages(1 << 12);
        let pool = Pool::new(zsmalloc::HeapSource::new(), config).unwrap();
        let tier = BlockTier::new(Checksums::On, Arc::new(pool));
        let mut scratch = Scratch::new();
        let mut stored = Vec::new();
        for block in 0..2_u8 {
            let page = |place: u8| std::array::from_fn(|at| place ^ block ^ (at / 16) as u8);
            let pages: Vec<(Slot, Page)> = (0..4)
                .map(|place| {
                    (
                        Slot::from_raw(600 + u32::from(4 * block + place)),
                        page(place),
                    )
                })
                .collect();
            let given: Vec<_> = pages.iter().map(|(slot, page)| (*slot, page)).collect();
            let mut out = Vec::new();
            tier.store_block(&given, 1, &mut scratch, &mut out);
            for ((slot, page), placed) in pages.iter().zip(out) {
                let Ok(Placed::At(location)) = placed else {
                    panic!("{placed:?}");
                };
                stored.push((*slot, location, *page));
            }
        }
        (tier, stored)
    }

    #[test]
    fn a_run_of_slots_of_a_block_is_decompressed_once() {
        let (tier, stored) = two_blocks();
        let mut scratch = Scratch::for_loads();
        let mut decompressed = 0;
        for (slot, location, page) in &stored {
            let before = scratch.block_parts().0.number();
            let annex = AtomicU64::new(0);
            let mut out = [0; PAGE_SIZE];
            tier.load(
                Stored::new(*slot, *location, &annex),
                &mut out,
                &mut scratch,
            )
            .unwrap();
            assert!(out == *page);
            decompressed += usize::from(scratch.block_parts().0.number() != before);
        }
        assert_eq!(decompressed, 2);
    }

    #[test]
    fn a_page_under_another_slot_is_refused() {
        let (tier, stored) = two_blocks();
        let annex = AtomicU64::new(0);
        let (mut out, mut scratch) = ([0; PAGE_SIZE], Scratch::new());
        let mut load =
            |slot, location| tier.load(Stored::new(slot, location, &annex), &mut out, &mut scratch);
        for other in [1, 5] {
            let refused = load(stored[0].0, stored[other].1);
            assert!(matches!(refused, Err(LoadError::Corrupt { .. })));
        }
        let gone = load(stored[0].0, location(9, 0));
        assert!(matches!(gone, Err(LoadError::Corrupt { .. })));
        load(stored[0].0, stored[0].1).unwrap();
    }

    #[test]
    #[should_panic(expected = "is not in use")]
    fn freeing_a_page_of_a_block_twice_stops() {
        let (tier, stored) = two_blocks();
        tier.free(&mut [stored[0].1]);
        tier.free(&mut [stored[0].1]);
    }
}
