//! Records of blocks: where a block lies, and which of its pages are in use.
//!
//! A block is closed, open, or closed again:
//!
//! ```text
//!  closed ── open: word and live pages ──► open ── last page freed: word taken ──► closed
//!                                          │  ▲
//!                                          └──┘ a page freed; compaction replaces the word
//! ```
//!
//! Owners of pages free them without a lock: the thread that clears the last live bit takes the word,
//! and with it the block. A compaction that comes later finds another word, and is refused.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Pages of a block by default. Longer blocks save little more, and a load of one page pays for all.
pub(crate) const BLOCK_PAGES: usize = 4;
/// The most pages of a block.
pub(crate) const MAX_BLOCK_PAGES: usize = 16;

/// Set in the word of a closed record, and in no object word.
const CLOSED: u64 = 1 << 63;
const PAGES_SHIFT: u32 = 24;
const BYTES_MASK: u32 = (1 << PAGES_SHIFT) - 1;

/// What freeing a page of a block left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FreedPage {
    /// Other pages of the block are in use.
    OthersLive,
    /// It was the last page. The caller owns the object of this word, and must free it.
    Last(u64),
}

/// The record of a block.
#[derive(Debug)]
pub(crate) struct BlockRecord {
    /// The word of the block's head; while closed, [`CLOSED`] and a number for the owner's list.
    word: AtomicU64,
    /// Bytes of all its objects, and the number of its pages.
    shape: AtomicU32,
    /// The places whose pages are in use.
    live: AtomicU32,
}

impl BlockRecord {
    /// A closed record.
    pub(crate) fn new() -> Self {
        Self {
            word: AtomicU64::new(CLOSED),
            shape: AtomicU32::new(0),
            live: AtomicU32::new(0),
        }
    }

    /// Makes it the record of a block, all of whose pages are live. No entry names it yet.
    pub(crate) fn open(&self, word: u64, pages: usize, bytes: u64) {
        assert!(
            (1..=MAX_BLOCK_PAGES).contains(&pages) && bytes <= BYTES_MASK.into(),
            "a block of {pages} pages in {bytes} bytes"
        );
        self.shape
            .store((pages as u32) << PAGES_SHIFT | bytes as u32, Relaxed);
        self.live.store((1 << pages) - 1, Relaxed);
        let before = self.word.swap(word, AcqRel);
        assert!(before & CLOSED != 0, "a block's record is used twice");
    }

    /// The word of the block's head; one that names no object if the record is closed.
    pub(crate) fn word(&self) -> u64 {
        self.word.load(Acquire)
    }

    /// Replaces the word if it is still `old`. `false` if the block is gone.
    pub(crate) fn relocate(&self, old: u64, new: u64) -> bool {
        self.word
            .compare_exchange(old, new, AcqRel, Acquire)
            .is_ok()
    }

    /// Frees the page at a place.
    ///
    /// # Panics
    ///
    /// If it is not in use: an entry was invalid.
    pub(crate) fn free(&self, place: usize) -> FreedPage {
        let bit = 1 << place;
        // AcqRel: accesses to the block by all its pages' owners happen before it is freed.
        let before = self.live.fetch_and(!bit, AcqRel);
        assert!(
            before & bit != 0,
            "invalid swap entry: page {place} of a block is not in use"
        );
        if before != bit {
            return FreedPage::OthersLive;
        }
        let word = self.word.swap(CLOSED, AcqRel);
        assert!(word & CLOSED == 0, "a block was freed twice");
        FreedPage::Last(word)
    }

    /// Its pages, live or not.
    pub(crate) fn pages(&self) -> usize {
        (self.shape.load(Relaxed) >> PAGES_SHIFT) as usize
    }

    /// Bytes of its objects.
    pub(crate) fn bytes(&self) -> u64 {
        (self.shape.load(Relaxed) & BYTES_MASK).into()
    }

    /// The number of its pages that are in use.
    pub(crate) fn live_pages(&self) -> usize {
        self.live.load(Relaxed).count_ones() as usize
    }

    /// Bytes that the page at a place is charged: its share, whichever other pages are in use. The
    /// shares of all pages are the block's bytes.
    pub(crate) fn share(&self, place: usize) -> u64 {
        let (pages, bytes) = (self.pages().max(1) as u64, self.bytes());
        bytes / pages + u64::from((place as u64) < bytes % pages)
    }

    /// The number kept in a closed record.
    pub(crate) fn note(&self) -> u32 {
        self.word.load(Relaxed) as u32
    }

    /// Keeps a number in a closed record.
    pub(crate) fn set_note(&self, note: u32) {
        let before = self.word.swap(CLOSED | u64::from(note), Relaxed);
        assert!(before & CLOSED != 0, "an open block's record was listed");
    }
}
