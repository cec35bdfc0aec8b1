//! Blocks: several pages that are one object.

use crate::common::{MemoryFile, assert_empty, config, noise, space, space_with_file};
use memfold_swap::{
    BlockShape, PAGE_SIZE, Page, ScanPolicy, Scratch, Slot, SwapConfig, SwapSpace, TierKind,
};
use zsmalloc::HeapSource;

/// Pages that have a third of what they hold in common, and nothing with those of another `family`.
fn related(family: u64, member: u64) -> Page {
    let mut page = noise(family);
    page[1024..2560].copy_from_slice(&noise(!member)[..1536]);
    // Shorter alone, too.
    page[2560..].fill(family as u8);
    page
}

fn store(space: &SwapSpace<HeapSource>, count: u64) -> Vec<(Slot, Page)> {
    let mut scratch = Scratch::new();
    (0..count)
        .map(|seed| related(seed / 4, seed))
        .map(|page| (space.store(&page, &mut scratch).unwrap(), page))
        .collect()
}

/// Scans as often as makes pages cold that nothing loads.
fn pack(space: &SwapSpace<HeapSource>) -> u64 {
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: None,
    };
    let mut scratch = Scratch::new();
    let reports = [(); 2].map(|()| space.scan(policy, usize::MAX, &mut scratch));
    assert!(reports.iter().all(|report| report.failed == 0));
    reports.iter().map(|report| report.moved).sum()
}

#[track_caller]
fn assert_all_right(space: &SwapSpace<HeapSource>, stored: &[(Slot, Page)]) {
    let mut scratch = Scratch::for_loads();
    let mut out = [0; PAGE_SIZE];
    for (slot, page) in stored {
        space.load(*slot, &mut out, &mut scratch).unwrap();
        assert!(out == *page, "another page came back from {slot:?}");
    }
}

#[test]
fn neighbours_share_a_block_that_is_denser_than_they_are() {
    let space = space();
    let stored = store(&space, 64);
    let before = space.usage();
    assert_eq!(pack(&space), 64);
    let usage = space.usage();
    assert_eq!((usage.block_pages, usage.dead_bytes), (64, 0));
    assert_eq!((usage.block_total, usage.recompressed_total), (64, 64));
    // Alone, none of them would be shorter.
    assert!(
        usage.stored_bytes * 5 < before.stored_bytes * 4,
        "{usage:?}"
    );
    assert_eq!(space.root_group().usage().pool, usage.stored_bytes);
    assert_all_right(&space, &stored);
    // In any order, too.
    let mixed: Vec<_> = (0..64).map(|index| stored[index * 29 % 64]).collect();
    assert_all_right(&space, &mixed);
    for (slot, _) in stored {
        space.release(slot);
    }
    assert_empty(&space);
}

#[test]
fn a_block_of_which_half_is_gone_is_taken_apart() {
    let space = space();
    let mut stored = store(&space, 64);
    pack(&space);
    let dense = space.usage();
    // One page of each block: it stays, and takes what it took.
    let gone: Vec<_> = (0..16).map(|block| stored.remove(block * 3)).collect();
    for (slot, _) in gone {
        space.release(slot);
    }
    let usage = space.usage();
    assert!(usage.dead_bytes > 0);
    assert_eq!(usage.stored_bytes + usage.dead_bytes, dense.stored_bytes);
    assert_eq!(pack(&space), 0);
    // A second one: the rest moves into new blocks.
    let gone: Vec<_> = (0..16).map(|block| stored.remove(block * 2)).collect();
    let slots: Vec<_> = gone.iter().map(|(slot, _)| *slot).collect();
    space.release_bulk(&slots);
    assert_eq!(pack(&space), 32);
    let usage = space.usage();
    assert_eq!((usage.block_pages, usage.dead_bytes), (32, 0));
    assert_all_right(&space, &stored);
    // The last of a block has no neighbour to go with.
    while stored.len() > 1 {
        space.release(stored.pop().unwrap().0);
    }
    pack(&space);
    let usage = space.usage();
    assert_eq!((usage.recompressed_pages, usage.block_pages), (1, 0));
    assert_all_right(&space, &stored);
    space.release(stored[0].0);
    assert_empty(&space);
}

