//! Regions hold what was written to them, whatever comes and goes.

mod common;

use common::{MIB, PAGE, WITHOUT_MOVE, builder, fill_page, modes, userfaultfd_modes, verify_page};
use memfold::{Error, Memfold, Mode, Region};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A thread that waited for a page may continue, and drop the region, while its neighbours come in.
#[test]
fn what_is_mapped_where_a_region_was_is_zero() {
    for mode in modes() {
        let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
        let mut random = 1usize;
        for round in 0..400u64 {
            let mut region = memfold.map(MIB / 2).unwrap();
            for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
                fill_page(page, number as u64, round + 1);
            }
            region.page_out(..).unwrap();
            random = random
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(12345);
            // Backwards in steps: neighbours are brought in one by one.
            let pages = region.len() / PAGE;
            let last = (random >> 33) % pages;
            for number in (last..pages).rev().step_by(2) {
                verify_page(&region[number * PAGE..][..PAGE], number as u64, round + 1);
            }
            drop(region);
            let region = memfold.map(MIB / 2).unwrap();
            assert!(
                region.iter().all(|byte| *byte == 0),
                "{mode:?}, round {round}"
            );
        }
    }
}

/// Four times as much as the limit, written and read back in order and out of order.
#[test]
fn pages_survive_a_limit_of_a_quarter() {
    for mode in modes() {
        let memfold = builder(mode)
            .resident_limit(4 * MIB as u64)
            .build()
            .unwrap();
        let mut region = memfold.map(16 * MIB).unwrap();
        let pages = region.len() / PAGE;
        for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 1);
        }
        for step in 0..pages * 2 {
            let number = step * 7919 % pages;
            verify_page(&region[number * PAGE..][..PAGE], number as u64, 1);
        }
        for number in (0..pages).rev() {
            verify_page(&region[number * PAGE..][..PAGE], number as u64, 1);
        }
        let stats = memfold.stats();
        assert_eq!(stats.mode, mode);
        assert!(stats.pages_out > 3000 && stats.pages_in > 3000, "{stats:?}");
        assert!(stats.peak_resident_bytes <= 4 * MIB as u64, "{stats:?}");
        assert_eq!((stats.over_limit_pages, stats.store_failures), (0, 0));
        let by_mremap = mode == Mode::Signal && std::env::var_os(WITHOUT_MOVE).is_some();
        assert_eq!(stats.pages_remapped > 3000, by_mremap, "{stats:?}");
        drop(region);
        memfold.wait_for_release();
        let stats = memfold.stats();
        assert_eq!(
            (stats.stored_pages, stats.resident_bytes, stats.mapped_bytes),
            (0, 0, 0)
        );
    }
}

