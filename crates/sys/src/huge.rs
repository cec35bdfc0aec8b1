//! Huge pages: asked for, and split, on purpose only.

use crate::PAGE_SIZE;
use crate::memory::{advise, discard};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Bytes of a huge page.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Keeps the system from backing a range with huge pages of its own accord.
///
/// # Safety
/// The page-aligned range lies in one [`Mapping`](crate::memory::Mapping).
pub unsafe fn forbid_huge(start: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise; contents stay.
    unsafe { advise(start, length, libc::MADV_NOHUGEPAGE) }
}

/// Backs [`HUGE_PAGE_SIZE`] bytes, aligned to that and without memory, with one huge page of zeros,
/// and says what processor time that took. `None`, and still no memory, if the system has none to
/// give. The range is left as [`forbid_huge`] does, so that the system never fills it up again once
/// parts were given back.
///
/// # Safety
/// The range lies in one [`Mapping`](crate::memory::Mapping) and nobody uses it.
pub unsafe fn populate_huge(start: NonNull<u8>) -> Option<Duration> {
    debug_assert!(start.addr().get().is_multiple_of(HUGE_PAGE_SIZE));
    let before = thread_time();
    // SAFETY: the caller's promise for all of this; the pages read as zero before and after.
    unsafe {
        advise(start, HUGE_PAGE_SIZE, libc::MADV_HUGEPAGE).ok()?;
        start.write_volatile(0);
        let forbidden = forbid_huge(start, HUGE_PAGE_SIZE).is_ok();
        // Only the first byte was touched: if the next page is there, it came with it.
        let mut there = 0_u8;
        let next = start.add(PAGE_SIZE).as_ptr().cast();
        let huge = libc::mincore(next, PAGE_SIZE, &raw mut there) == 0 && there & 1 == 1;
        if huge && forbidden {
            return Some(thread_time().saturating_sub(before));
        }
        // The range has at most what was touched here; if even this fails, that stays.
        let _ = discard(start, HUGE_PAGE_SIZE);
        None
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists, and the place is this function's own.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Asks the system for huge pages, as long as they come at less than small ones cost.
///
/// Where there are none, asking costs some microseconds; where the system must move other memory
/// first, or the host of a virtual machine must find each small page of a huge one, milliseconds. So
/// after an attempt that failed or was slow, some are left out: one at first, then four times as many
/// each time.
#[derive(Debug, Default)]
pub struct HugePages {
    /// Attempts to leave out before the next.
    left_out: AtomicU32,
    /// Attempts that were left out after the last; zero if that went well.
    pause: AtomicU32,
}

impl HugePages {
    /// As many small pages take as long, at one to two microseconds each.
    const SLOW: Duration = Duration::from_millis(1);
    const LONGEST_PAUSE: u32 = 64;

    /// None asked for yet.
    pub const fn new() -> Self {
        Self {
            left_out: AtomicU32::new(0),
            pause: AtomicU32::new(0),
        }
    }

    /// Does as [`populate_huge`], unless this attempt is left out. `false`, and still no memory, if
    /// so or if there is no huge page to be had.
    ///
    /// # Safety
    /// The range lies in one [`Mapping`](crate::memory::Mapping) and nobody uses it.
    pub unsafe fn populate(&self, start: NonNull<u8>) -> bool {
        // SAFETY: the caller's promise.
        self.attempt(|| unsafe { populate_huge(start) })
    }

    /// Makes an attempt if it is time for one. Approximate where threads meet.
    fn attempt(&self, attempt: impl FnOnce() -> Option<Duration>) -> bool {
        let left_out = self.left_out.load(Ordering::Relaxed);
        if left_out > 0 {
            self.left_out.store(left_out - 1, Ordering::Relaxed);
            return false;
        }
        let took = attempt();
        let pause = match took {
            Some(took) if took < Self::SLOW => 0,
            _ => (self.pause.load(Ordering::Relaxed) * 4).clamp(1, Self::LONGEST_PAUSE),
        };
        self.pause.store(pause, Ordering::Relaxed);
        self.left_out.store(pause, Ordering::Relaxed);
        took.is_some()
    }
}

/// Splits the huge page, if it is one, that a page lies in, so that parts of it go back to the
/// system when they are discarded: they would stay in use by the whole otherwise.
///
/// # Safety
/// The page lies in a [`Mapping`](crate::memory::Mapping).
pub unsafe fn split_huge(page: NonNull<u8>) -> io::Result<()> {
    // The system splits a huge page when a part of it is said to be cold.
    // SAFETY: the caller's promise; contents stay.
    unsafe {
        if advise(page, PAGE_SIZE, libc::MADV_COLD).is_ok() {
            return Ok(());
        }
        // It says so of no memory that is locked.
        if libc::munlock(page.as_ptr().cast(), PAGE_SIZE) != 0 {
            return Err(io::Error::last_os_error());
        }
        let split = advise(page, PAGE_SIZE, libc::MADV_COLD);
        // Locking is a precaution of the whole process's; this page alone may do without.
        let _ = libc::mlock2(page.as_ptr().cast(), PAGE_SIZE, libc::MLOCK_ONFAULT);
        split
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Mapping, discard_all};

    /// A figure of the mapping that begins at `start`, in KiB.
    fn smaps(start: NonNull<u8>, key: &str) -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps").expect("smaps can be read");
        let of_mapping = |line: &&str| line.starts_with(&format!("{:x}-", start.addr()));
        let mut lines = text.lines().skip_while(|line| !of_mapping(line));
        let line = lines
            .find(|line| line.starts_with(key))
            .expect("the figure is there");
        let figure = line.split_whitespace().nth(1).expect("a line has a figure");
        figure.parse().expect("it is a number")
    }

    fn huge_pages_split() -> u64 {
        let text = std::fs::read_to_string("/proc/vmstat").expect("vmstat can be read");
        let line = text
            .lines()
            .find(|line| line.starts_with("thp_split_page "));
        let figure = line.and_then(|line| line.split_whitespace().nth(1));
        figure.map_or(0, |figure| figure.parse().expect("it is a number"))
    }

    /// Two huge pages, aligned, in a mapping of their own.
    fn aligned() -> (Mapping, NonNull<u8>) {
        let mapping = Mapping::anonymous(4 * HUGE_PAGE_SIZE).expect("memory can be mapped");
        let offset = mapping.start().align_offset(HUGE_PAGE_SIZE);
        // SAFETY: the offset is below a huge page.
        let start = unsafe { mapping.start().add(offset) };
        // SAFETY: what is left before `start` is the mapping's; taking its access away makes the
        // rest a mapping of its own in the eyes of the system.
        unsafe { libc::mprotect(mapping.start().as_ptr().cast(), offset, libc::PROT_NONE) };
        (mapping, start)
    }

    #[test]
    fn a_huge_page_comes_whole_and_goes_in_parts() {
        let (_mapping, start) = aligned();
        // SAFETY: the range is this test's own.
        unsafe {
            forbid_huge(start, 2 * HUGE_PAGE_SIZE).expect("the system knows huge pages");
            if populate_huge(start).is_none() {
                assert_eq!(smaps(start, "Rss:"), 0);
                eprintln!("SKIPPED: this host has no huge page to give");
                return;
            }
            assert_eq!(smaps(start, "AnonHugePages:"), 2048);
            start.write_bytes(7, HUGE_PAGE_SIZE);
            let splits = huge_pages_split();
            split_huge(start).expect("a huge page can be split");
            assert!(huge_pages_split() > splits, "it was only mapped in parts");
            // Every second page goes.
            let pages = (0..HUGE_PAGE_SIZE / PAGE_SIZE / 2)
                .map(|pair| (start.add(2 * pair * PAGE_SIZE), PAGE_SIZE));
            discard_all(pages).expect("memory can be given back");
            assert_eq!(
                (smaps(start, "Rss:"), smaps(start, "AnonHugePages:")),
                (1024, 0)
            );
            for page in 0..HUGE_PAGE_SIZE / PAGE_SIZE {
                let expected = if page % 2 == 0 { 0 } else { 7 };
                assert_eq!(start.add(page * PAGE_SIZE + 9).read(), expected);
            }
            discard(start, HUGE_PAGE_SIZE).expect("memory can be given back");
            assert!(populate_huge(start).is_some(), "it can be filled again");
            // Locked memory is split too.
            libc::mlock2(start.as_ptr().cast(), HUGE_PAGE_SIZE, libc::MLOCK_ONFAULT);
            split_huge(start).expect("a locked huge page can be split");
            discard(start, HUGE_PAGE_SIZE / 2).expect("memory can be given back");
            libc::munlock(start.as_ptr().cast(), HUGE_PAGE_SIZE);
            assert_eq!(
                (smaps(start, "Rss:"), smaps(start, "AnonHugePages:")),
                (1024, 0)
            );
        }
    }

    #[test]
    fn attempts_that_fail_or_are_slow_are_repeated_less_and_less_often() {
        let fast = Some(Duration::from_micros(100));
        for bad in [None, Some(Duration::from_millis(2))] {
            let pages = HugePages::new();
            let made = |outcome: Option<Duration>, requests: usize| {
                let mut made = 0;
                for _ in 0..requests {
                    let before = made;
                    let given = pages.attempt(|| {
                        made += 1;
                        outcome
                    });
                    assert_eq!(given, made > before && outcome.is_some());
                }
                made
            };
            // One, and then after 1, 4 and 16 left out.
            assert_eq!(made(bad, 1 + 2 + 5 + 17), 4);
            assert!(made(bad, 6_500) < 110);
            assert!(made(fast, 1_000) > 900);
        }
    }
}
