//! What another process's page tables say: which pages are in memory, and which it shares.

use super::Inspector;
use crate::PAGE_SIZE;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Whether this kernel answers which pages of a range are in memory (`PAGEMAP_SCAN`, Linux 6.7). Without it, the page map is
/// read page by page.
pub fn kernel_scans() -> bool {
    scans_for(0)
}

/// Whether it answers where guard regions are (`PAGE_IS_GUARD`, Linux 6.16).
pub fn kernel_shows_guards() -> bool {
    scans_for(GUARD)
}

/// The kernel refuses kinds of pages that it does not know.
fn scans_for(kinds: u64) -> bool {
    let mut scan = ScanArgument {
        size: size_of::<ScanArgument>() as u64,
        category_any_of: kinds,
        return_mask: kinds,
        ..ScanArgument::default()
    };
    // SAFETY: an empty range, and a live structure that names no other memory.
    File::open("/proc/self/pagemap").is_ok_and(|pagemap| unsafe {
        libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) == 0
    })
}

const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
/// `PAGE_IS_FILE`: a page of a file or of shared memory.
const FILE: u64 = 1 << 2;
/// `PAGE_IS_PRESENT`.
const PRESENT: u64 = 1 << 3;
/// `PAGE_IS_SWAPPED`: in the kernel's own swap.
const SWAPPED: u64 = 1 << 4;
/// `PAGE_IS_PFNZERO`: the page of zeros that all programs share, which is no one's memory.
const ZERO: u64 = 1 << 5;
/// `PAGE_IS_GUARD` (Linux 6.16).
const GUARD: u64 = 1 << 8;

/// `PAGE_IS_ACCESSED` (Linux 7.3): accessed since it was tracked, or not tracked as yet.
const ACCESSED: u64 = 1 << 9;

/// What the entry of a page says (Documentation/admin-guide/mm/pagemap.rst).
const FRAME: u64 = (1 << 55) - 1;
const MAPPED_ONCE: u64 = 1 << 56;
const PROTECTED: u64 = 1 << 57;
const OF_FILE: u64 = 1 << 61;
const IN_SWAP: u64 = 1 << 62;
const IN_MEMORY: u64 = 1 << 63;

/// Which pages a scan looks for, by their categories.
#[derive(Clone, Copy)]
struct Wanted {
    all: u64,
    none: u64,
    any: u64,
}

impl Wanted {
    const fn any_of(categories: u64) -> Wanted {
        Wanted {
            all: 0,
            none: 0,
            any: categories,
        }
    }
}

const ANONYMOUS: Wanted = Wanted {
    all: PRESENT,
    none: FILE | ZERO,
    any: 0,
};

/// Anonymous pages that other processes map as well.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedFrames {
    /// Their number.
    pub pages: u64,
    /// How many of them no userfaultfd protects from writes, which break the sharing unseen.
    pub unprotected: u64,
    /// The numbers of their frames are not shown, which takes `CAP_SYS_ADMIN`.
    pub are_hidden: bool,
    /// Where they are, as `(start, end)` in order. What is near is in one range with what is between.
    pub places: Vec<(u64, u64)>,
}

impl SharedFrames {
    /// Notes a page with an entry that says that it is shared.
    fn note(&mut self, at: u64, entry: u64, frames: &mut Vec<u64>) {
        self.pages += 1;
        self.unprotected += u64::from(entry & PROTECTED == 0);
        match entry & FRAME {
            0 => self.are_hidden = true,
            frame => frames.push(frame),
        }
        let page = (at, at + PAGE_SIZE as u64);
        match self.places.last_mut() {
            Some(last) if are_near(last, &page) => last.1 = page.1,
            _ => self.places.push(page),
        }
    }
}

