//! Regions of processes that lock their memory (`mlockall`).

mod common;

use common::fill_page;
use common::{MIB, PAGE, builder, forked, modes, verify_page};
use memfold::Mode;

/// What a child answers that may not lock memory.
const MAY_NOT_LOCK: i32 = 77;

/// Runs a child that locks what it maps from now on.
fn in_child_that_locks(mode: Mode, run: impl FnOnce(Mode)) {
    let status = forked(|| {
        // SAFETY: the handler writes to a descriptor alone; locks mappings to come.
        unsafe {
            std::panic::set_hook(Box::new(|panic| {
                let text = format!("{panic}\n");
                libc::write(2, text.as_ptr().cast(), text.len());
                libc::_exit(101);
            }));
            libc::alarm(20);
            if libc::mlockall(libc::MCL_FUTURE) != 0 {
                return MAY_NOT_LOCK;
            }
        }
        run(mode);
        0
    });
    if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == MAY_NOT_LOCK {
        return memfold_testing::skip("memory that may be locked (CAP_IPC_LOCK)");
    }
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
}

fn resident_of_process() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * PAGE
}

fn region_is_paged_as_elsewhere(mode: Mode) {
    let before = resident_of_process();
    let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let mut region = memfold.map(4 * MIB).unwrap();
    let more = resident_of_process().saturating_sub(before);
    assert!(
        more < 64 * MIB,
        "{more} bytes are resident before any is used"
    );
    assert_eq!(region.resident_bytes(), 0);
    region.fill(1);
    assert!(region.resident_bytes() > 0);
    region.discard(..64 << 10).unwrap();
    assert!(region[..64 << 10].iter().all(|byte| *byte == 0));
    assert!(region[64 << 10..].iter().all(|byte| *byte == 1));
    region.discard(..).unwrap();
    assert!(region.iter().all(|byte| *byte == 0));
    for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
        fill_page(page, number as u64, 1);
    }
    assert!(region.page_out(..).unwrap() > 0);
    assert!(region.resident_bytes() < 4 * MIB as u64);
    for (number, page) in region.chunks_exact(PAGE).enumerate() {
        verify_page(page, number as u64, 1);
    }
}

#[test]
fn a_region_of_a_process_that_locks_what_it_maps_is_not_populated() {
    for mode in modes() {
        in_child_that_locks(mode, region_is_paged_as_elsewhere);
    }
}
