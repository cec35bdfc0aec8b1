//! Random operations on a space, compared with a map after each.

use std::collections::HashMap;

use crate::common::{MemoryFile, assert_empty, config};
use memfold_swap::{
    BlockShape, Fault, Faults, FaultyTier, PAGE_SIZE, Page, ScanPolicy, Scratch, Slot, SwapConfig,
    SwapSpace, TierKind,
};
use proptest::prelude::*;
use zsmalloc::HeapSource;

#[derive(Debug, Clone)]
enum Operation {
    Store(Contents),
    StoreBatch(Vec<Contents>),
    Load(usize),
    Duplicate(usize, u16),
    Release(usize),
    /// Release this many of the counts that are held, from a place on.
    ReleaseBulk(usize, u16),
    Arm(Fault),
    Scan,
    /// A scan that only recompresses.
    Pack,
    MakeRoom,
    WriteBack(u64),
    Evacuate(TierKind),
    Compact,
    Trim,
}

#[derive(Debug, Clone)]
enum Contents {
    Repeated(u64),
    /// `noise` bytes that do not compress, then a repeated byte.
    Mixed {
        seed: u64,
        noise: usize,
    },
}

impl Contents {
    fn page(&self) -> Page {
        let mut page = [0; PAGE_SIZE];
        match *self {
            Self::Repeated(word) => memfold_swap::fill(&mut page, word),
            Self::Mixed { seed, noise } => {
                let mut random = seed | 1;
                page.fill(seed as u8);
                for byte in &mut page[..noise] {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    *byte = (random >> 32) as u8;
                }
            }
        }
        page
    }
}

fn contents() -> impl Strategy<Value = Contents> {
    prop_oneof![
        any::<u64>().prop_map(Contents::Repeated),
        (0..64_u32).prop_map(|shift| Contents::Repeated(u64::MAX << shift)),
        (any::<u64>(), 0..=PAGE_SIZE).prop_map(|(seed, noise)| Contents::Mixed { seed, noise }),
        any::<u64>().prop_map(|seed| Contents::Mixed {
            seed,
            noise: PAGE_SIZE
        }),
    ]
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => contents().prop_map(Operation::Store),
        2 => prop::collection::vec(contents(), 0..40).prop_map(Operation::StoreBatch),
        6 => any::<usize>().prop_map(Operation::Load),
        3 => (any::<usize>(), prop_oneof![4 => 1..4_u16, 1 => 200..600_u16])
            .prop_map(|(which, times)| Operation::Duplicate(which, times)),
        5 => any::<usize>().prop_map(Operation::Release),
        2 => (any::<usize>(), 0..700_u16)
            .prop_map(|(from, count)| Operation::ReleaseBulk(from, count)),
        1 => prop_oneof![Just(Fault::Store), Just(Fault::Load), Just(Fault::Corrupt)]
            .prop_map(Operation::Arm),
        3 => Just(Operation::Scan),
        3 => Just(Operation::Pack),
        2 => Just(Operation::MakeRoom),
        2 => (0..1_000_000_u64).prop_map(Operation::WriteBack),
        1 => prop::sample::select(&[
            TierKind::Recompressed,
            TierKind::Block,
            TierKind::Uncompressed,
            TierKind::File,
        ][..])
            .prop_map(Operation::Evacuate),
        1 => Just(Operation::Compact),
        1 => Just(Operation::Trim),
    ]
}

struct Pair {
    space: SwapSpace<HeapSource>,
    faults: std::sync::Arc<Faults>,
    /// What each slot in use holds.
    pages: HashMap<Slot, Page>,
    /// One element for each count that is held.
    held: Vec<Slot>,
    scratch: Scratch,
}

