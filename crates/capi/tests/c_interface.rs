//! The C functions, called from Rust.

use std::sync::{Mutex, PoisonError};

use memfold::Stats;
use memfold_capi::{
    MEMFOLD_PAGE_OUT, memfold_advise, memfold_free, memfold_get_stats, memfold_map, memfold_new,
    memfold_stats, memfold_unmap,
};

/// Held by each test: what one maps and unmaps must not change where another one's regions lie.
static ADDRESSES: Mutex<()> = Mutex::new(());

/// In a child, a large region lies over where its parent had small ones.
#[test]
fn a_child_advises_on_its_own_regions() {
    const PART: usize = 2 << 20;
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: pointers to what lives here; regions are touched only by the calls. The child calls
    // this library alone, none of whose locks is held, and exits without destructors.
    unsafe {
        let limit = || {
            let mut limit = std::ptr::null_mut();
            assert_eq!(memfold_new(std::ptr::null(), &raw mut limit), 0);
            limit
        };
        let map = |limit, bytes| {
            let mut start = std::ptr::null_mut();
            assert_eq!(memfold_map(limit, bytes, &raw mut start), 0);
            start
        };
        let parents = limit();
        // Enough that stacks and heaps of the child's threads do not fill their place.
        let starts: Vec<_> = (0..512).map(|_| map(parents, PART)).collect();
        // Keeps the child's large reservations, which lie lower, out of their place.
        let lowest = *starts.iter().min().unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let anchor = (1..=PART / 4096)
            .map(|pages| lowest.byte_sub(pages * 4096))
            .map(|at| libc::mmap(at, 4096, libc::PROT_NONE, flags, -1, 0))
            .find(|at| *at != libc::MAP_FAILED)
            .expect("room below the regions");
        let child = libc::fork();
        if child == 0 {
            let run = || {
                let own = limit();
                let covering = (0..256).map(|_| map(own, 4 * PART)).find(|start| {
                    let range = *start..start.byte_add(4 * PART);
                    starts.iter().filter(|start| range.contains(*start)).count() > 1
                });
                let Some(start) = covering else {
                    return 2;
                };
                let advised = (0..8).all(|half| {
                    let half = start.byte_add(half * PART / 2);
                    memfold_advise(half, 4096, MEMFOLD_PAGE_OUT) == 0
                });
                i32::from(!advised)
            };
            libc::_exit(std::panic::catch_unwind(run).unwrap_or(3));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        let code = libc::WEXITSTATUS(status);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        assert_ne!(
            code, 2,
            "no region of the child's lies over two of its parent's"
        );
        assert_eq!(code, 0, "taken for a region of the parent's?");
        assert_eq!(libc::munmap(anchor, 4096), 0);
        for start in starts {
            assert_eq!(memfold_unmap(start), 0);
        }
        memfold_free(parents);
    }
}

/// The header has a member for each value; this is where they must lie.
#[test]
fn statistics_are_those_of_the_rust_library() {
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: pointers to what lives here.
    unsafe {
        let mut limit = std::ptr::null_mut();
        assert_eq!(memfold_new(std::ptr::null(), &raw mut limit), 0);
        let mut start = std::ptr::null_mut();
        assert_eq!(memfold_map(limit, 3 << 20, &raw mut start), 0);
        let mut stats: memfold_stats = std::mem::zeroed();
        assert_eq!(
            memfold_get_stats(limit, &raw mut stats),
            -1,
            "without a size"
        );
        stats.size = size_of::<memfold_stats>();
        assert_eq!(memfold_get_stats(limit, &raw mut stats), 0);
        let mapped = Stats::FIELDS
            .iter()
            .position(|field| field.name == "mapped_bytes");
        assert_eq!(stats.values[mapped.unwrap()], 3 << 20);
        let first = std::mem::offset_of!(memfold_stats, values);
        assert_eq!(first, size_of::<usize>() + size_of::<u64>(), "no gaps in C");
        // An older header's structure ends earlier.
        stats.size = first + 8;
        stats.values = [9; Stats::FIELDS.len()];
        assert_eq!(memfold_get_stats(limit, &raw mut stats), 0);
        assert_ne!(stats.values[0], 9);
        assert!(stats.values[1..].iter().all(|value| *value == 9));
        assert_eq!(memfold_unmap(start), 0);
        memfold_free(limit);
    }
}