impl Inspector {
    /// The runs `(start, end)` of pages of the range that are in memory (or in the kernel's own
    /// swap).
    pub fn present(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        match self.scan(start, end, Wanted::any_of(PRESENT | SWAPPED)) {
            // Before Linux 6.7.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                self.present_by_entries(start, end)
            }
            present => present,
        }
    }

    /// The same by the page map's entries, of eight bytes a page.
    fn present_by_entries(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        self.each_entry((start, end), &mut new_entries(), |at, entry| {
            let next = at + PAGE_SIZE as u64;
            if entry & (IN_MEMORY | IN_SWAP) != 0 {
                match found.last_mut() {
                    Some((_, last)) if *last == at => *last = next,
                    _ => found.push((at, next)),
                }
            }
        })?;
        Ok(found)
    }

    /// Calls `look` with each page's address and entry. `entries` is room for some.
    fn each_entry(
        &self,
        (start, end): (u64, u64),
        entries: &mut [u8],
        mut look: impl FnMut(u64, u64),
    ) -> io::Result<()> {
        let page = PAGE_SIZE as u64;
        let mut at = start;
        while at < end {
            let wanted = ((end - at).div_ceil(page) as usize * ENTRY).min(entries.len());
            let offset = at / page * ENTRY as u64;
            let read = rustix::io::pread(&self.pagemap, &mut entries[..wanted], offset)?;
            if read < ENTRY {
                // Behind the last address that a program can have, or it is gone.
                break;
            }
            for entry in entries[..read].chunks_exact(ENTRY) {
                look(
                    at,
                    u64::from_ne_bytes(entry.try_into().expect("chunks of that size")),
                );
                at += page;
            }
        }
        Ok(())
    }

    /// Looks for the anonymous pages of the ranges `(start, end)` that other processes map as well, and appends the number of
    /// each one's frame, if the kernel shows it, to `frames`. The kernel walks the page tables of these ranges, and of
    /// what is between near ones.
    ///
    /// # Errors
    /// If the process is gone, and before Linux 6.7 (`ENOTTY`).
    pub fn shared_frames(
        &self,
        ranges: &[(u64, u64)],
        frames: &mut Vec<u64>,
    ) -> io::Result<SharedFrames> {
        let mut found = SharedFrames::default();
        let mut regions = new_regions();
        let mut entries = new_entries();
        let mut runs = Vec::new();
        for range in ranges.chunk_by(are_near) {
            runs.clear();
            self.scan_into(around(range), ANONYMOUS, &mut regions, &mut runs)?;
            for near in runs.chunk_by(are_near) {
                let mut rest = near;
                self.each_entry(around(near), &mut entries, |at, entry| {
                    while rest.first().is_some_and(|(_, end)| *end <= at) {
                        rest = &rest[1..];
                    }
                    let is_wanted = rest.first().is_some_and(|(start, _)| *start <= at);
                    // It may have changed since the scan.
                    if is_wanted && entry & (IN_MEMORY | OF_FILE | MAPPED_ONCE) == IN_MEMORY {
                        found.note(at, entry, frames);
                    }
                })?;
            }
        }
        Ok(found)
    }

    /// The runs `(start, end)` of pages of the range that are the kernel's page of zeros: they were read, and never written.
    ///
    /// # Errors
    /// If the process is gone, and before Linux 6.7 (`ENOTTY`).
    pub fn runs_of_zeros(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        self.scan(start, end, Wanted::any_of(ZERO))
    }

    /// The runs `(start, end)` of pages of the range that are there, in memory whose accesses are tracked
    /// ([`Uffd::track`](crate::uffd::Uffd::track)), and were accessed since, or came since.
    ///
    /// # Errors
    /// If the process is gone, and before Linux 7.3 (`EINVAL`).
    pub fn runs_of_accessed(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        const WANTED: Wanted = Wanted {
            all: PRESENT | ACCESSED,
            none: 0,
            any: 0,
        };
        self.scan(start, end, WANTED)
    }

    /// The guard regions (`MADV_GUARD_INSTALL`) in a range, as `(start, end)`. None where the kernel
    /// does not report them (before Linux 6.16).
    pub fn guards(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        match self.scan(start, end, Wanted::any_of(GUARD)) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
                Ok(Vec::new())
            }
            guards => guards,
        }
    }

    /// The runs of pages of the range that are wanted.
    fn scan(&self, start: u64, end: u64, wanted: Wanted) -> io::Result<Vec<(u64, u64)>> {
        let mut found = Vec::new();
        self.scan_into((start, end), wanted, &mut new_regions(), &mut found)?;
        Ok(found)
    }

    /// The same, appended to `found`. `regions` is room for some.
    fn scan_into(
        &self,
        (start, end): (u64, u64),
        wanted: Wanted,
        regions: &mut [PageRegion],
        found: &mut Vec<(u64, u64)>,
    ) -> io::Result<()> {
        let mut from = start;
        while from < end {
            let mut scan = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start: from,
                end,
                vector: regions.as_mut_ptr() as u64,
                vector_length: regions.len() as u64,
                category_inverted: wanted.none,
                category_mask: wanted.all | wanted.none,
                category_any_of: wanted.any,
                return_mask: wanted.all | wanted.any,
                ..ScanArgument::default()
            };
            // SAFETY: the structure and the vector it names are live and of those sizes.
            let filled =
                unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
            if filled < 0 {
                return Err(io::Error::last_os_error());
            }
            let filled = &regions[..filled as usize];
            found.extend(filled.iter().map(|region| (region.start, region.end)));
            if scan.walk_end <= from {
                break;
            }
            from = scan.walk_end;
        }
        Ok(())
    }
}

