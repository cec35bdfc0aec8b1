//! What a space promises, one thing at a time.

use crate::common::{assert_empty, config, noise, space, text};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memfold_swap::{
    CLUSTER_SLOTS, Fault, Faults, FaultyTier, LoadError, PAGE_SIZE, Page, ScanPolicy, Scratch,
    Slot, StoreError, SwapConfig, SwapSpace, TierKind, fill,
};
use zsmalloc::{HeapSource, PageRun, PageSource, SourceError};

fn repeated(word: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    fill(&mut page, word);
    page
}

#[track_caller]
fn assert_holds<S: PageSource>(space: &SwapSpace<S>, slot: Slot, page: &Page) {
    let mut out = [0xcc; PAGE_SIZE];
    space.load(slot, &mut out, &mut Scratch::new()).unwrap();
    assert!(out == *page, "another page came back from {slot:?}");
}

#[test]
#[expect(clippy::large_stack_arrays, reason = "a handful of pages")]
fn each_kind_of_page_goes_to_its_tier_and_comes_back() {
    let space = space();
    let mut scratch = Scratch::new();
    for (page, tier) in [
        (repeated(0), TierKind::SameFilled),
        (repeated(0.1_f64.to_bits()), TierKind::SameFilled),
        (text(7), TierKind::Compressed),
        (noise(7), TierKind::Uncompressed),
    ] {
        let before = space.pages_in(tier);
        let slot = space.store(&page, &mut scratch).unwrap();
        assert_ne!(slot.into_raw(), 0);
        assert_eq!(space.pages_in(tier), before + 1, "{tier}");
        assert_holds(&space, slot, &page);
        assert_holds(&space, slot, &page);
        space.release(slot);
        assert_eq!(space.pages_in(tier), before);
    }
    let usage = space.usage();
    assert_eq!((usage.slots_in_use, usage.stored_bytes), (0, 0));
    assert_eq!((usage.pages_stored_total, usage.same_filled_total), (4, 2));
    assert_eq!(usage.bytes_original_total, 4 * PAGE_SIZE as u64);
}

#[test]
fn same_filled_pages_take_nothing_from_the_pool() {
    let space = space();
    let mut scratch = Scratch::new();
    for word in 0..2000_u64 {
        space
            .store(
                &repeated(word.wrapping_mul(0x0123_4567_89ab_cdef)),
                &mut scratch,
            )
            .unwrap();
    }
    assert_eq!(space.usage().pool_bytes, 0);
    assert_eq!(space.usage().same_filled_pages, 2000);
}

#[test]
fn zstd_and_no_checksum_work_too() {
    for checksum in [true, false] {
        let config = SwapConfig {
            algorithm: memfold_swap::Algorithm::Zstd,
            checksum,
            ..config()
        };
        let space = SwapSpace::new(HeapSource::new(), config).unwrap();
        for page in [text(1), noise(1), repeated(9)] {
            let slot = space.store(&page, &mut Scratch::new()).unwrap();
            assert_holds(&space, slot, &page);
        }
    }
}

#[test]
fn counts_reach_any_height_and_come_back() {
    let space = space();
    let slot = space.store(&text(3), &mut Scratch::new()).unwrap();
    let metadata = space.usage().metadata_bytes;
    for count in 1..1000 {
        assert_eq!(space.count(slot), count);
        space.duplicate(slot).unwrap();
    }
    for count in (1..1000).rev() {
        space.release(slot);
        assert_eq!(space.count(slot), count);
        assert_holds(&space, slot, &text(3));
    }
    space.release(slot);
    assert_eq!(space.count(slot), 0);
    assert_eq!(space.usage().slots_in_use, 0);
    assert_eq!(
        space.usage().metadata_bytes,
        metadata,
        "large counts leave nothing behind"
    );
}