#[test]
fn a_shared_page_of_a_block_lives_for_as_long_as_it_has_owners() {
    let space = space();
    let stored = store(&space, 8);
    for (slot, _) in &stored {
        for _ in 0..40 {
            space.duplicate(*slot).unwrap();
        }
    }
    assert_eq!(pack(&space), 8);
    for round in 0..40 {
        for (slot, _) in &stored {
            assert_eq!(space.count(*slot), 41 - round);
            space.release(*slot);
        }
    }
    assert_all_right(&space, &stored);
    let slots: Vec<_> = stored.iter().map(|(slot, _)| *slot).collect();
    space.release_bulk(&slots);
    assert_empty(&space);
}

#[test]
fn pages_that_gain_nothing_together_stay_as_they_are() {
    let space = space();
    let mut scratch = Scratch::new();
    let stored: Vec<_> = (0..8)
        .map(|seed| {
            let mut page = noise(seed);
            page[3000..].fill(0);
            (space.store(&page, &mut scratch).unwrap(), page)
        })
        .collect();
    let before = space.usage().stored_bytes;
    pack(&space);
    let usage = space.usage();
    assert_eq!((usage.block_pages, usage.recompressed_pages), (0, 8));
    assert_eq!(usage.stored_bytes, before);
    assert_eq!(pack(&space), 0);
    assert_all_right(&space, &stored);
}

#[test]
fn blocks_leave_for_the_file_and_for_the_pool() {
    let space = space_with_file(config(), MemoryFile::default().tier(64 << 20));
    let stored = store(&space, 200);
    pack(&space);
    let mut scratch = Scratch::new();
    let report = space.write_back(u64::MAX, &mut scratch);
    assert_eq!((report.moved, report.failed), (200, 0));
    assert_eq!(space.usage().file_pages, 200);
    assert_all_right(&space, &stored);
    let report = space.evacuate(TierKind::File, &mut scratch, || true);
    assert_eq!((report.moved, report.finished), (200, true));
    pack(&space);
    assert_eq!(space.pages_in(TierKind::Block), 200);
    let report = space.evacuate(TierKind::Block, &mut scratch, || true);
    assert_eq!((report.moved, report.finished), (200, true));
    assert_all_right(&space, &stored);
    assert_eq!(space.usage().dead_bytes, 0);
}

/// Two of four pages that are nearly alike take as much as the four.
#[test]
fn what_is_left_of_a_block_leaves_with_time_though_it_is_not_taken_apart() {
    let space = space_with_file(config(), MemoryFile::default().tier(64 << 20));
    let mut scratch = Scratch::new();
    let alike = |member: u8| {
        let mut page = noise(1);
        page[2000..].fill(0x11);
        page[8 * usize::from(member)] ^= 1;
        page
    };
    let pages = (0..4).map(alike);
    let mut stored: Vec<_> = pages
        .map(|page| (space.store(&page, &mut scratch).unwrap(), page))
        .collect();
    pack(&space);
    assert_eq!(space.pages_in(TierKind::Block), 4);
    for (slot, _) in stored.drain(2..) {
        space.release(slot);
    }
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: Some(3),
    };
    for _ in 0..6 {
        space.scan(policy, usize::MAX, &mut scratch);
    }
    assert_eq!(space.pages_in(TierKind::File), 2, "{:?}", space.usage());
    assert_all_right(&space, &stored);
}

