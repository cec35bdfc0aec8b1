//! Engines come and go, many beside each other, and nothing is left of them.

mod common;

use common::{MIB, PAGE, builder, fill_page};
use memfold::{Mode, Region};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One test at a time: descriptors are counted, and children forked.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fill(region: &mut Region) {
    for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
        fill_page(page, number as u64, 1);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nothing_is_left_of_an_engine_dropped_right_after_its_regions() {
    let _alone = alone();
    let before = descriptors();
    for _ in 0..50 {
        let memfold = builder(Mode::Signal)
            .limit(64 * MIB as u64)
            .build()
            .unwrap();
        let mut slow = memfold.map(4 * MIB).unwrap();
        fill(&mut slow);
        slow.page_out(..).unwrap();
        let last = memfold.map(PAGE).unwrap();
        drop(slow);
        // The reclaim thread is busy with that one for a moment.
        std::thread::sleep(Duration::from_micros(300));
        drop((last, memfold));
    }
    assert_eq!(descriptors(), before);
}