#[test]
fn an_emptied_space_gives_its_memory_back() {
    let space = space();
    let mut scratch = Scratch::new();
    let clusters = 40;
    let mut slots = Vec::new();
    for seed in 0..(clusters * CLUSTER_SLOTS) as u64 {
        let page = if seed % 8 == 0 {
            noise(seed)
        } else {
            text(seed)
        };
        slots.push(space.store(&page, &mut scratch).unwrap());
    }
    let full = space.usage();
    // A table page a cluster and, for the incompressible pages, an annex page; and the records of
    // all clusters.
    assert_eq!(
        full.table_bytes,
        (2 * clusters as u64 + 1) * PAGE_SIZE as u64
    );
    // Every second page: no cluster can go. Then the rest.
    let (even, odd): (Vec<_>, Vec<_>) = slots.iter().partition(|slot| slot.into_raw() % 2 == 0);
    space.release_bulk(&even);
    assert_eq!(space.usage().slots_in_use as usize, odd.len());
    space.release_bulk(&odd);
    assert_empty(&space);
}

#[test]
fn a_full_space_costs_eight_bytes_a_slot() {
    let slots = 1 << 18_u32;
    let space = SwapSpace::new(
        HeapSource::new(),
        SwapConfig {
            max_slots: slots,
            ..config()
        },
    )
    .unwrap();
    let mut scratch = Scratch::new();
    for word in 0..slots as u64 {
        space.store(&repeated(word), &mut scratch).unwrap();
    }
    let cost = space.usage().table_bytes as f64 / slots as f64;
    assert!((8.0..8.1).contains(&cost), "{cost} bytes a slot");
}

#[test]
fn a_batch_gets_neighbouring_slots() {
    let space = space();
    let pages: Vec<_> = (0..300).map(text).collect();
    let pages: Vec<_> = pages.iter().collect();
    let mut outcomes = Vec::new();
    space.store_batch(&pages, &mut Scratch::new(), &mut outcomes);
    let slots: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    assert!(
        slots
            .windows(2)
            .all(|pair| pair[1].into_raw() == pair[0].into_raw() + 1)
    );
    for (slot, page) in slots.iter().zip(pages) {
        assert_holds(&space, *slot, page);
    }
}

#[test]
fn when_slots_run_out_a_store_fails_and_later_ones_succeed() {
    let config = SwapConfig {
        max_slots: 2 * CLUSTER_SLOTS,
        shards: 1,
        ..config()
    };
    let space = SwapSpace::new(HeapSource::new(), config).unwrap();
    let mut scratch = Scratch::new();
    let mut slots = Vec::new();
    loop {
        match space.store(&repeated(slots.len() as u64), &mut scratch) {
            Ok(slot) => slots.push(slot),
            Err(error) => {
                assert_eq!(error, StoreError::NoSlots);
                break;
            }
        }
    }
    assert_eq!(slots.len(), 2 * CLUSTER_SLOTS);
    for index in [0, 700, 1023] {
        space.release(slots[index]);
        let page = text(index as u64);
        slots[index] = space.store(&page, &mut scratch).unwrap();
        assert_holds(&space, slots[index], &page);
    }
    assert_eq!(
        space.store(&repeated(0), &mut scratch),
        Err(StoreError::NoSlots)
    );
    assert_eq!(space.usage().store_failures, 2);
    let page = repeated(0);
    space.store_batch(&[&page; 8], &mut scratch, &mut Vec::new());
    assert_eq!(space.usage().store_failures, 2 + 8, "each page of a batch");
}

#[test]
fn a_failed_store_keeps_nothing_and_a_failed_load_loses_nothing() {
    let faults = Faults::new();
    let wrap = |tier| Box::new(FaultyTier::new(tier, faults.clone())) as Box<_>;
    let space = SwapSpace::with_tiers(HeapSource::new(), config(), wrap).unwrap();
    let mut scratch = Scratch::new();
    faults.arm(Fault::Store);
    assert!(matches!(
        space.store(&text(1), &mut scratch),
        Err(StoreError::Tier { .. })
    ));
    assert_eq!(space.usage().slots_in_use, 0);
    assert_eq!(space.usage().stored_bytes, 0);
    assert_eq!(space.usage().store_failures, 1);

    let slot = space.store(&text(1), &mut scratch).unwrap();
    let mut out = [0; PAGE_SIZE];
    faults.arm(Fault::Load);
    let failed = space.load(slot, &mut out, &mut scratch);
    assert!(matches!(failed, Err(LoadError::Tier { .. })));
    // What looks corrupt is read again, in case it was just being moved.
    faults.arm(Fault::Corrupt);
    faults.arm(Fault::Corrupt);
    let corrupt = space.load(slot, &mut out, &mut scratch);
    assert!(matches!(corrupt, Err(LoadError::Corrupt { .. })));
    assert_eq!(space.usage().load_failures, 2);
    assert_holds(&space, slot, &text(1));
}

