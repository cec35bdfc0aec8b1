//! Blocks of pages that faults ask for one by one, in no order that a stream would show.
//!
//! Once an eighth of a block was asked for so, the rest of it most likely will be: a fault is worth
//! three to four pages brought in beside it, so a quarter of them touched later pays. It is done
//! only where nothing has to leave memory for it ([`Account::has_ample`]); a program that works in
//! more than its limit gets each page alone.
//!
//! [`Account::has_ample`]: super::account::Account::has_ample

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Pages of a block.
pub const BLOCK: usize = 64;
/// Faults in a block after which the rest of it is worth bringing in.
const DENSE: u8 = BLOCK as u8 / 8;

/// What the faults in a block tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    /// Few of its pages were asked for.
    Sparse,
    /// Enough were, since just now.
    Dense,
    /// Enough were, and another one is.
    StillAsked,
}

/// How many pages of each block were asked for by themselves since they were moved out. Counts are
/// guesses: threads that count at the same time may lose one.
pub struct Density(Box<[AtomicU8]>);

impl Density {
    pub fn new(pages: usize) -> Density {
        Density(
            (0..pages.div_ceil(BLOCK))
                .map(|_| AtomicU8::new(0))
                .collect(),
        )
    }

    /// Notes a page that was asked for by itself. Returns what to think of its block.
    pub fn note(&self, page: usize) -> Block {
        let faults = &self.0[page / BLOCK];
        let now = faults.load(Relaxed).saturating_add(1);
        faults.store(now, Relaxed);
        match now {
            ..=DENSE => Block::Sparse,
            now if now == DENSE + 1 => Block::Dense,
            _ => Block::StillAsked,
        }
    }

    /// Notes a page that was moved out: what was asked for before tells less and less.
    pub fn forget(&self, page: usize) {
        let faults = &self.0[page / BLOCK];
        let before = faults.load(Relaxed);
        if before > 0 {
            faults.store(before - 1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_dense_once_an_eighth_of_it_was_asked_for() {
        let density = Density::new(200);
        for page in 0..8 {
            assert_eq!(density.note(64 + page * 8), Block::Sparse, "{page}");
        }
        assert_eq!(density.note(64 + 3), Block::Dense);
        assert_eq!(density.note(64 + 4), Block::StillAsked);
        for page in [0, 63, 128, 199] {
            assert_eq!(density.note(page), Block::Sparse, "{page}");
        }
    }

    #[test]
    fn a_block_that_was_moved_out_begins_anew() {
        let density = Density::new(64);
        let note = |page| density.note(page);
        (0..300).for_each(|page| _ = note(page % 64));
        assert_eq!(note(0), Block::StillAsked);
        (0..255).for_each(|page| density.forget(page % 64));
        assert!((0..8).map(note).all(|block| block == Block::Sparse));
        assert_eq!(note(8), Block::Dense);
    }
}
