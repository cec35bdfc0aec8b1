//! A swap device that keeps compressed pages under the numbers of its slots, as zram does: a table
//! leads from the slot to what is stored.
//!
//! It stores with the tiers of our swap space, so that designs differ in nothing but their slots.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering::*},
};

use anyhow::{Result, ensure};
use memfold_swap::{
    LoadError, Location, Page, Placed, Scratch, Slot, StoreError, Stored, SwapConfig, SwapSpace,
    Tier, TierKind,
};

use super::array::Array;
use crate::mapping::Mapping;

const KIND_SHIFT: u32 = Location::BITS;
/// Set in a slot's word while somebody works on it, as zram's bit for the lock of a slot: so that
/// the device may compress its pages again under those who use them.
const LOCKED: u64 = 1 << 63;

/// The tiers that new pages are offered to, in this order.
pub struct Tiers {
    tiers: Vec<Arc<dyn Tier>>,
    /// Has the pool that the tiers store in.
    _space: Option<SwapSpace<Mapping>>,
}

impl Tiers {
    /// One tier that takes all.
    pub fn one(tier: Arc<dyn Tier>) -> Self {
        Self {
            tiers: vec![tier],
            _space: None,
        }
    }

    /// Those of a swap space: same-filled, compressed and incompressible pages.
    pub fn of_a_space(config: SwapConfig) -> Result<Self> {
        let tiers: Mutex<Vec<Arc<dyn Tier>>> = Mutex::default();
        let space = SwapSpace::with_tiers(Mapping, config, |tier| {
            let tier: Arc<dyn Tier> = Arc::from(tier);
            if tier.kind() != TierKind::Recompressed
                && let Ok(mut tiers) = tiers.lock()
            {
                tiers.push(Arc::clone(&tier));
            }
            Box::new(tier)
        })?;
        let tiers = tiers.into_inner().unwrap_or_default();
        ensure!(tiers.len() == 3, "a space has three tiers for new pages");
        Ok(Self {
            tiers,
            _space: Some(space),
        })
    }
}

pub struct Device {
    tiers: Tiers,
    /// Which tier has the page, plus one, and where.
    table: Array<AtomicU64>,
    annex: Array<AtomicU64>,
}

impl Device {
    pub fn new(tiers: Tiers, slots: usize) -> Result<Self> {
        Ok(Self {
            tiers,
            table: Array::new(slots)?,
            annex: Array::new(slots)?,
        })
    }

    /// Stores a page in a slot, and says how many bytes it takes.
    pub fn write(
        &self,
        slot: usize,
        page: &Page,
        scratch: &mut Scratch,
    ) -> Result<u64, StoreError> {
        for (number, tier) in self.tiers.tiers.iter().enumerate() {
            let location = match tier.store(Slot::from_raw(slot as u32), page, scratch)? {
                Placed::Declined => continue,
                Placed::At(location) => location,
                Placed::WithAnnex(location, word) => {
                    self.annex[slot].store(word, Release);
                    location
                }
            };
            let entry = (number as u64 + 1) << KIND_SHIFT | location.into_raw();
            assert_eq!(self.lock(slot), 0, "slot {slot} of the device is not empty");
            self.table[slot].store(entry, Release);
            return Ok(tier.bytes(location));
        }
        Err(StoreError::NoTier)
    }

    /// Locks a slot, and returns its word.
    #[inline]
    fn lock(&self, slot: usize) -> u64 {
        loop {
            let word = self.table[slot].fetch_or(LOCKED, Acquire);
            if word & LOCKED == 0 {
                return word;
            }
            std::thread::yield_now();
        }
    }

    fn at(&self, entry: u64) -> (usize, Location) {
        let number = (entry >> KIND_SHIFT) as usize;
        assert!(number > 0, "the slot of the device is empty");
        let location = entry & ((1 << KIND_SHIFT) - 1);
        (number - 1, Location::from_raw(location))
    }

    /// Where the page of a slot is.
    #[inline]
    pub fn look_up(&self, slot: usize) -> Location {
        self.at(self.table[slot].load(Acquire) & !LOCKED).1
    }

    pub fn read(
        &self,
        slot: usize,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let word = self.lock(slot);
        let (number, location) = self.at(word);
        let stored = Stored::new(Slot::from_raw(slot as u32), location, &self.annex[slot]);
        let loaded = self.tiers.tiers[number].load(stored, out, scratch);
        self.table[slot].store(word, Release);
        loaded
    }

    /// Frees slots, and says how many bytes they took.
    pub fn free(&self, slots: impl Iterator<Item = usize>) -> u64 {
        let mut locations = vec![Vec::new(); self.tiers.tiers.len()];
        let mut bytes = 0;
        for slot in slots {
            let (number, location) = self.at(self.lock(slot));
            self.table[slot].store(0, Release);
            bytes += self.tiers.tiers[number].bytes(location);
            locations[number].push(location);
        }
        for (tier, locations) in self.tiers.tiers.iter().zip(&mut locations) {
            if !locations.is_empty() {
                tier.free(locations);
            }
        }
        bytes
    }
}
