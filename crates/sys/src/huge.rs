//! Huge pages: asked for, and split, on purpose only.
//!
//! PMD-sized huge pages (2 MiB) and, where enabled, mTHP from 64 KiB up. No single entry of the page table
//! maps an mTHP, but to fault it in and to free it costs a fraction of its base pages, and it is available
//! where memory is too fragmented for 2 MiB, or where a virtual machine's host would have to find 2 MiB.

use crate::PAGE_SIZE;
use crate::memory::{advise, discard};
use crate::sync::lock;
use std::io;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Bytes of the largest huge page.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Bytes of the smallest that is worth asking for.
pub const LEAST_HUGE_SIZE: usize = 64 << 10;

const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// Which mappings get THP, of all sizes or of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// All, advised or not.
    Always,
    /// Those advised with `MADV_HUGEPAGE`.
    Madvise,
    /// For this size, as the global setting.
    Inherit,
    /// None.
    Never,
}

impl Setting {
    const ALL: [Self; 4] = [Self::Always, Self::Madvise, Self::Inherit, Self::Never];

    /// The kernel's word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Madvise => "madvise",
            Self::Inherit => "inherit",
            Self::Never => "never",
        }
    }

    /// The setting in a file of sysfs; `None` if the file is missing or not understood.
    pub fn read(file: &str) -> Option<Self> {
        let settings = std::fs::read_to_string(file).ok()?;
        let chosen = settings.split(['[', ']']).nth(1)?;
        Self::ALL
            .into_iter()
            .find(|setting| setting.word() == chosen)
    }

    /// The setting for all sizes that have none of their own.
    pub fn global() -> Option<Self> {
        Self::read(&format!("{SETTINGS}/enabled"))
    }
}

/// The file with the [`Setting`] for huge pages of `size` bytes.
pub fn setting_of(size: usize) -> String {
    format!("{SETTINGS}/hugepages-{}kB/enabled", size >> 10)
}

/// Bytes of the huge pages to ask for: the smallest size from 64 KiB that is enabled for
/// `MADV_HUGEPAGE`, as a small one wastes less memory, otherwise 2 MiB. Reads the settings.
pub fn size_to_ask_for() -> usize {
    let may_ask = |size: &usize| match Setting::read(&setting_of(*size)) {
        Some(Setting::Inherit) => Setting::global() != Some(Setting::Never),
        setting => matches!(setting, Some(Setting::Always | Setting::Madvise)),
    };
    let sizes = std::iter::successors(Some(LEAST_HUGE_SIZE), |size| Some(size * 2));
    sizes
        .take_while(|size| *size < HUGE_PAGE_SIZE)
        .find(may_ask)
        .unwrap_or(HUGE_PAGE_SIZE)
}

/// Keeps khugepaged and the page fault handler from backing a range with huge pages.
///
/// # Safety
/// The page-aligned range lies in one [`Mapping`](crate::memory::Mapping).
pub unsafe fn forbid_huge(start: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise; contents stay.
    unsafe { advise(start, length, libc::MADV_NOHUGEPAGE) }
}