/// The numbers below `count` in no order.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..count).collect();
    let key = |number: usize| (number as u64 + (seed << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mix = |word: u64| (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 17;
    numbers.sort_by_key(|number| mix(key(*number)));
    numbers
}

/// Every page of a region is read once, in no order: with room for all of it, neighbours come in
/// with the pages that were touched; at a limit, no page is moved out for readahead.
#[test]
fn scattered_reads_bring_in_neighbours_only_where_there_is_room() {
    for mode in userfaultfd_modes() {
        let read_all = |room: usize, passes: usize| {
            let memfold = builder(mode).resident_limit(room as u64).build().unwrap();
            let mut region = memfold.map(8 * MIB).unwrap();
            let pages = region.len() / PAGE;
            for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
                fill_page(page, number as u64, 1);
            }
            region.page_out(..).unwrap();
            let mut before = memfold.stats();
            for pass in 0..passes {
                if pass == passes - 1 {
                    before = memfold.stats();
                }
                for number in shuffled(pages, pass as u64) {
                    verify_page(&region[number * PAGE..][..PAGE], number as u64, 1);
                }
            }
            let after = memfold.stats();
            (
                after.faults_swap_in - before.faults_swap_in,
                after.pages_read_ahead - before.pages_read_ahead,
                after.pages_out - before.pages_out,
            )
        };
        let (faults, ahead, out) = read_all(32 * MIB, 1);
        assert!(faults < 1000 && ahead > 1000, "{mode:?}: {faults} {ahead}");
        assert_eq!(out, 0, "{mode:?}");
        let (faults, ahead, out) = read_all(4 * MIB, 2);
        assert!(faults > 700 && ahead < 400, "{mode:?}: {faults} {ahead}");
        assert!(out > 700, "{mode:?}: {out}");
    }
}

/// Threads write and verify pages of their own while others page everything out all the time.
#[test]
fn threads_keep_their_pages_under_torture_reclaim() {
    for mode in modes() {
        let memfold = builder(mode)
            .resident_limit(2 * MIB as u64)
            .build()
            .unwrap();
        let region = memfold.map(6 * MIB).unwrap();
        let pages = region.len() / PAGE;
        let start = region.base().as_ptr() as usize;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut turn = 0;
                    while !done.load(Ordering::Relaxed) {
                        turn += 1;
                        let from = turn * 37 % pages * PAGE;
                        let to = (from + 200 * PAGE).min(region.len());
                        match turn % 4 {
                            0 => region.mark_cold(from..to).unwrap(),
                            1 => region.prefetch(from..to).unwrap(),
                            _ => drop(region.page_out(from..to).unwrap()),
                        }
                    }
                });
            }
            let workers: Vec<_> = (0..4)
                .map(|thread| {
                    scope.spawn(move || {
                        // Neighbouring pages belong to different threads.
                        let own: Vec<usize> = (thread..pages).step_by(4).collect();
                        let page = |number: usize| {
                            let address = (start + number * PAGE) as *mut u8;
                            // SAFETY: pages of the region, which outlives the scope; each is used
                            // by one thread.
                            unsafe { std::slice::from_raw_parts_mut(address, PAGE) }
                        };
                        for generation in 1..12_u64 {
                            for &number in &own {
                                if generation > 1 {
                                    verify_page(page(number), number as u64, generation - 1);
                                }
                                fill_page(page(number), number as u64, generation);
                            }
                        }
                    })
                })
                .collect();
            for worker in workers {
                worker.join().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        assert!(memfold.stats().peak_resident_bytes <= 2 * MIB as u64);
    }
}

#[test]
fn untouched_and_dropped_memory_reads_as_zeros() {
    for mode in modes() {
        let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
        let mut region = memfold.map(3 * MIB + 100).unwrap();
        assert_eq!(region.len(), 3 * MIB + 100);
        assert!(region.iter().all(|byte| *byte == 0));
        region.fill(7);
        region.page_out(MIB..2 * MIB).unwrap();
        region.discard(10..2 * MIB + 10).unwrap();
        assert!(region[..10].iter().all(|byte| *byte == 7));
        assert!(region[10..2 * MIB + 10].iter().all(|byte| *byte == 0));
        assert!(region[2 * MIB + 10..].iter().all(|byte| *byte == 7));
        region.discard(..).unwrap();
        assert_eq!(memfold.stats().stored_pages, 0);
        assert!(region.iter().all(|byte| *byte == 0));
    }
}

