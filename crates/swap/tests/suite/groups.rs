//! Groups are charged for what is theirs, and those above them too.

use crate::common::{MemoryFile, assert_empty, config, noise, space_with_file, text};
use memfold_swap::{Charge, GroupUsage, PAGE_SIZE, ScanPolicy, Scratch, Slot, SwapSpace, TierKind};
use zsmalloc::HeapSource;

fn space() -> SwapSpace<HeapSource> {
    space_with_file(config(), MemoryFile::default().tier(64 << 20))
}

#[track_caller]
fn assert_charged(usage: GroupUsage, pool: u64, file: u64) {
    assert_eq!((usage.pool, usage.file), (pool, file));
}

#[test]
fn charges_go_up_and_come_back() {
    let space = space();
    let root = space.root_group();
    let middle = space.new_group(root);
    let low = space.new_group(&middle);
    let other = space.new_group(root);
    low.charge(Charge::Resident, 100);
    middle.charge(Charge::Staged, 10);
    other.charge(Charge::Resident, 1);
    assert_eq!(low.usage().resident, 100);
    assert_eq!(middle.usage().memory(), 100);
    assert_eq!(root.usage().memory(), 101);

    middle.set_limit(110);
    other.set_limit(50);
    assert_eq!(
        (low.excess(10), low.excess(15), other.excess(15)),
        (0, 5, 0)
    );
    root.set_limit(101);
    assert_eq!((other.excess(15), other.excess(60)), (15, 60));

    low.uncharge(Charge::Resident, 100);
    middle.uncharge(Charge::Staged, 10);
    other.uncharge(Charge::Resident, 1);
    assert_eq!(root.usage(), GroupUsage::default());
}

#[test]
fn slots_are_charged_to_the_group_that_stored_them_wherever_they_lie() {
    let space = space();
    let mut scratch = Scratch::new();
    let groups = [
        space.new_group(space.root_group()),
        space.new_group(space.root_group()),
    ];
    let mut slots: [Vec<Slot>; 2] = Default::default();
    let mut stored = [0; 2];
    for seed in 0..3000 {
        let which = usize::from(seed % 3 == 0);
        let page = if seed % 7 == 0 {
            noise(seed)
        } else {
            text(seed)
        };
        let before = space.usage().stored_bytes;
        slots[which].push(
            space
                .store_for(&groups[which], &page, &mut scratch)
                .unwrap(),
        );
        stored[which] += space.usage().stored_bytes - before;
    }
    for which in 0..2 {
        assert_charged(groups[which].usage(), stored[which], 0);
    }
    assert_charged(space.root_group().usage(), stored[0] + stored[1], 0);

    // Into the file and, half of it, back.
    let policy = ScanPolicy {
        recompress: None,
        write_back: Some(1),
    };
    space.scan(policy, usize::MAX, &mut scratch);
    assert_eq!(space.scan(policy, usize::MAX, &mut scratch).moved, 3000);
    let usage = space.root_group().usage();
    assert_charged(usage, 0, space.usage().file_bytes);
    assert_eq!(groups[0].usage().file + groups[1].usage().file, usage.file);
    space.release_bulk(&slots[0]);
    assert_charged(groups[0].usage(), 0, 0);
    assert_eq!(
        space.evacuate(TierKind::File, &mut scratch, || true).moved,
        1000
    );
    assert_charged(groups[1].usage(), stored[1], 0);
    for &slot in &slots[1] {
        space.release(slot);
    }
    assert_charged(space.root_group().usage(), 0, 0);
}

/// A group that never had a cluster of its own takes one that another emptied, and gives it up.
#[test]
fn an_emptied_cluster_serves_another_group() {
    let space = space();
    let mut scratch = Scratch::new();
    let [one, other] = [0, 1].map(|_| space.new_group(space.root_group()));
    let store = |group, count, scratch: &mut Scratch| {
        let pages: Vec<_> = (0..count).map(text).collect();
        let pages: Vec<_> = pages.iter().collect();
        let mut outcomes = Vec::new();
        space.store_batch_for(group, &pages, scratch, &mut outcomes);
        let slots = outcomes.into_iter().map(Result::unwrap);
        slots.collect::<Vec<_>>()
    };
    let first = store(&one, 600, &mut scratch);
    space.release_bulk(&first);
    // The first cluster is empty, and the shard holds the second.
    let second = store(&other, 100, &mut scratch);
    assert_eq!(second[0], first[0], "its numbers are used again");
    space.end_group(&other);
    assert_charged(space.root_group().usage(), space.usage().stored_bytes, 0);
    space.release_bulk(&second);
    space.end_group(&one);
    assert_empty(&space);
}

#[test]
fn what_outlives_a_group_is_its_parents() {
    let space = space();
    let mut scratch = Scratch::new();
    let parent = space.new_group(space.root_group());
    for round in 0..20_u64 {
        let child = space.new_group(&parent);
        let pages: Vec<_> = (0..700).map(|seed| text(round * 1000 + seed)).collect();
        let pages: Vec<_> = pages.iter().collect();
        let mut outcomes = Vec::new();
        space.store_batch_for(&child, &pages, &mut scratch, &mut outcomes);
        let slots: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
        let (early, late) = slots.split_at(400 + round as usize);
        space.release_bulk(early);
        let left = child.usage().pool;
        assert!(left > 0);
        space.end_group(&child);
        assert_charged(parent.usage(), left, 0);
        // Its clusters serve the parent.
        let slot = space.store_for(&parent, pages[0], &mut scratch).unwrap();
        let mut out = [0; PAGE_SIZE];
        for (slot, page) in late.iter().zip(&pages[early.len()..]) {
            space.load(*slot, &mut out, &mut scratch).unwrap();
            assert!(out == **page);
        }
        space.release(slot);
        space.release_bulk(late);
        assert_charged(parent.usage(), 0, 0);
    }
    assert_empty(&space);
}

#[test]
fn groups_come_and_go_while_others_work() {
    let space = space();
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let space = &space;
            scope.spawn(move || {
                let mut scratch = Scratch::new();
                for round in 0..40 {
                    let group = space.new_group(space.root_group());
                    let slots: Vec<_> = (0..200 + 13 * round)
                        .map(|seed| {
                            let page = text(seed + thread * 1_000_000);
                            space.store_for(&group, &page, &mut scratch).unwrap()
                        })
                        .collect();
                    space.release_bulk(&slots[..100]);
                    space.end_group(&group);
                    space.release_bulk(&slots[100..]);
                }
            });
        }
        scope.spawn(|| {
            let mut scratch = Scratch::new();
            for _ in 0..60 {
                let policy = ScanPolicy {
                    recompress: Some(1),
                    write_back: Some(1),
                };
                space.scan(policy, usize::MAX, &mut scratch);
                space.trim();
            }
        });
    });
    assert_empty(&space);
    assert_eq!(space.root_group().usage(), GroupUsage::default());
}