impl Pair {
    /// With blocks of at most `block_pages` pages.
    fn new(block_pages: usize) -> Self {
        let faults = Faults::new();
        let config = SwapConfig {
            pool_capacity_pages: 1 << 12,
            max_slots: 1 << 13,
            blocks: BlockShape {
                pages: block_pages,
                level: 1,
            },
            // Of the same pages, so that both shapes lie side by side.
            blocks_for_room: BlockShape {
                pages: block_pages / 2,
                level: 3,
            },
            ..config()
        };
        let wrap = |tier| Box::new(FaultyTier::new(tier, faults.clone())) as Box<_>;
        let mut space = SwapSpace::with_tiers(HeapSource::new(), config, wrap).unwrap();
        let file = MemoryFile::default().tier(64 << 20);
        space.add_tier(wrap(Box::new(file))).unwrap();
        Self {
            space,
            faults,
            pages: HashMap::new(),
            held: Vec::new(),
            scratch: Scratch::new(),
        }
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Store(contents) => self.store(std::slice::from_ref(contents), false),
            Operation::StoreBatch(batch) => self.store(batch, true),
            Operation::Load(which) => {
                if let Some(slot) = self.pick(*which) {
                    self.check(slot);
                }
            }
            Operation::Duplicate(which, times) => {
                if let Some(slot) = self.pick(*which) {
                    for _ in 0..*times {
                        self.space.duplicate(slot).unwrap();
                        self.held.push(slot);
                    }
                }
            }
            Operation::Release(which) => {
                if !self.held.is_empty() {
                    let slot = self.held.swap_remove(which % self.held.len());
                    self.space.release(slot);
                    self.forget_unheld();
                }
            }
            Operation::ReleaseBulk(from, count) => {
                if !self.held.is_empty() {
                    let from = from % self.held.len();
                    let to = (from + usize::from(*count)).min(self.held.len());
                    let slots: Vec<_> = self.held.drain(from..to).collect();
                    self.space.release_bulk(&slots);
                    self.forget_unheld();
                }
            }
            Operation::Arm(fault) => self.faults.arm(*fault),
            Operation::Scan | Operation::Pack => {
                let policy = ScanPolicy {
                    recompress: Some(1),
                    write_back: matches!(operation, Operation::Scan).then_some(1),
                };
                let before = self.faults.happened();
                let report = self.space.scan(policy, usize::MAX, &mut self.scratch);
                assert_eq!(report.failed, self.faults.happened() - before);
            }
            Operation::MakeRoom => {
                let before = self.faults.happened();
                let report = self.space.scan_for_room(usize::MAX, &mut self.scratch);
                assert_eq!(report.failed, self.faults.happened() - before);
            }
            Operation::WriteBack(bytes) => {
                let before = self.faults.happened();
                let report = self.space.write_back(*bytes, &mut self.scratch);
                assert_eq!(report.failed, self.faults.happened() - before);
                assert!(report.finished || report.bytes_before >= *bytes || report.failed > 0);
            }
            Operation::Evacuate(tier) => {
                let before = self.faults.happened();
                let report = self.space.evacuate(*tier, &mut self.scratch, || true);
                assert_eq!(report.failed, self.faults.happened() - before);
                if report.failed == 0 && *tier != TierKind::Uncompressed {
                    assert_eq!(self.space.pages_in(*tier), 0);
                }
            }
            Operation::Compact => {
                self.space.compact(|| true);
            }
            Operation::Trim => self.space.trim(),
        }
    }

    fn pick(&self, which: usize) -> Option<Slot> {
        (!self.held.is_empty()).then(|| self.held[which % self.held.len()])
    }

    fn store(&mut self, batch: &[Contents], batched: bool) {
        let pages: Vec<_> = batch.iter().map(Contents::page).collect();
        let before = self.faults.happened();
        let mut outcomes = Vec::new();
        if batched {
            let pages: Vec<_> = pages.iter().collect();
            self.space
                .store_batch(&pages, &mut self.scratch, &mut outcomes);
        } else {
            outcomes.push(self.space.store(&pages[0], &mut self.scratch));
        }
        assert_eq!(outcomes.len(), pages.len());
        let mut failures = 0;
        for (outcome, page) in outcomes.into_iter().zip(pages) {
            match outcome {
                Ok(slot) => {
                    assert!(
                        self.pages.insert(slot, page).is_none(),
                        "{slot:?} given out twice"
                    );
                    self.held.push(slot);
                }
                Err(_) => failures += 1,
            }
        }
        assert_eq!(failures, self.faults.happened() - before);
    }

    fn check(&mut self, slot: Slot) {
        let before = self.faults.happened();
        let mut out = [0xcc; PAGE_SIZE];
        match self.space.load(slot, &mut out, &mut self.scratch) {
            Ok(()) => assert!(out == self.pages[&slot], "wrong page from {slot:?}"),
            Err(error) => assert!(self.faults.happened() > before, "{error}"),
        }
    }

    fn counts(&self) -> HashMap<Slot, u64> {
        let mut counts = HashMap::new();
        for slot in &self.held {
            *counts.entry(*slot).or_insert(0) += 1;
        }
        counts
    }

    fn forget_unheld(&mut self) {
        let counts = self.counts();
        self.pages.retain(|slot, _| counts.contains_key(slot));
    }

    /// Everything is where it should be.
    fn audit(&mut self) {
        self.faults.disarm();
        for (slot, count) in self.counts() {
            assert_eq!(self.space.count(slot), count, "count of {slot:?}");
            self.check(slot);
        }
        let usage = self.space.usage();
        assert_eq!(usage.slots_in_use as usize, self.pages.len());
        assert_eq!(usage.block_pages, self.space.pages_in(TierKind::Block));
        let charged = self.space.root_group().usage();
        assert_eq!(charged.pool + charged.file, usage.stored_bytes);
        assert!(charged.pool + usage.dead_bytes <= usage.pool_bytes);
        let repeated = |page: &&Page| memfold_swap::fill_word(page).is_some();
        let same_filled = self.pages.values().filter(repeated).count();
        assert_eq!(usage.same_filled_pages as usize, same_filled);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_space_does_what_a_map_does(
        operations in prop::collection::vec(operation(), 1..150),
        block_pages in prop::sample::select(&[0_usize, 2, 4, 4, 7, 16][..]),
    ) {
        let mut pair = Pair::new(block_pages);
        for operation in &operations {
            pair.apply(operation);
        }
        pair.audit();
        let held = std::mem::take(&mut pair.held);
        pair.space.release_bulk(&held);
        assert_empty(&pair.space);
    }
}