/// Waits for that, but not for ever.
fn becomes_true(mut is_true: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_true() && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What is counted out comes in again, and what never was out is counted as zeros.
#[test]
fn pages_are_counted_alike_in_all_modes() {
    for mode in modes() {
        // Without readahead: a fault that finds the page there, just read ahead, counts as one of
        // zeros.
        let builder = builder(mode).readahead(false);
        let memfold = builder.limit(64 * MIB as u64).build().unwrap();
        // The thread of thread mode counts after it has let the program go on.
        let assert_counted = |numbers: [u64; 3]| {
            let counted = || {
                let stats = memfold.stats();
                [stats.pages_zero_filled, stats.pages_out, stats.pages_in]
            };
            becomes_true(|| counted() == numbers);
            assert_eq!(counted(), numbers, "{mode}");
        };
        let mut region = memfold.map(MIB).unwrap();
        let pages = region.len() / PAGE;
        let all = pages as u64;
        // Writes some pages, moves all out that are in, and reads them.
        let pass = |region: &mut Region, numbers: &[usize], generation| {
            for &number in numbers {
                fill_page(
                    &mut region[number * PAGE..][..PAGE],
                    number as u64,
                    generation,
                );
            }
            // Nor does it note before that the last page is there.
            becomes_true(|| {
                region.page_out(..).unwrap();
                memfold.stats().stored_pages == numbers.len() as u64
            });
            let stored = memfold.stats().stored_pages;
            assert_eq!(stored, numbers.len() as u64, "{mode}: not all are out");
            for &number in numbers {
                verify_page(&region[number * PAGE..][..PAGE], number as u64, generation);
            }
        };
        pass(&mut region, &(0..pages).collect::<Vec<_>>(), 1);
        assert_counted([all; 3]);
        if mode == Mode::Protection {
            // Half of each block: what is left of it is zeros, and never stored.
            region.discard(..).unwrap();
            let half: Vec<usize> = (0..pages).filter(|number| number % 16 < 8).collect();
            pass(&mut region, &half, 2);
            assert_counted([all * 5 / 2, all * 3 / 2, all * 3 / 2]);
        }
    }
}

#[test]
fn several_limits_live_side_by_side() {
    let memfolds: Vec<Memfold> = [2, 8, 32]
        .iter()
        .map(|limit| {
            let bytes = limit * MIB as u64;
            Memfold::builder().resident_limit(bytes).build().unwrap()
        })
        .collect();
    let mut regions: Vec<_> = memfolds
        .iter()
        .map(|one| one.map(10 * MIB).unwrap())
        .collect();
    for (number, region) in regions.iter_mut().enumerate() {
        for (index, page) in region.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, index as u64, number as u64);
        }
    }
    for (number, region) in regions.iter().enumerate() {
        for (index, page) in region.chunks_exact(PAGE).enumerate() {
            verify_page(page, index as u64, number as u64);
        }
    }
    let peaks: Vec<u64> = memfolds
        .iter()
        .map(|one| one.stats().peak_resident_bytes)
        .collect();
    assert!(
        peaks[0] <= 2 << 20 && peaks[1] <= 8 << 20 && peaks[2] == 10 << 20,
        "{peaks:?}"
    );
    assert_eq!(memfolds[2].stats().pages_out, 0);
}

/// Pinned pages can be given to system calls; others, in the modes of signals, cannot.
#[test]
fn system_calls_need_a_pin_or_thread_mode() {
    use std::io::{Read, Write};
    for mode in modes() {
        let memfold = builder(mode).limit(16 * MIB as u64).build().unwrap();
        let mut region = memfold.map(MIB).unwrap();
        region.fill(0xa5);
        region.page_out(..).unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let direct = writer.write(&region[..PAGE]);
        assert_eq!(
            direct.is_ok(),
            region.supports_syscalls(),
            "{mode}: {direct:?}"
        );
        if direct.is_ok() {
            let mut bytes = [0; PAGE];
            reader.read_exact(&mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0xa5));
        }
        region.page_out(..).unwrap();
        let pin = region.pin(..8 * PAGE).unwrap();
        assert_eq!(region.page_out(..8 * PAGE).unwrap(), 0);
        // Without userfaultfd, what is kept is a block.
        let pinned = PAGE * if mode == Mode::Protection { 16 } else { 8 };
        assert_eq!(memfold.stats().pinned_bytes, pinned as u64);
        writer.write_all(&pin).unwrap();
        drop(pin);
        assert!(region.page_out(..8 * PAGE).unwrap() >= pinned as u64);
        let mut pin = region.pin_mut(PAGE..9 * PAGE).unwrap();
        reader.read_exact(&mut pin).unwrap();
        assert!(pin.iter().all(|byte| *byte == 0xa5));
        drop(pin);
        assert_eq!(memfold.stats().pinned_bytes, 0);
        assert!(matches!(
            region.pin(MIB..=MIB),
            Err(Error::OutOfRange { .. })
        ));
        let large = memfold.map(64 * MIB).unwrap();
        assert!(matches!(large.pin(..), Err(Error::TooMuchPinned { .. })));
    }
}

