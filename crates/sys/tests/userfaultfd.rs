//! What the kernel answers about pages and mappings, reported as it is.
#![cfg(feature = "std")]

use memfold_sys::owned_uffd;
use memfold_sys::uffd::{
    FEATURE_EVENT_REMOVE, FEATURE_MOVE, FEATURE_WRITE_PROTECT, Message, Partial, Uffd,
};
use memfold_sys::{Errno, PAGE_SIZE};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGES: usize = 64;
const LENGTH: u64 = (PAGES * PAGE_SIZE) as u64;

/// Memory of the test's own, without huge pages.
struct Memory(*mut u8);

impl Memory {
    fn map() -> Memory {
        // SAFETY: a new mapping at an address of the kernel's choice, and advice for it.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let start = libc::mmap(
                std::ptr::null_mut(),
                LENGTH as usize,
                protection,
                flags,
                -1,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED, "64 pages can be mapped");
            // Fails only where there are none anyway.
            libc::madvise(start, LENGTH as usize, libc::MADV_NOHUGEPAGE);
            // A page that a child once shared is not exclusive to this process, so it cannot be moved.
            let advised = libc::madvise(start, LENGTH as usize, libc::MADV_DONTFORK);
            assert_eq!(advised, 0);
            Memory(start.cast())
        }
    }

    fn address(&self, page: usize) -> u64 {
        assert!(page < PAGES);
        self.0 as u64 + (page * PAGE_SIZE) as u64
    }

    fn word(&self, page: usize) -> *mut u64 {
        self.address(page) as *mut u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.0.cast(), LENGTH as usize) };
    }
}

/// A userfaultfd with these features, and what closes it; `None`, with a message, where there is none.
fn open(features: u64) -> Option<(Uffd, OwnedFd)> {
    let opened = owned_uffd::create().and_then(|owner| {
        let uffd = owned_uffd::borrow(&owner);
        uffd.api(features).map(|_| (uffd, owner))
    });
    let Err(errno) = &opened else {
        return opened.ok();
    };
    memfold_testing::skip(&format!(
        "a userfaultfd with features {features:#x} ({errno:?})"
    ));
    None
}

/// Lets the other thread end, also where the test fails.
struct AtEnd<'a>(&'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Registered memory, each page of the first with its own word in it, the others empty.
fn filled_and_registered<const N: usize>(uffd: Uffd) -> [Memory; N] {
    let all = std::array::from_fn(|_| Memory::map());
    for page in 0..PAGES {
        // SAFETY: the page is mapped, and not registered yet.
        unsafe { all[0].word(page).write_volatile(page as u64 + 1) };
    }
    for memory in &all {
        uffd.register_protectable(memory.address(0), LENGTH)
            .expect("new memory can be registered");
    }
    all
}

/// Changes the entries of the pages there are, until it is over; what is not there is left alone. May be
/// refused for these reasons.
fn keep_changing(uffd: Uffd, start: u64, over: &AtomicBool, refusals: &[Errno]) {
    while !over.load(Ordering::Relaxed) {
        for changed in [uffd.protect(start, LENGTH), uffd.unprotect(start, LENGTH)] {
            if let Err(errno) = changed {
                assert!(refusals.contains(&errno), "all is registered: {errno:?}");
            }
        }
    }
}

/// Moves a run of pages as memfold does, until it is refused, as mappings change: returns how many.
fn try_run(uffd: Uffd, target: u64, source: u64, pages: usize) -> usize {
    let length = (pages * PAGE_SIZE) as u64;
    let mut done = 0;
    while done < length {
        match uffd.move_pages(target + done, source + done, length - done) {
            Ok(()) => done = length,
            Err(Partial {
                done: step,
                errno: Errno::EAGAIN,
            }) if step > 0 => done += step,
            Err(Partial {
                errno: Errno::EAGAIN,
                ..
            }) => break,
            Err(partial) => panic!("after {done} bytes of {length}: {partial:?}"),
        }
    }
    done as usize / PAGE_SIZE
}

/// The same, again and again until all are moved.
fn move_run(uffd: Uffd, target: u64, source: u64, pages: usize) {
    let mut moved = 0;
    while moved < pages {
        let step = (moved * PAGE_SIZE) as u64;
        moved += try_run(uffd, target + step, source + step, pages - moved);
    }
}

#[test]
fn pages_that_change_while_they_are_moved_are_not_lost() {
    let Some((uffd, _owner)) = open(FEATURE_MOVE | FEATURE_WRITE_PROTECT) else {
        return;
    };
    let [home, away] = filled_and_registered(uffd);
    let start = home.address(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| keep_changing(uffd, start, &over, &[]));
        let _at_end = AtEnd(&over);
        let end = Instant::now() + Duration::from_secs(2);
        let mut rounds = 0;
        while Instant::now() < end {
            for run in [1, 5, 16] {
                for first in (0..=PAGES - run).step_by(run) {
                    move_run(uffd, away.address(first), home.address(first), run);
                    for page in first..first + run {
                        // SAFETY: the page was moved there.
                        let word = unsafe { away.word(page).read_volatile() };
                        assert_eq!(word, page as u64 + 1, "page {page}, round {rounds}");
                    }
                    move_run(uffd, home.address(first), away.address(first), run);
                }
            }
            rounds += 1;
        }
    });
}

