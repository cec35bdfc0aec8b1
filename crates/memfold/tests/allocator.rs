//! Collections in regions.

mod common;

use allocator_api2::alloc::{Allocator, Layout};
use common::{MIB, forked};
use hashbrown::{DefaultHashBuilder, HashMap};
use memfold::{Memfold, RegionAllocator};
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

fn allocator(limit: usize) -> RegionAllocator {
    let limit = limit as u64;
    Memfold::builder().limit(limit).build().unwrap().allocator()
}

#[test]
fn a_hash_map_outgrows_its_limit() {
    let allocator = allocator(6 * MIB);
    let mut map: HashMap<u64, [u64; 7], DefaultHashBuilder, RegionAllocator> =
        HashMap::with_hasher_in(DefaultHashBuilder::default(), allocator.clone());
    for key in 0..150_000_u64 {
        map.insert(key, [key / 100; 7]);
    }
    for key in (0..150_000).step_by(3) {
        assert_eq!(map.remove(&key), Some([key / 100; 7]));
    }
    for key in (0..150_000).step_by(7) {
        assert_eq!(map.get(&key).is_some(), key % 3 != 0);
    }
    assert_eq!(map.len(), 100_000);
    assert!(allocator.memfold().stats().pages_out > 1000);
    let memfold = allocator.memfold().clone();
    drop((map, allocator));
    assert_eq!(memfold.stats().mapped_bytes, 0);
}

/// A fork may find another thread in the midst of an allocation.
#[test]
fn a_child_frees_what_its_parent_allocated() {
    let allocator = allocator(8 * MIB);
    let done = AtomicBool::new(false);
    let hung = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                drop(allocator_api2::boxed::Box::new_in(0_u8, &allocator));
            }
        });
        let hung = (0..200).find(|_| {
            let byte = allocator_api2::boxed::Box::new_in(0_u8, &allocator);
            let status = forked(|| {
                // SAFETY: a number.
                unsafe { libc::alarm(5) };
                drop(byte);
                0
            });
            status != 0
        });
        done.store(true, Ordering::Relaxed);
        hung
    });
    assert_eq!(hung, None, "the fork whose child did not end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Allocations do not overlap, are aligned, and keep their contents.
    #[test]
    fn allocations_are_their_owners_alone(
        steps in proptest::collection::vec((0..200_000_usize, 0..13_u32, any::<bool>()), 1..200)
    ) {
        let allocator = allocator(8 * MIB);
        let mut live: Vec<(NonNull<u8>, Layout, u8)> = Vec::new();
        for (number, (size, shift, free)) in steps.into_iter().enumerate() {
            if free && !live.is_empty() {
                let (start, layout, byte) = live.swap_remove(size % live.len());
                // SAFETY: allocated below with this layout, and not freed since.
                unsafe {
                    let bytes = std::slice::from_raw_parts(start.as_ptr(), layout.size());
                    prop_assert!(bytes.iter().all(|found| *found == byte));
                    allocator.deallocate(start, layout);
                }
                continue;
            }
            let layout = Layout::from_size_align(size / (1 + shift as usize), 1 << shift).unwrap();
            let start = allocator.allocate(layout).unwrap().cast::<u8>();
            prop_assert!(start.as_ptr().addr().is_multiple_of(layout.align()));
            let byte = number as u8;
            // SAFETY: allocated just now.
            unsafe { start.as_ptr().write_bytes(byte, layout.size()) };
            live.push((start, layout, byte));
        }
        for (start, layout, byte) in live {
            // SAFETY: as above.
            unsafe {
                let bytes = std::slice::from_raw_parts(start.as_ptr(), layout.size());
                prop_assert!(bytes.iter().all(|found| *found == byte));
                allocator.deallocate(start, layout);
            }
        }
    }
}