/// What does not compress stays above the limit rather than be lost, and is not moved for nothing.
#[test]
fn what_cannot_be_stored_in_less_exceeds_the_limit() {
    const WORDS: usize = PAGE / 8;
    let noise = |page: usize| {
        let mut state = page as u64 + 1;
        std::array::from_fn::<u64, WORDS, _>(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        })
    };
    for mode in modes() {
        let limit = 8 * MIB as u64;
        let memfold = builder(mode).limit(limit).build().unwrap();
        let mut region = memfold.map(64 * MIB).unwrap();
        let pages = region.len() / PAGE;
        for page in 0..pages {
            region.view_mut::<u64>()[page * WORDS..][..WORDS].copy_from_slice(&noise(page));
        }
        for round in 1..5 {
            for page in shuffled(pages, round) {
                assert_eq!(region.view::<u64>()[page * WORDS..][..WORDS], noise(page));
            }
        }
        let stats = memfold.stats();
        assert!(
            stats.pool_bytes + stats.resident_bytes >= region.len() as u64,
            "{mode:?}: {stats:?}"
        );
        assert!(stats.over_limit_pages > 10_000, "{mode:?}: {stats:?}");
        assert!(
            stats.pages_out < pages as u64 / 2,
            "{mode:?}: each was moved in every round: {stats:?}"
        );
        // It may be asked for.
        region.page_out(..).unwrap();
        assert!(memfold.stats().pool_bytes > region.len() as u64 / 2);
        for page in 0..pages {
            assert_eq!(region.view::<u64>()[page * WORDS..][..WORDS], noise(page));
        }
    }
}

/// Threads that take room while what others moved out enlarges the pool, which leaves less room.
#[test]
fn writers_at_once_stay_in_a_limit_on_all_memory() {
    const WRITERS: usize = 8;
    for mode in modes() {
        for round in 0..8 {
            let memfold = builder(mode).limit(24 * MIB as u64).build().unwrap();
            let mut region = memfold.map(48 * MIB).unwrap();
            let part = region.len() / WRITERS;
            std::thread::scope(|scope| {
                for pages in region.chunks_exact_mut(part) {
                    scope.spawn(move || {
                        for (number, page) in pages.chunks_exact_mut(PAGE).enumerate() {
                            fill_page(&mut page[..PAGE / 4], number as u64, round);
                            page[PAGE / 4..].fill(round as u8);
                        }
                    });
                }
            });
            let stats = memfold.stats();
            assert_eq!(stats.over_limit_pages, 0, "{mode:?}: {stats:?}");
        }
    }
}

/// A window of readahead may cross from one mapping into the next, where the program has split its region.
#[test]
fn a_region_whose_mapping_is_split_is_read_and_written_across() {
    for mode in userfaultfd_modes() {
        let memfold = builder(mode).limit(16 * MIB as u64).build().unwrap();
        let mut region = memfold.map(4 * MIB).unwrap();
        let (start, pages) = (region.as_ptr() as usize, region.len() / PAGE);
        let split = |first: usize| {
            let (at, length) = ((start + first * PAGE) as *const libc::c_void, 3 * PAGE);
            // SAFETY: locks pages of the region on their next fault, and brings none in.
            let locked = unsafe { libc::mlock2(at, length, libc::MLOCK_ONFAULT as _) };
            assert_eq!(locked, 0);
        };
        split(37);
        for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 1);
        }
        region.page_out(..).unwrap();
        split(pages - 100);
        for _ in 0..2 {
            for (number, page) in region.chunks_exact(PAGE).enumerate() {
                verify_page(page, number as u64, 1);
            }
        }
    }
}

