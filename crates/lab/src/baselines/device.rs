//! A swap device that stores compressed pages by slot number, as zram does: a table maps a slot to
//! the object.
//!
//! It uses the tiers of memfold's swap space, so that designs differ in their slots only.

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

/// Position of the tier's number in a slot's word, above the location.
const KIND_SHIFT: u32 = Location::BITS;
/// Lock bit of a slot's word, as zram has one per slot: it serialises access with recompression.
const LOCKED: u64 = 1 << 63;

/// The tiers that a new page is offered to, in this order.
pub struct Tiers {
    tiers: Vec<Arc<dyn Tier>>,
    /// Owns the pool that the tiers store in.
    _space: Option<SwapSpace<Mapping>>,
}

impl Tiers {
    /// A single tier that accepts every page.
    pub fn one(tier: Arc<dyn Tier>) -> Self {
        Self {
            tiers: vec![tier],
            _space: None,
        }
    }

    /// The tiers of a swap space: same-filled, compressed and incompressible pages.
    pub fn of_a_space(config: SwapConfig) -> Result<Self> {
        let tiers: Mutex<Vec<Arc<dyn Tier>>> = Mutex::default();
        let space = SwapSpace::with_tiers(Mapping, config, |tier| {
            let tier: Arc<dyn Tier> = Arc::from(tier);
            let takes_new_pages = !matches!(tier.kind(), TierKind::Recompressed | TierKind::Block);
            if takes_new_pages && let Ok(mut tiers) = tiers.lock() {
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

/// The device.
pub struct Device {
    tiers: Tiers,
    /// For each slot `[locked : 1 | tier + 1 | location]`; 0 if empty.
    table: Array<AtomicU64>,
    annex: Array<AtomicU64>,
}

impl Device {
    /// An empty device.
    pub fn new(tiers: Tiers, slots: usize) -> Result<Self> {
        Ok(Self {
            tiers,
            table: Array::new(slots)?,
            annex: Array::new(slots)?,
        })
    }

    /// Stores a page in an empty slot. Returns the bytes that it takes.
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

    /// Locks a slot and returns its word.
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

    fn at(entry: u64) -> (usize, Location) {
        let number = (entry >> KIND_SHIFT) as usize;
        assert!(number > 0, "the slot of the device is empty");
        let location = entry & ((1 << KIND_SHIFT) - 1);
        (number - 1, Location::from_raw(location))
    }

    /// The location of a slot's page, without the lock.
    #[inline]
    pub fn look_up(&self, slot: usize) -> Location {
        Self::at(self.table[slot].load(Acquire) & !LOCKED).1
    }

    /// Copies the page of a slot to `out`.
    pub fn read(
        &self,
        slot: usize,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let word = self.lock(slot);
        let (number, location) = Self::at(word);
        let stored = Stored::new(Slot::from_raw(slot as u32), location, &self.annex[slot]);
        let loaded = self.tiers.tiers[number].load(stored, out, scratch);
        self.table[slot].store(word, Release);
        loaded
    }

    /// Frees slots. Returns the bytes that they took.
    pub fn free(&self, slots: impl Iterator<Item = usize>) -> u64 {
        let mut locations = vec![Vec::new(); self.tiers.tiers.len()];
        let mut bytes = 0;
        for slot in slots {
            let (number, location) = Self::at(self.lock(slot));
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