/// A source that refuses or damages memory on demand.
#[derive(Default)]
struct BadSource {
    heap: HeapSource,
    refuse: AtomicBool,
    reservations: std::sync::Mutex<Vec<(usize, usize)>>,
    refused: AtomicUsize,
}

// SAFETY: everything is left to the heap source; refusing to commit is allowed.
unsafe impl PageSource for BadSource {
    fn reserve(&self, pages: usize) -> Result<std::ptr::NonNull<u8>, SourceError> {
        let base = self.heap.reserve(pages)?;
        self.reservations
            .lock()
            .unwrap()
            .push((base.as_ptr().expose_provenance(), pages));
        Ok(base)
    }

    unsafe fn unreserve(&self, base: std::ptr::NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.heap.unreserve(base, pages) }
    }

    fn commit(&self, run: PageRun) -> Result<(), SourceError> {
        if self.refuse.load(Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(SourceError::Commit { pages: run.pages });
        }
        Ok(())
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        if self.refuse.load(Ordering::Relaxed) {
            return Err(SourceError::Discard);
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.heap.discard(runs) }
    }
}

#[test]
fn refused_memory_is_an_error_and_nothing_leaks() {
    let source: &'static BadSource = Box::leak(Box::default());
    let space = SwapSpace::new(source, config()).unwrap();
    let mut scratch = Scratch::new();
    source.refuse.store(true, Ordering::Relaxed);
    for page in [text(1), noise(1), repeated(1), repeated(0.1_f64.to_bits())] {
        assert!(space.store(&page, &mut scratch).is_err());
    }
    assert!(source.refused.load(Ordering::Relaxed) > 0);
    source.refuse.store(false, Ordering::Relaxed);
    let slots: Vec<_> = (0..5000)
        .map(|seed| space.store(&noise(seed), &mut scratch).unwrap())
        .collect();
    // Memory that cannot be given back is used again.
    source.refuse.store(true, Ordering::Relaxed);
    space.release_bulk(&slots);
    assert_eq!(space.usage().slots_in_use, 0);
    let slot = space.store(&noise(9), &mut scratch).unwrap();
    assert_holds(&space, slot, &noise(9));
}