#[test]
fn bad_requests_say_what_is_wrong() {
    let small = Memfold::builder().limit(1000).build().unwrap_err();
    assert!(small.to_string().contains("too small"), "{small}");
    let memfold = Memfold::builder().limit(8 * MIB as u64).build().unwrap();
    assert!(matches!(memfold.map(0), Err(Error::Length(0))));
    assert!(matches!(memfold.map(usize::MAX), Err(Error::Length(_))));
    let region = memfold.map(PAGE).unwrap();
    assert!(matches!(
        region.mark_cold(5..=PAGE),
        Err(Error::OutOfRange { .. })
    ));
    assert!(memfold.is_handler_installed());
}

/// As on kernels before Linux 6.8, which have no `UFFDIO_MOVE`: in a process that is told to do without it.
#[test]
fn pages_survive_being_moved_by_mremap() {
    if std::env::var_os(WITHOUT_MOVE).is_some() {
        println!("the tests beside this one do so");
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .env(WITHOUT_MOVE, "1")
        .args([
            "pages_survive_a_limit",
            "threads_keep",
            "untouched",
            "pages_are_counted",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("4 passed"),
        "{text}"
    );
}

/// No more leaves than there is need for, also where it was marked.
#[test]
fn what_is_marked_cold_leaves_step_by_step() {
    for mode in modes() {
        let memfold = builder(mode)
            .resident_limit(32 * MIB as u64)
            .build()
            .unwrap();
        let mut cold = memfold.map(24 * MIB).unwrap();
        for (number, page) in cold.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 1);
        }
        cold.mark_cold(..).unwrap();
        let mut other = memfold.map(8 * MIB).unwrap();
        for (number, page) in other.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 2);
        }
        // Background reclaim may be at work still.
        while {
            let before = cold.resident_bytes();
            std::thread::sleep(Duration::from_millis(100));
            before != cold.resident_bytes()
        } {}
        let (cold, other) = (cold.resident_bytes(), other.resident_bytes());
        assert!(cold >= 16 * MIB as u64, "{mode}: {cold}");
        assert_eq!(
            other,
            8 * MIB as u64,
            "{mode}: the marked pages leave first"
        );
    }
}

/// What is pinned stays, for the kernel or a device uses the very page.
#[test]
fn discarded_pages_under_a_pin_are_zero_and_stay() {
    use std::io::{Read, Write};
    for mode in modes() {
        let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
        let mut region = memfold.map(MIB).unwrap();
        region.fill(7);
        let pin = region.pin_detached(32 * PAGE..48 * PAGE).unwrap();
        let frame = |region: &Region| frame_of(&region[40 * PAGE]);
        let before = frame(&region);
        region.discard(PAGE..).unwrap();
        // Those under the pin, and the first one (of a block without a userfaultfd).
        let kept = if mode == Mode::Protection { 32 } else { 17 };
        assert_eq!(region.resident_bytes(), kept * PAGE as u64, "{mode}");
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&[9; PAGE]).unwrap();
        // SAFETY: in the region, of which nothing else is used meanwhile.
        let place = unsafe {
            let start = region.base().as_ptr().add(40 * PAGE);
            std::slice::from_raw_parts_mut(start, PAGE)
        };
        reader.read_exact(place).unwrap();
        assert_eq!(frame(&region), before, "{mode}");
        drop(pin);
        let expected = |page| match page {
            0 => 7,
            40 => 9,
            _ => 0,
        };
        for (number, page) in region.chunks_exact(PAGE).enumerate() {
            assert!(
                page.iter().all(|byte| *byte == expected(number)),
                "{mode}: page {number}"
            );
        }
        assert!(region.page_out(..).unwrap() >= 200 * PAGE as u64, "{mode}");
    }
}

/// The page frame of an address, from `/proc/self/pagemap`; 0 for users who may not know.
fn frame_of(byte: &u8) -> u64 {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut entry = [0; 8];
    let page = std::ptr::from_ref(byte) as usize / PAGE;
    file.read_exact_at(&mut entry, page as u64 * 8).unwrap();
    u64::from_ne_bytes(entry) & ((1 << 55) - 1)
}
