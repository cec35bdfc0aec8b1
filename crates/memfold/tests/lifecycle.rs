//! Engines come and go, many beside each other, and nothing is left of them.

mod common;

use common::{MIB, PAGE, builder, fill_page, forked, modes, userfaultfd_modes};
use memfold::{Mode, Region};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One test at a time: descriptors are counted, and children forked.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what may hang if it is wrong; the process ends then.
fn within_a_minute(what: &str, run: impl FnOnce()) {
    let (done, watched) = channel::<()>();
    let what = what.to_owned();
    let watch = std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("hangs: {what}");
            std::process::abort();
        }
    });
    run();
    drop(done);
    watch.join().unwrap();
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
    // Some of `before` may have been of an engine of the test before, which was ending.
    let now = descriptors();
    assert!(now <= before, "{before} descriptors have become {now}");
}

#[test]
fn more_engines_than_workers_serve_faults() {
    let _alone = alone();
    let mode = userfaultfd_modes().pop().unwrap();
    within_a_minute("65 engines", move || {
        let engines: Vec<_> = (0..65)
            .map(|_| {
                let limit = 64 * MIB as u64;
                builder(mode).limit(limit).build().unwrap()
            })
            .collect();
        for engine in &engines {
            let mut region = engine.map(MIB).unwrap();
            fill(&mut region);
        }
    });
}

/// In a process of its own, where no thread has room for its stack.
#[test]
fn an_engine_that_gets_no_threads_is_refused() {
    const NAME: &str = "an_engine_that_gets_no_threads_is_refused";
    const CHILD: &str = "MEMFOLD_TEST_WITHOUT_THREADS";
    if std::env::var_os(CHILD).is_some() {
        for mode in modes() {
            let refused = builder(mode).limit(64 * MIB as u64).build().unwrap_err();
            assert!(refused.to_string().contains("thread"), "{mode}: {refused}");
        }
        println!("refused in all modes");
        return;
    }
    let _alone = alone();
    let child = Command::new("timeout")
        .arg("60")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
        .env(CHILD, "")
        .env("RUST_MIN_STACK", (1_u64 << 60).to_string())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    let wrong = String::from_utf8_lossy(&child.stderr);
    assert!(
        said.contains("refused in all modes"),
        "{}: {said}{wrong}",
        child.status
    );
}

#[test]
fn a_pin_that_outlives_its_region_holds_nothing_up() {
    let _alone = alone();
    for mode in modes() {
        let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
        let region = memfold.map(MIB).unwrap();
        let pin = region.pin_detached(..PAGE).unwrap();
        drop(region);
        within_a_minute("settle beside a pin", || memfold.wait_for_release());
        assert_eq!(memfold.stats().resident_bytes, 0);
        drop(pin);
        assert_eq!(memfold.stats().pinned_bytes, 0);
    }
}

/// Where there is no userfaultfd, what is accessed is a block of pages, and so is what stays in memory.
#[test]
fn a_pin_counts_what_it_keeps_in_memory() {
    let _alone = alone();
    let limit = 2 * MIB as u64;
    let memfold = builder(Mode::Protection)
        .resident_limit(limit)
        .build()
        .unwrap();
    let region = memfold.map(6 * MIB).unwrap();
    let mut pins = Vec::new();
    let refused = (0..region.len()).step_by(16 * PAGE).find_map(|start| {
        let pin = region.pin_detached(start..=start);
        pin.map(|pin| pins.push(pin)).err()
    });
    assert!(
        matches!(refused, Some(memfold::Error::TooMuchPinned { .. })),
        "{refused:?}"
    );
    let stats = memfold.stats();
    assert!(stats.pinned_bytes < limit, "{stats:?}");
    assert!(stats.resident_bytes < limit, "{stats:?}");
    pins.clear();
    assert_eq!(memfold.stats().pinned_bytes, 0);
}

/// Without userfaultfd a region lies in a file. A forked child that held it would keep its memory.
#[test]
fn a_forked_child_holds_no_file_of_a_region() {
    let _alone = alone();
    let memfold = builder(Mode::Protection)
        .limit(64 * MIB as u64)
        .build()
        .unwrap();
    let mut region = memfold.map(8 * MIB).unwrap();
    fill(&mut region);
    let status = forked(|| {
        let is_ours = |name: &str| name.contains("memfd:memfold");
        let files = std::fs::read_dir("/proc/self/fd").unwrap();
        let mut names = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
        let opened = names.any(|name| is_ours(&name.to_string_lossy()));
        let mapped = is_ours(&std::fs::read_to_string("/proc/self/maps").unwrap());
        i32::from(opened) | i32::from(mapped) << 1
    });
    assert_eq!(status, 0, "{status:#x}");
    assert_eq!(region.len(), 8 * MIB);
}