/// Whether one call of the kernel for both ranges, and what is between them, takes it less time than two.
fn are_near((_, end): &(u64, u64), (start, _): &(u64, u64)) -> bool {
    *start < end + NEAR
}

/// What ranges in order are in.
fn around(ranges: &[(u64, u64)]) -> (u64, u64) {
    let start = ranges.first().map_or(0, |(start, _)| *start);
    let end = ranges.last().map_or(0, |(_, end)| *end);
    (start, end)
}

/// More bytes take longer to walk than a call of the kernel.
const NEAR: u64 = 64 * PAGE_SIZE as u64;

/// Bytes of a page's entry in the page map.
const ENTRY: usize = size_of::<u64>();
/// Entries and runs of pages that are asked for at once. More take more memory and fewer calls of the kernel.
const AT_ONCE: usize = 512;

fn new_entries() -> Vec<u8> {
    vec![0; AT_ONCE * ENTRY]
}

fn new_regions() -> Vec<PageRegion> {
    vec![PageRegion::default(); AT_ONCE]
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_length: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of: u64,
    return_mask: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{read_write, same_layout};
    use crate::process::own_id;
    use linux_raw_sys::general::{self, page_region, pm_scan_arg};

    #[test]
    fn a_scan_has_the_kernels_layout() {
        same_layout!(PageRegion, page_region, {
            start => start, end => end, categories => categories,
        });
        same_layout!(ScanArgument, pm_scan_arg, {
            size => size, flags => flags, start => start, end => end, walk_end => walk_end,
            vector => vec, vector_length => vec_len, max_pages => max_pages,
            category_inverted => category_inverted, category_mask => category_mask,
            category_any_of => category_anyof_mask, return_mask => return_mask,
        });
        let theirs = [
            general::PAGE_IS_FILE,
            general::PAGE_IS_PRESENT,
            general::PAGE_IS_SWAPPED,
            general::PAGE_IS_PFNZERO,
            general::PAGE_IS_GUARD,
        ];
        assert_eq!([FILE, PRESENT, SWAPPED, ZERO, GUARD], theirs.map(u64::from));
        // The number of `/proc/PID/pagemap` in linux/fs.h.
        let scan = read_write(b'f', 16, size_of::<pm_scan_arg>());
        assert_eq!(PAGEMAP_SCAN as u32 as usize, scan);
    }

    /// Both ways that tell which pages are in memory, of holes, pages of zeros and written ones.
    #[test]
    fn present_pages_are_the_same_without_a_scan() {
        const PAGES: usize = 1200;
        let process = crate::process::Process::open(own_id()).unwrap();
        let inspector = Inspector::open(&std::sync::Arc::new(process), own_id()).unwrap();
        let mapping = crate::memory::Mapping::anonymous(PAGES * PAGE_SIZE).unwrap();
        let start = mapping.start().as_ptr();
        let mut expected = 0;
        for page in (0..PAGES).filter(|page| page % 7 < 3 && page % 640 < 500) {
            // SAFETY: within a live mapping that nothing else uses.
            unsafe {
                let word = start.add(page * PAGE_SIZE);
                match page % 7 {
                    0 => _ = word.read_volatile(),
                    _ => word.write_volatile(1),
                }
            }
            expected += 1;
        }
        let start = start as u64;
        let end = start + (PAGES * PAGE_SIZE) as u64;
        let present = inspector.present_by_entries(start, end).unwrap();
        let bytes: u64 = present.iter().map(|(start, end)| end - start).sum();
        if crate::huge::Setting::global() != Some(crate::huge::Setting::Always) {
            assert_eq!(bytes, expected * PAGE_SIZE as u64);
        }
        assert!(bytes > 0 && present.is_sorted());
        let part = |(from, to): (u64, u64)| inspector.present_by_entries(from, to).unwrap();
        assert_eq!(part((start, start)), []);
        assert_eq!(part(present[0]), [present[0]]);
        if !kernel_scans() {
            memfold_testing::skip("PAGEMAP_SCAN (Linux 6.7)");
            return;
        }
        let scanned = inspector
            .scan(start, end, Wanted::any_of(PRESENT | SWAPPED))
            .unwrap();
        assert_eq!(scanned, present);
    }

    /// Of pages of zeros, own ones and ones that a child shares.
    #[test]
    fn what_a_child_maps_as_well_is_shared() {
        const PAGES: usize = 64;
        const TOUCHED: usize = 40;
        const WRITTEN: usize = 7;
        let process = std::sync::Arc::new(crate::process::Process::open(own_id()).unwrap());
        let inspector = Inspector::open(&process, own_id()).unwrap();
        let mapping = crate::memory::Mapping::anonymous(PAGES * PAGE_SIZE).unwrap();
        let start = mapping.start().as_ptr();
        // SAFETY: the whole mapping.
        unsafe { crate::huge::forbid_huge(mapping.start(), mapping.length()).unwrap() };
        // SAFETY: within a live mapping that nothing else uses.
        let touch = |page: usize, writes: bool| unsafe {
            let word = start.add(page * PAGE_SIZE);
            if writes {
                word.write_volatile(1);
            } else {
                _ = word.read_volatile();
            }
        };
        (0..TOUCHED).for_each(|page| touch(page, true));
        (TOUCHED..PAGES).for_each(|page| touch(page, false));
        let range = [(start as u64, start as u64 + (PAGES * PAGE_SIZE) as u64)];
        let mut frames = Vec::new();
        let mut look = || {
            frames.clear();
            let found = inspector.shared_frames(&range, &mut frames);
            let found = match found {
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return None,
                found => found.unwrap(),
            };
            let shown = if found.are_hidden { 0 } else { found.pages };
            assert_eq!(frames.len() as u64, shown);
            frames.sort_unstable();
            frames.dedup();
            assert_eq!(frames.len() as u64, shown, "each has a frame of its own");
            assert_eq!(found.unprotected, found.pages);
            // What was found there is all that is found.
            let again = inspector.shared_frames(&found.places, &mut Vec::new());
            assert_eq!(again.unwrap(), found);
            let pages = found
                .places
                .iter()
                .map(|(start, end)| (end - start) / PAGE_SIZE as u64);
            assert_eq!(
                pages.sum::<u64>(),
                found.pages,
                "those behind the first written ones"
            );
            Some(found.pages)
        };
        let Some(none) = look() else {
            memfold_testing::skip("PAGEMAP_SCAN (Linux 6.7)");
            return;
        };
        assert_eq!(none, 0, "pages of zeros are no one's");
        // SAFETY: the child calls nothing but these system calls.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::pause();
                libc::_exit(0);
            }
            child
        };
        assert!(child > 0);
        assert_eq!(look(), Some(TOUCHED as u64));
        (0..WRITTEN).for_each(|page| touch(page, true));
        assert_eq!(look(), Some((TOUCHED - WRITTEN) as u64));
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(look(), Some(0));
    }
}
