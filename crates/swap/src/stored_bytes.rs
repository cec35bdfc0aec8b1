//! Pages and bytes of a range, by tier.

use crate::{
    entry::TierKind,
    group::{Charge, Group},
};

/// What stored pages are charged as.
const STORAGE: [Charge; 3] = [Charge::Pool, Charge::File, Charge::Remote];

/// Pages that were stored or freed together, and their bytes, by tier: counters and groups are
/// changed once for all.
#[derive(Debug, Default)]
pub(crate) struct StoredBytes {
    tiers: [(u64, u64); TierKind::ALL.len()],
}

impl StoredBytes {
    pub(crate) fn add(&mut self, tier: TierKind, bytes: u64) {
        let (pages, sum) = &mut self.tiers[tier.index()];
        *pages += 1;
        *sum += bytes;
    }

    /// The tiers with pages, the number of pages and their bytes.
    pub(crate) fn tiers(&self) -> impl Iterator<Item = (TierKind, u64, u64)> {
        TierKind::ALL
            .into_iter()
            .zip(self.tiers)
            .filter(|&(_, (pages, _))| pages > 0)
            .map(|(tier, (pages, bytes))| (tier, pages, bytes))
    }

    fn bytes(&self, charge: Charge) -> u64 {
        self.tiers()
            .filter(|&(tier, ..)| Charge::of_tier(tier) == Some(charge))
            .map(|(.., bytes)| bytes)
            .sum()
    }

    pub(crate) fn charge(&self, group: &Group) {
        for charge in STORAGE {
            group.charge(charge, self.bytes(charge));
        }
    }

    pub(crate) fn uncharge(&self, group: &Group) {
        for charge in STORAGE {
            group.uncharge(charge, self.bytes(charge));
        }
    }
}