#[test]
fn a_child_does_not_wait_for_what_its_parent_releases() {
    let _alone = alone();
    let memfold = builder(Mode::Signal)
        .limit(64 * MIB as u64)
        .build()
        .unwrap();
    let mut region = memfold.map(32 * MIB).unwrap();
    fill(&mut region);
    region.page_out(..).unwrap();
    within_a_minute("settle in a child", || {
        drop(region);
        // SAFETY: the child looks at an atomic, and ends without destructors.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                memfold.wait_for_release();
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
    });
}

#[test]
fn what_a_dropped_region_had_in_memory_is_room_at_once() {
    let _alone = alone();
    for mode in modes() {
        let limit = 8 * MIB as u64;
        let memfold = builder(mode).resident_limit(limit).build().unwrap();
        let mut stored = memfold.map(32 * MIB).unwrap();
        fill(&mut stored);
        let mut resident = memfold.map(8 * MIB).unwrap();
        fill(&mut resident);
        let mut next = memfold.map(6 * MIB).unwrap();
        // What the first has in the pool takes a while to be released.
        drop(stored);
        drop(resident);
        let left = memfold.stats().resident_bytes;
        assert!(left < limit / 4, "{mode}: {left}");
        fill(&mut next);
        assert_eq!(memfold.stats().over_limit_pages, 0, "{mode}");
    }
}

/// The addresses are free in a child otherwise, and what it maps there is read in place of the region.
#[test]
fn a_guarded_child_maps_nothing_over_a_region_and_is_told_why_it_ends() {
    let _alone = alone();
    for mode in modes() {
        let memfold = builder(mode).limit(32 * MIB as u64).build().unwrap();
        let mut region = memfold.map(16 * MIB).unwrap();
        fill(&mut region);
        let start = region.base().as_ptr();
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: the child makes system calls, reads a byte, and ends without destructors.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let error = writer.as_raw_fd();
                libc::dup2(error, 2);
                if memfold::guard_inherited().is_err() || memfold::guard_inherited().is_err() {
                    libc::_exit(1);
                }
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                let over = start.add(MIB).cast();
                if libc::mmap(over, MIB, libc::PROT_READ, flags, -1, 0) != libc::MAP_FAILED {
                    libc::_exit(2);
                }
                start.add(MIB).read_volatile();
                libc::_exit(3);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        };
        drop(writer);
        let mut message = String::new();
        reader.read_to_string(&mut message).unwrap();
        assert_eq!(status & 0x7f, libc::SIGABRT, "{mode}: {status:x} {message}");
        assert!(message.contains("was forked"), "{mode}: {message}");
        assert!(memfold::is_region(start as usize));
        assert_eq!(region[PAGE..2 * PAGE].len(), PAGE, "the parent keeps it");
        drop(region);
        assert!(!memfold::is_region(start as usize));
    }
}

/// It is a safe function, whatever other threads do meanwhile.
#[test]
fn regions_come_and_go_beside_the_guard_of_children() {
    let _alone = alone();
    let memfold = builder(Mode::Protection)
        .limit(64 * MIB as u64)
        .build()
        .unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                memfold::guard_inherited().unwrap();
            }
        });
        for _ in 0..200 {
            let mut region = memfold.map(64 * PAGE).unwrap();
            region[0] = 1;
            drop(region);
            memfold.wait_for_release();
        }
        done.store(true, Ordering::Relaxed);
    });
    // Nothing of this process's was taken for a parent's, whose addresses are made inaccessible.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let guarded = |line: &&str| {
        let mut parts = line.split([' ', '-']);
        let mut address = || usize::from_str_radix(parts.next().unwrap(), 16).unwrap();
        let (start, end) = (address(), address());
        line.contains("---p") && start % (2 * MIB) == 0 && end - start == 2 * MIB
    };
    assert_eq!(maps.lines().filter(guarded).count(), 0, "{maps}");
}

/// A page takes room once, however many pins keep it.
#[test]
fn pins_of_the_same_pages_count_once() {
    let _alone = alone();
    for mode in modes() {
        let memfold = builder(mode).limit(8 * MIB as u64).build().unwrap();
        let region = memfold.map(4 * MIB).unwrap();
        let pinned = || memfold.stats().pinned_bytes / MIB as u64;
        let pin = |bytes: std::ops::Range<usize>| region.pin_detached(bytes).unwrap();
        let mut same: Vec<_> = (0..10).map(|_| pin(0..3 * MIB)).collect();
        assert_eq!(pinned(), 3, "{mode}");
        let part = pin(MIB..2 * MIB);
        let across = pin(2 * MIB..4 * MIB);
        assert_eq!(pinned(), 4, "{mode}");
        same.truncate(1);
        assert_eq!(pinned(), 4, "{mode}");
        same.clear();
        assert_eq!(pinned(), 3, "{mode}");
        assert!(region.page_out(..).unwrap() <= MIB as u64, "{mode}");
        drop(across);
        assert_eq!(pinned(), 1, "{mode}");
        drop(part);
        assert_eq!(pinned(), 0, "{mode}");
    }
}