#[test]
fn a_move_that_is_refused_tells_what_it_moved_before() {
    let features = FEATURE_MOVE | FEATURE_WRITE_PROTECT | FEATURE_EVENT_REMOVE;
    let Some((uffd, _owner)) = open(features) else {
        return;
    };
    let [home, away, other] = filled_and_registered(uffd);
    let (start, dropped) = (home.address(0), other.address(0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Refused while mappings change.
        scope.spawn(|| keep_changing(uffd, start, &over, &[Errno::EAGAIN]));
        let dropper = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(40));
                // SAFETY: drops what no test reads. Waits until the event was read, and moves are refused
                // meanwhile.
                unsafe { libc::madvise(dropped as *mut _, LENGTH as usize, libc::MADV_DONTNEED) };
            }
        });
        scope.spawn(move || {
            while !dropper.is_finished() {
                std::thread::yield_now();
                let mut messages = [Message::default(); 4];
                uffd.read(&mut messages).expect("it can be read");
            }
        });
        let _at_end = AtEnd(&over);
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            for first in (0..PAGES).step_by(16) {
                let (target, source) = (away.address(first), home.address(first));
                let moved = try_run(uffd, target, source, 16);
                let left = first + moved..first + 16;
                for page in left.clone() {
                    assert!(!is_present(away.word(page)), "{page} of {first}.. {moved}");
                }
                if !left.is_empty() {
                    let (target, source) = (away.address(left.start), home.address(left.start));
                    move_run(uffd, target, source, left.len());
                }
                move_run(uffd, home.address(first), away.address(first), 16);
            }
        }
    });
}

/// Whether there is memory at an address.
fn is_present(word: *mut u64) -> bool {
    let mut present = 0;
    // SAFETY: asks about a mapped page; one byte is written.
    let result = unsafe { libc::mincore(word.cast(), PAGE_SIZE, &raw mut present) };
    assert_eq!(result, 0, "a mapped page can be asked for");
    present & 1 != 0
}

#[test]
fn only_what_is_registered_all_over_counts_as_registered() {
    // In a process of its own: other tests' threads would map their stacks in the gap.
    // SAFETY: the child runs the test and exits without destructors.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            let passed = std::panic::catch_unwind(look_at_a_gap).is_ok();
            libc::_exit(i32::from(!passed));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    };
    assert_eq!(status, 0);
}

fn look_at_a_gap() {
    let Some((uffd, _owner)) = open(FEATURE_WRITE_PROTECT) else {
        return;
    };
    let memory = Memory::map();
    let (start, page) = (memory.address(0), PAGE_SIZE as u64);
    assert!(!uffd.is_registered(start, LENGTH));
    uffd.register_protectable(start, LENGTH)
        .expect("new memory can be registered");
    assert!(uffd.is_registered(start, LENGTH));
    assert!(uffd.is_registered(memory.address(3), page));
    // SAFETY: part of the test's own mapping, which nothing points into.
    let unmapped = unsafe { libc::munmap(memory.word(8).cast(), 4 * PAGE_SIZE) };
    assert_eq!(unmapped, 0);
    assert!(!uffd.is_registered(start, LENGTH), "there is a gap");
    assert!(uffd.is_registered(start, 8 * page));
    uffd.register_protectable(start, LENGTH)
        .expect("the kernel registers what there is");
    assert!(!uffd.is_registered(start, LENGTH), "there still is");
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: fills the gap just made.
    let filled = unsafe {
        libc::mmap(
            memory.word(8).cast(),
            4 * PAGE_SIZE,
            libc::PROT_READ,
            flags,
            -1,
            0,
        )
    };
    assert_eq!(filled, memory.word(8).cast());
    assert!(!uffd.is_registered(start, LENGTH), "what fills it is not");
    assert!(!uffd.is_registered(memory.address(9), page));
}

#[test]
fn a_target_that_is_taken_is_told() {
    let Some((uffd, _owner)) = open(FEATURE_MOVE) else {
        return;
    };
    let (home, away) = (Memory::map(), Memory::map());
    for (word, memory) in [(1, &home), (2, &away)] {
        // SAFETY: the page is mapped, and not registered yet.
        unsafe { memory.word(0).write_volatile(word) };
    }
    uffd.register(away.address(0), LENGTH)
        .expect("new memory can be registered");
    let moved = uffd.move_pages(away.address(0), home.address(0), PAGE_SIZE as u64);
    assert_eq!(
        moved,
        Err(Partial {
            done: 0,
            errno: Errno::EEXIST
        })
    );
    // SAFETY: both pages are there.
    let words = unsafe { (home.word(0).read_volatile(), away.word(0).read_volatile()) };
    assert_eq!(words, (1, 2));
}