/// Backs `size` bytes, aligned to that and without memory, with one huge page of zeros, and returns
/// the CPU time that took. `None`, and still no memory, if the kernel has none to give. The range is left
/// as [`forbid_huge`] leaves it, so that khugepaged never fills it up again once parts were given back.
///
/// # Safety
/// The range lies in one [`Mapping`](crate::memory::Mapping) and is not in use. No other thread populates
/// a part of the same [`HUGE_PAGE_SIZE`] meanwhile: the kernel might back both with one page.
unsafe fn populate_huge(start: NonNull<u8>, size: usize) -> Option<Duration> {
    debug_assert!(start.addr().get().is_multiple_of(size) && size <= HUGE_PAGE_SIZE);
    let before = thread_time();
    // SAFETY: the caller's promise for all of this; the pages read as zero before and after.
    unsafe {
        let asked = advise(start, size, libc::MADV_HUGEPAGE).is_ok();
        if asked {
            start.write_volatile(0);
        }
        // Asking may have failed for a part only.
        let forbidden = forbid_huge(start, size).is_ok();
        // Only the first byte was touched: if all pages are there, they came with it.
        let mut there = [0_u8; HUGE_PAGE_SIZE / PAGE_SIZE];
        let known = libc::mincore(start.as_ptr().cast(), size, there.as_mut_ptr()) == 0;
        let mut pages = there.iter().take(size / PAGE_SIZE);
        if asked && known && forbidden && pages.all(|page| page & 1 == 1) {
            return Some(thread_time().saturating_sub(before));
        }
        // The range has at most what was touched here; if even this fails, that stays.
        let _ = discard(start, size);
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

/// Asks for huge pages, as long as they cost less than base pages.
///
/// Where there are none, asking costs some microseconds; where the kernel must compact memory
/// first, or the host of a virtual machine must find each small page of a huge one, milliseconds. So
/// after an attempt that failed or was slow, some are left out: one at first, then four times as many
/// each time.
#[derive(Debug, Default)]
pub struct HugePages {
    /// Held by the thread that asks for one smaller than [`HUGE_PAGE_SIZE`].
    asking: Mutex<()>,
    /// Attempts to leave out before the next.
    left_out: AtomicU32,
    /// Attempts that were left out after the last; zero if that went well.
    pause: AtomicU32,
}

impl HugePages {
    /// More for each small page is slow: of one of 2 MiB, for which small ones cost one to two.
    const SLOW_PAGE: Duration = Duration::from_micros(2);
    /// Of smaller ones, which take up to two.
    const SLOW_PAGE_OF_SMALLER: Duration = Duration::from_micros(5);
    const LONGEST_PAUSE: u32 = 64;

    /// None asked for yet.
    pub const fn new() -> Self {
        Self {
            asking: Mutex::new(()),
            left_out: AtomicU32::new(0),
            pause: AtomicU32::new(0),
        }
    }

    /// Backs `size` bytes, aligned to that and without memory, with one huge page of zeros, unless
    /// this attempt is left out. `false`, and still no memory, if so or if there is none to be had.
    /// The range is left as [`forbid_huge`] does.
    ///
    /// # Safety
    /// The range lies in one [`Mapping`](crate::memory::Mapping), all of which is populated through
    /// this value only, and is not in use. `size` is a power of two from two pages to
    /// [`HUGE_PAGE_SIZE`].
    pub unsafe fn populate(&self, start: NonNull<u8>, size: usize) -> bool {
        self.attempt(size, || {
            // SAFETY: the caller's promise.
            unsafe { self.populate_now(start, size) }
        })
    }

    /// Does so whatever it costs, and returns the CPU time; for measurements.
    ///
    /// # Safety
    /// As [`HugePages::populate`].
    pub unsafe fn populate_now(&self, start: NonNull<u8>, size: usize) -> Option<Duration> {
        // The largest, aligned, cannot reach into each other.
        let _alone = (size < HUGE_PAGE_SIZE).then(|| lock(&self.asking));
        // SAFETY: the caller's promise; no other thread populates what could be one page with it, see above.
        unsafe { populate_huge(start, size) }
    }

    /// Makes an attempt if it is time for one. Approximate where threads meet.
    fn attempt(&self, size: usize, attempt: impl FnOnce() -> Option<Duration>) -> bool {
        let left_out = self.left_out.load(Ordering::Relaxed);
        if left_out > 0 {
            self.left_out.store(left_out - 1, Ordering::Relaxed);
            return false;
        }
        let took = attempt();
        let slow_page = match size {
            HUGE_PAGE_SIZE => Self::SLOW_PAGE,
            _ => Self::SLOW_PAGE_OF_SMALLER,
        };
        let slow = slow_page * (size / PAGE_SIZE) as u32;
        let pause = match took {
            Some(took) if took < slow => 0,
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
    // The kernel splits a huge page of which a part is advised to be cold.
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

    /// How many PMD-sized huge pages the kernel has split.
    fn largest_split() -> u64 {
        let text = std::fs::read_to_string("/proc/vmstat").expect("vmstat can be read");
        let line = text
            .lines()
            .find(|line| line.starts_with("thp_split_page "));
        let figure = line.and_then(|line| line.split_whitespace().nth(1));
        figure.map_or(0, |figure| figure.parse().expect("it is a number"))
    }

    /// How many huge pages of 64 KiB it has split, if it counts them.
    fn least_split() -> Option<u64> {
        let file = setting_of(LEAST_HUGE_SIZE).replace("enabled", "stats/split");
        let text = std::fs::read_to_string(file).ok()?;
        Some(text.trim().parse().expect("it is a number"))
    }

    /// Enables huge pages of a size until it is dropped.
    struct Allowed(String, Setting);

    impl Allowed {
        /// `None` if the kernel has no such size, or this user may not set it.
        fn new(size: usize) -> Option<Self> {
            let file = setting_of(size);
            let before = Setting::read(&file)?;
            std::fs::write(&file, Setting::Madvise.word()).ok()?;
            Some(Self(file, before))
        }
    }

    impl Drop for Allowed {
        fn drop(&mut self) {
            std::fs::write(&self.0, self.1.word()).expect("what could be set can be set back");
        }
    }

    /// Two huge pages, aligned, in a mapping of their own.
    fn aligned() -> (Mapping, NonNull<u8>) {
        let mapping = Mapping::anonymous(4 * HUGE_PAGE_SIZE).expect("memory can be mapped");
        let offset = mapping.start().align_offset(HUGE_PAGE_SIZE);
        // SAFETY: the offset is below a huge page.
        let start = unsafe { mapping.start().add(offset) };
        // SAFETY: what is left before `start` is the mapping's; taking its access away makes the
        // rest a VMA of its own.
        unsafe { libc::mprotect(mapping.start().as_ptr().cast(), offset, libc::PROT_NONE) };
        (mapping, start)
    }

    #[test]
    fn a_huge_page_comes_whole_and_goes_in_parts() {
        comes_whole_and_goes_in_parts(HUGE_PAGE_SIZE, largest_split);
    }

    #[test]
    fn so_does_a_small_one_of_them() {
        let allowed = least_split().and_then(|_| Allowed::new(LEAST_HUGE_SIZE));
        let Some(_allowed) = allowed else {
            memfold_testing::skip("root, or Linux 6.11 to count huge pages of 64 KiB");
            return;
        };
        assert_eq!(size_to_ask_for(), LEAST_HUGE_SIZE);
        let split = || least_split().expect("they are counted");
        comes_whole_and_goes_in_parts(LEAST_HUGE_SIZE, split);
    }

    fn comes_whole_and_goes_in_parts(size: usize, huge_pages_split: impl Fn() -> u64) {
        let (_mapping, start) = aligned();
        let pages = HugePages::new();
        // SAFETY: the range is this test's own.
        unsafe {
            forbid_huge(start, 2 * HUGE_PAGE_SIZE).expect("the kernel has huge pages");
            if pages.populate_now(start, size).is_none() {
                assert_eq!(smaps(start, "Rss:"), 0);
                memfold_testing::skip("huge pages to give");
                return;
            }
            // Smaller ones are not mapped as one.
            let mapped_as_one = if size == HUGE_PAGE_SIZE {
                size >> 10
            } else {
                0
            };
            assert_eq!(
                (smaps(start, "Rss:"), smaps(start, "AnonHugePages:")),
                (size >> 10, mapped_as_one)
            );
            start.write_bytes(7, size);
            let splits = huge_pages_split();
            split_huge(start).expect("a huge page can be split");
            assert!(huge_pages_split() > splits, "it was only mapped in parts");
            // Every second page goes.
            let small = size / PAGE_SIZE;
            let every_second =
                (0..small / 2).map(|pair| (start.add(2 * pair * PAGE_SIZE), PAGE_SIZE));
            discard_all(every_second).expect("memory can be given back");
            assert_eq!(
                (smaps(start, "Rss:"), smaps(start, "AnonHugePages:")),
                (size >> 11, 0)
            );
            for page in 0..small {
                let expected = if page % 2 == 0 { 0 } else { 7 };
                assert_eq!(start.add(page * PAGE_SIZE + 9).read(), expected);
            }
            discard(start, size).expect("memory can be given back");
            let again = pages.populate_now(start, size);
            assert!(again.is_some(), "it can be filled again");
            // Locked memory is split too.
            libc::mlock2(start.as_ptr().cast(), size, libc::MLOCK_ONFAULT);
            split_huge(start).expect("a locked huge page can be split");
            discard(start, size / 2).expect("memory can be given back");
            libc::munlock(start.as_ptr().cast(), size);
            assert_eq!(
                (smaps(start, "Rss:"), smaps(start, "AnonHugePages:")),
                (size >> 11, 0)
            );
        }
    }

    #[test]
    fn settings_are_what_stands_in_brackets() {
        let file = std::env::temp_dir().join(format!("memfold-huge-{}", std::process::id()));
        let path = file.to_string_lossy();
        for (text, setting) in [
            ("[always] madvise never", Some(Setting::Always)),
            ("always [madvise] never", Some(Setting::Madvise)),
            ("always [inherit] madvise never", Some(Setting::Inherit)),
            ("always inherit madvise [never]", Some(Setting::Never)),
            ("always [sometimes]", None),
            ("", None),
        ] {
            std::fs::write(&file, text).expect("a file can be written");
            assert_eq!(Setting::read(&path), setting, "{text}");
        }
        std::fs::remove_file(&file).expect("it was written");
        assert_eq!(Setting::read(&path), None);
    }

    #[test]
    fn attempts_that_fail_or_are_slow_are_repeated_less_and_less_often() {
        let fast = Some(Duration::from_micros(50));
        let slow = Some(Duration::from_millis(2));
        for (size, bad) in [
            (HUGE_PAGE_SIZE, None),
            (HUGE_PAGE_SIZE, slow),
            (LEAST_HUGE_SIZE, slow),
        ] {
            let pages = HugePages::new();
            let made = |outcome: Option<Duration>, requests: usize| {
                let mut made = 0;
                for _ in 0..requests {
                    let before = made;
                    let given = pages.attempt(size, || {
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
