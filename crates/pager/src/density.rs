//! Blocks of pages that faults ask for one by one, in no order that a stream would show.
//!
//! Where a good part of a block is back in memory, the rest of it most likely will be asked for too:
//! a fault costs as much as three to four pages brought in beside it, so a quarter of them touched
//! later pays. This holds only where nothing has to leave memory for them; a program that works in
//! more than its limit gets each page alone.

use crate::page_state::{Entry, PageState};

/// Pages of a block.
pub const BLOCK: usize = 64;
/// With more resident pages than this, the rest of a block is worth bringing in.
const SPARSE: usize = BLOCK / 8;

/// What is known of a block at a fault in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Density {
    /// Few of its pages are resident.
    Sparse,
    /// Enough are, with the one just asked for.
    JustDense,
    /// More are.
    Dense,
}

impl Density {
    /// Of a block with so many resident pages, that of the fault among them.
    pub fn of(resident: usize) -> Density {
        match resident {
            ..=SPARSE => Density::Sparse,
            resident if resident == SPARSE + 1 => Density::JustDense,
            _ => Density::Dense,
        }
    }

    /// Of the block with these entries.
    pub fn of_entries(entries: &[Entry]) -> Density {
        let resident = |entry: &&Entry| matches!(entry.load(), PageState::Resident { .. });
        Density::of(entries.iter().filter(resident).count())
    }
}

/// Whether `wanted` fits so far below where reclaim stops that nothing has to leave for it soon: by a
/// sixteenth of the limit. All in one unit.
pub fn has_ample_room(resident: u64, wanted: u64, limit: u64, reclaim_stops: u64) -> bool {
    resident + wanted + limit / 16 <= reclaim_stops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_dense_once_more_than_an_eighth_of_it_is_resident() {
        let entries: Vec<Entry> = (0..BLOCK).map(|_| Entry::new()).collect();
        let mut seen = Vec::new();
        for entry in entries.iter().step_by(5) {
            entry.set(PageState::RESIDENT);
            seen.push(Density::of_entries(&entries));
        }
        assert!(seen[..8].iter().all(|density| *density == Density::Sparse));
        assert_eq!(seen[8], Density::JustDense);
        assert!(seen[9..].iter().all(|density| *density == Density::Dense));
    }
}
