//! The pool's memory: anonymous mappings of the supervisor, or of the program in the embedded engine.

use memfold_sys::PAGE_SIZE;
use memfold_sys::huge::{HUGE_PAGE_SIZE, HugePages, forbid_huge, size_to_ask_for, split_huge};
use memfold_sys::memory::{Mapping, discard_all};
use std::ptr::NonNull;
use std::sync::Mutex;
use zsmalloc::{PageRun, PageSource, SourceError};

/// Reserves by `mmap` and frees by `madvise`. Uses a huge page only where the pool requests one.
#[derive(Debug, Default)]
pub struct MappedSource {
    mappings: Mutex<Vec<Mapping>>,
    huge_pages: HugePages,
}

// SAFETY: a reservation is a fresh private mapping, readable, writable, zero, aligned, kept in
// `mappings` until it is unreserved. Discarded pages read as zero and may be touched.
unsafe impl PageSource for MappedSource {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        let refused = SourceError::Reserve { pages };
        let length = pages.checked_mul(PAGE_SIZE).ok_or(refused)?;
        let mapping = Mapping::aligned(length, HUGE_PAGE_SIZE).map_err(|_| refused)?;
        let start = mapping.start();
        // With THP `always`, the kernel would use huge pages unrequested, which stay allocated when a
        // part of them is freed. A kernel without THP refuses the call. SAFETY: the whole mapping.
        let _ = unsafe { forbid_huge(start, length) };
        self.mappings
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .push(mapping);
        Ok(start)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, _pages: usize) {
        let mut mappings = self
            .mappings
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        mappings.retain(|mapping| mapping.start() != base);
    }

    fn huge_pages(&self) -> usize {
        size_to_ask_for() / PAGE_SIZE
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        // SAFETY: the pool passes an aligned, unused part of a reservation.
        unsafe { self.huge_pages.populate(run.start, run.pages * PAGE_SIZE) }
    }

    fn split_huge(&self, run: PageRun) {
        // A huge page that was not split is freed as a whole later, or split by the kernel's reclaim.
        // SAFETY: the run lies in a reservation.
        let _ = unsafe { split_huge(run.start) };
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        let ranges = runs.iter().map(|run| (run.start, run.pages * PAGE_SIZE));
        // SAFETY: the caller's promise: whole pages of a reservation, unused.
        unsafe { discard_all(ranges) }.map_err(|_| SourceError::Discard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zsmalloc::{Config, Pool};

    /// RSS in bytes of the mapping that contains `address`, from smaps.
    fn resident_around(address: usize) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps can be read");
        let holds = |line: &&str| {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let parsed = range.map(|(from, to)| {
                let number = |text| usize::from_str_radix(text, 16);
                (number(from), number(to))
            });
            matches!(parsed, Some((Ok(from), Ok(to))) if (from..to).contains(&address))
        };
        let mut lines = smaps.lines().skip_while(|line| !holds(line));
        let line = lines.find(|line| line.starts_with("Rss:"));
        let kibibytes = line.and_then(|line| line.split_whitespace().nth(1));
        kibibytes.map_or(0, |text| text.parse::<usize>().expect("a number") * 1024)
    }

    /// The pool's own count agrees with RSS, and freed memory leaves RSS, huge pages or not.
    #[test]
    fn a_large_pool_gives_its_memory_back_in_parts_and_whole() {
        const OBJECTS: usize = 20_000;
        let pool = Pool::new(
            MappedSource::default(),
            Config::with_capacity_pages(1 << 16),
        )
        .expect("address space is free");
        let object = |number: usize| [number.to_le_bytes(); PAGE_SIZE / 8];
        let bytes = |number: usize| object(number).concat();
        let words: Vec<_> = (0..OBJECTS)
            .map(|number| pool.store(&[&bytes(number)]).expect("there is memory"))
            .collect();
        if pool.stats().huge_pages == 0 {
            memfold_testing::skip("huge pages to give");
        }
        let address = pool.read_slot(words[0], |slot| slot.as_ptr().addr());
        let check = |kept: &[usize]| {
            for &number in kept {
                pool.read_slot(words[number], |slot| assert!(slot == bytes(number)));
            }
            let resident = resident_around(address);
            assert!(resident >= kept.len() * PAGE_SIZE, "{}", pool.stats());
            assert!(
                resident <= pool.resident_bytes(),
                "{resident}: {}",
                pool.stats()
            );
        };
        check(&(0..OBJECTS).collect::<Vec<_>>());
        let (kept, freed): (Vec<_>, Vec<_>) = (0..OBJECTS).partition(|number| number % 9 == 0);
        let mut freed: Vec<_> = freed.into_iter().map(|number| words[number]).collect();
        pool.free_bulk(&mut freed);
        pool.trim();
        check(&kept);
        assert!(
            pool.resident_bytes() < kept.len() * PAGE_SIZE * 9 / 8,
            "{}",
            pool.stats()
        );
        kept.into_iter().for_each(|number| pool.free(words[number]));
        pool.trim();
        assert_eq!((pool.resident_bytes(), resident_around(address)), (0, 0));
    }
}
