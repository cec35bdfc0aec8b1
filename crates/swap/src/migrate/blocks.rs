//! Moving pages into blocks.

use zsmalloc::PageSource;

use super::{MigrateReport, Moving};
use crate::{
    config::BlockShape,
    entry::{Position, TierKind},
    page::Page,
    scratch::Scratch,
    space::SwapSpace,
    tier::Placed,
};

impl<S: PageSource> SwapSpace<S> {
    /// Moves pages into blocks, neighbours together. Returns those that are to be stored one by one.
    pub(super) fn store_in_blocks(
        &self,
        mut moving: Vec<Moving>,
        (pages, shape): (&[Page], BlockShape),
        scratch: &mut Scratch,
        retired: &mut Vec<Position>,
        report: &mut MigrateReport,
    ) -> Vec<Moving> {
        let mut alone = Vec::new();
        if shape.pages < 2 {
            return moving;
        }
        while !moving.is_empty() && report.store_error.is_none() {
            // Blocks of the same size rather than a short last one.
            let blocks = moving.len().div_ceil(shape.pages);
            let rest = moving.split_off(moving.len().div_ceil(blocks));
            let block = std::mem::replace(&mut moving, rest);
            alone.extend(self.store_block(block, (pages, shape.level), scratch, retired, report));
        }
        alone
    }

    /// Stores pages as one block and changes their entries, if that saves enough. Returns those that are
    /// to be stored one by one.
    fn store_block(
        &self,
        block: Vec<Moving>,
        (pages, level): (&[Page], i32),
        scratch: &mut Scratch,
        retired: &mut Vec<Position>,
        report: &mut MigrateReport,
    ) -> Vec<Moving> {
        let batch: Vec<_> = block
            .iter()
            .map(|page| (page.slot, &pages[page.buffer]))
            .collect();
        let tier = self.tier(TierKind::Block);
        let mut outcomes = Vec::with_capacity(batch.len());
        tier.store_block(&batch, level, scratch, &mut outcomes);
        let (mut placed, mut declined) = (Vec::with_capacity(batch.len()), Vec::new());
        for (page, outcome) in block.into_iter().zip(outcomes) {
            match outcome {
                Ok(Placed::At(location)) => placed.push((page, location)),
                Ok(Placed::Declined | Placed::WithAnnex(..)) => declined.push(page),
                Err(error) => {
                    self.counters.stores_failed(1);
                    report.failed += 1;
                    report.store_error = Some(error);
                }
            }
        }
        let before: u64 = placed.iter().map(|(page, _)| self.held_bytes(page)).sum();
        let after: u64 = placed.iter().map(|(_, to)| tier.bytes(*to)).sum();
        let is_worth = after <= before - before / self.block_saving;
        for (page, location) in placed {
            if is_worth {
                let to = Position {
                    tier: TierKind::Block,
                    location,
                };
                self.rename(&page, to, retired, report);
            } else {
                tier.free(&mut [location]);
                // Not tried again.
                if page.from.tier == TierKind::Compressed {
                    self.rename_in_place(&page, TierKind::Recompressed);
                }
            }
        }
        declined
    }

    /// Bytes that are freed if this page moves, and all others of its block with it.
    pub(super) fn held_bytes(&self, page: &Moving) -> u64 {
        // Compaction may have moved the object since it was read.
        match self.look_up(page.slot) {
            Some((TierKind::Block, location)) => self.blocks.held_bytes(location),
            Some((tier, location)) => self.tier(tier).bytes(location),
            None => 0,
        }
    }
}
