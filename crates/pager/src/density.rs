//! Density-based readahead: dense blocks that are faulted in without a sequential order.
//!
//! If more than 1/8 of a block is resident again, the rest will most likely fault too, and one fault
//! costs more than several pages of readahead. This holds only while readahead evicts nothing, so a
//! program whose working set exceeds its limit gets single pages.

use crate::page_state::{Entry, PageState};

/// Pages in a block. A larger block reads further ahead of scattered faults.
pub(crate) const BLOCK: usize = 64;
/// Resident pages up to which a block is sparse. A larger value reads ahead later.
const SPARSE: usize = BLOCK / 8;

/// How much of a block is resident at a fault in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Density {
    /// At most 1/8 of its pages.
    Sparse,
    /// One page more: this fault makes the block dense.
    JustDense,
    /// More pages than that.
    Dense,
}

impl Density {
    /// The density of a block with `resident` resident pages, the faulting page included.
    pub(crate) fn of(resident: usize) -> Density {
        match resident {
            ..=SPARSE => Density::Sparse,
            resident if resident == SPARSE + 1 => Density::JustDense,
            _ => Density::Dense,
        }
    }

    /// The density of the block with these entries.
    pub(crate) fn of_entries(entries: &[Entry]) -> Density {
        let resident = |entry: &&Entry| matches!(entry.load(), PageState::Resident { .. });
        Density::of(entries.iter().filter(resident).count())
    }
}

/// Whether `wanted` fits 1/16 of the limit below the watermark at which reclaim stops, so that it will
/// not cause evictions soon. All arguments have the same unit.
pub(crate) fn has_ample_room(resident: u64, wanted: u64, limit: u64, reclaim_stops: u64) -> bool {
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