#[test]
fn compaction_moves_heads_under_their_records() {
    let space = space();
    let (keep, go): (Vec<_>, Vec<_>) = {
        let stored = store(&space, 4000);
        pack(&space);
        // Whole blocks go.
        stored
            .into_iter()
            .enumerate()
            .partition(|(index, _)| index / 4 % 5 == 0)
    };
    let slots: Vec<_> = go.iter().map(|(_, (slot, _))| *slot).collect();
    space.release_bulk(&slots);
    space.trim();
    let before = space.usage();
    assert_eq!(before.dead_bytes, 0);
    let report = space.compact(|| true);
    space.trim();
    assert!(report.objects_moved > 0);
    assert!(space.usage().pool_bytes < before.pool_bytes);
    let keep: Vec<_> = keep.into_iter().map(|(_, page)| page).collect();
    assert_all_right(&space, &keep);
    let slots: Vec<_> = keep.iter().map(|(slot, _)| *slot).collect();
    space.release_bulk(&slots);
    assert_empty(&space);
}

#[test]
fn every_size_of_block_holds_every_density() {
    for pages in [2, 3, 8, 16] {
        let config = SwapConfig {
            blocks: BlockShape { pages, level: 1 },
            ..config()
        };
        let space = SwapSpace::new(HeapSource::new(), config).unwrap();
        let mut scratch = Scratch::new();
        let stored: Vec<_> = (0..512_u64)
            .map(|seed| {
                let mut page = noise(seed / 16);
                page[(seed * 7) as usize..].fill(seed as u8);
                (space.store(&page, &mut scratch).unwrap(), page)
            })
            .collect();
        pack(&space);
        assert!(space.usage().block_pages > 100, "{:?}", space.usage());
        assert_all_right(&space, &stored);
        let slots: Vec<_> = stored.iter().map(|(slot, _)| *slot).collect();
        space.release_bulk(&slots);
        assert_empty(&space);
    }
    let too_long = BlockShape {
        pages: 17,
        level: 1,
    };
    for config in [
        SwapConfig {
            blocks: too_long,
            ..config()
        },
        SwapConfig {
            blocks_for_room: too_long,
            ..config()
        },
    ] {
        assert!(SwapSpace::new(HeapSource::new(), config).is_err());
    }
}

#[test]
fn who_needs_room_now_makes_blocks_of_another_shape() {
    let config = SwapConfig {
        blocks: BlockShape { pages: 0, level: 1 },
        blocks_for_room: BlockShape { pages: 4, level: 1 },
        ..config()
    };
    let space = SwapSpace::new(HeapSource::new(), config).unwrap();
    let stored = store(&space, 64);
    pack(&space);
    assert_eq!(space.usage().block_pages, 0);
    let later = store(&space, 64);
    let mut scratch = Scratch::new();
    for _ in 0..2 {
        assert_eq!(space.scan_for_room(usize::MAX, &mut scratch).failed, 0);
    }
    // Pages that were recompressed alone are not tried again.
    assert_eq!(space.usage().block_pages, 64);
    for stored in [stored, later] {
        assert_all_right(&space, &stored);
        for (slot, _) in stored {
            space.release(slot);
        }
    }
    assert_empty(&space);
}

#[test]
fn a_scratch_is_right_for_two_spaces() {
    let spaces = [space(), space()];
    let mut scratch = Scratch::new();
    let stored = spaces.each_ref().map(|space| {
        let pages = (0..4).map(|seed| related(7, seed ^ space_number(space)));
        let pages: Vec<_> = pages
            .map(|page| (space.store(&page, &mut scratch).unwrap(), page))
            .collect();
        pack(space);
        pages
    });
    let mut out = [0; PAGE_SIZE];
    for place in [0, 1, 3, 2] {
        for (space, pages) in spaces.iter().zip(&stored) {
            let (slot, page) = &pages[place];
            space.load(*slot, &mut out, &mut scratch).unwrap();
            assert!(out == *page);
        }
    }
}

/// A number that tells two spaces apart.
fn space_number(space: &SwapSpace<HeapSource>) -> u64 {
    std::ptr::from_ref(space).addr() as u64 >> 4
}