#[test]
fn damaged_storage_is_never_handed_out() {
    let source: &'static BadSource = Box::leak(Box::default());
    let space = SwapSpace::new(source, config()).unwrap();
    let mut scratch = Scratch::new();
    let pages: Vec<_> = (0..40)
        .map(|seed| {
            if seed % 4 == 0 {
                noise(seed)
            } else {
                text(seed)
            }
        })
        .collect();
    let slots: Vec<_> = pages
        .iter()
        .map(|page| space.store(page, &mut scratch).unwrap())
        .collect();
    // Some in blocks, the others as they were stored.
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: None,
    };
    space.scan(policy, usize::MAX, &mut scratch);
    for slot in &slots[20..] {
        space
            .load(*slot, &mut [0; PAGE_SIZE], &mut scratch)
            .unwrap();
    }
    space.scan(policy, usize::MAX, &mut scratch);
    assert!(space.usage().block_pages > 10);
    let (base, reserved) = source.reservations.lock().unwrap()[1];
    let pool = std::ptr::with_exposed_provenance_mut::<u8>(base);
    let mut found = 0;
    let mut out = [0; PAGE_SIZE];
    for step in 0..reserved * PAGE_SIZE / 61 {
        // SAFETY: the byte lies in the pool's reservation, and no other thread runs.
        let byte = unsafe { &mut *pool.add(step * 61) };
        if *byte == 0 {
            continue;
        }
        *byte ^= 1 << (step % 8);
        // A new scratch has no block of before.
        let mut scratch = Scratch::new();
        for (slot, page) in slots.iter().zip(&pages) {
            match space.load(*slot, &mut out, &mut scratch) {
                Ok(()) => assert!(out == *page, "wrong bytes from {slot:?}"),
                Err(LoadError::Corrupt { slot: found_in, .. }) => {
                    assert_eq!(found_in, *slot);
                    found += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        // SAFETY: as above.
        unsafe { *pool.add(step * 61) ^= 1 << (step % 8) };
    }
    assert!(found > 500, "only {found} damages were noticed");
}

fn scan_all(space: &SwapSpace<HeapSource>) -> memfold_swap::MigrateReport {
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: Some(1),
    };
    space.scan(policy, usize::MAX, &mut Scratch::new())
}

#[test]
fn only_pages_that_stay_cold_are_recompressed() {
    let space = space();
    let mut scratch = Scratch::new();
    let pages: Vec<_> = (0..1000).map(text).collect();
    let slots: Vec<_> = pages
        .iter()
        .map(|page| space.store(page, &mut scratch).unwrap())
        .collect();
    assert_eq!(scan_all(&space).moved, 0);
    for index in 0..500 {
        assert_holds(&space, slots[index], &pages[index]);
    }
    let before = space.usage();
    let report = scan_all(&space);
    assert_eq!(report.moved, 500);
    let after = space.usage();
    assert_eq!(after.recompressed_pages, 500);
    assert_eq!(
        before.stored_bytes - after.stored_bytes,
        report.bytes_before - report.bytes_after
    );
    assert!(report.bytes_after < report.bytes_before);
    for (slot, page) in slots.iter().zip(&pages) {
        assert_holds(&space, *slot, page);
    }
    // And back, with the same bytes.
    let mut back = 0;
    for tier in [TierKind::Recompressed, TierKind::Block] {
        let report = space.evacuate(tier, &mut scratch, || true);
        assert!(report.finished);
        back += report.moved;
    }
    assert_eq!(back, 500);
    assert_eq!(space.usage().stored_bytes, before.stored_bytes);
    for (slot, page) in slots.iter().zip(&pages) {
        assert_holds(&space, *slot, page);
    }
    space.release_bulk(&slots);
    assert_empty(&space);
}

#[test]
fn a_page_that_gains_nothing_is_not_tried_again() {
    let space = space();
    let mut scratch = Scratch::new();
    // Bytes that neither algorithm can shorten, and a tail that both make equally short.
    let mut page = noise(5);
    page[3000..].fill(0);
    let slot = space.store(&page, &mut scratch).unwrap();
    let bytes = space.usage().stored_bytes;
    for _ in 0..4 {
        scan_all(&space);
        assert_holds(&space, slot, &page);
    }
    scan_all(&space);
    assert_eq!(scan_all(&space).moved, 0);
    assert!(space.usage().stored_bytes <= bytes);
    assert_eq!(space.usage().recompressed_pages, 1);
}

#[test]
fn compaction_moves_pages_under_their_slots() {
    let space = space();
    let mut scratch = Scratch::new();
    let pages: Vec<_> = (0..4000).map(text).collect();
    let slots: Vec<_> = pages
        .iter()
        .map(|page| space.store(page, &mut scratch).unwrap())
        .collect();
    let (keep, free): (Vec<_>, Vec<_>) = slots
        .iter()
        .zip(&pages)
        .partition(|(slot, _)| slot.into_raw() % 4 == 0);
    space.release_bulk(&free.iter().map(|(slot, _)| **slot).collect::<Vec<_>>());
    space.trim();
    let before = space.usage().pool_bytes;
    let report = space.compact(|| true);
    space.trim();
    assert!(report.objects_moved > 0);
    assert!(
        space.usage().pool_bytes < before / 2,
        "{before} {}",
        space.usage().pool_bytes
    );
    for (slot, page) in keep {
        assert_holds(&space, *slot, page);
    }
}

#[test]
#[should_panic(expected = "while dropping a count: found free")]
fn releasing_twice_stops() {
    let space = space();
    let slot = space.store(&text(1), &mut Scratch::new()).unwrap();
    space.release(slot);
    space.release(slot);
}

#[test]
#[should_panic(expected = "while loading its page")]
fn loading_a_free_slot_stops() {
    let space = space();
    let slot = space.store(&text(1), &mut Scratch::new()).unwrap();
    space.release(slot);
    let _ = space.load(slot, &mut [0; PAGE_SIZE], &mut Scratch::new());
}

#[test]
#[should_panic(expected = "no such swap slot")]
fn slot_zero_stops() {
    let _ = space().load(Slot::from_raw(0), &mut [0; PAGE_SIZE], &mut Scratch::new());
}
