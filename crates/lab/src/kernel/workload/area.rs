//! Anonymous memory that a workload swaps out and in.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    ptr::NonNull,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use zsmalloc::{PAGE_SIZE, PageSource};

use super::{Data, Wrong};
use crate::{clock::process_cpu, mapping::Mapping};

/// Page-granular memory of the kernel or the library.
pub trait Pages {
    /// Number of pages.
    fn pages(&self) -> usize;

    /// The bytes of one page.
    fn page(&mut self, number: usize) -> &mut [u8];

    /// Size in MiB.
    fn mebibytes(&self) -> f64 {
        (self.pages() * PAGE_SIZE) as f64 / f64::from(1 << 20)
    }

    /// Writes every page. Returns the wall time.
    fn write_all(&mut self, data: &Data) -> Duration {
        let started = Instant::now();
        for number in 0..self.pages() {
            data.write(self.page(number), number);
        }
        started.elapsed()
    }

    /// Compares every byte with what [`Pages::write_all`] wrote.
    fn check_all(&mut self, data: &mut Data) -> Result<()> {
        let pages = self.pages();
        for number in 0..pages {
            if !data.is(self.page(number), number) {
                bail!(Wrong(format!(
                    "page {number} of {pages} differs from what was written"
                )));
            }
        }
        Ok(())
    }

    /// Flips one bit in the middle, to test that the checks detect it.
    fn spoil(&mut self) {
        let middle = self.pages() / 2;
        self.page(middle)[PAGE_SIZE / 2] ^= 1;
    }
}

impl Pages for Area {
    fn pages(&self) -> usize {
        self.pages
    }

    fn page(&mut self, number: usize) -> &mut [u8] {
        assert!(number < self.pages);
        // SAFETY: the page lies in the mapping, which is readable, writable and zero-initialised.
        // Only `self` refers to the mapping, and the slice borrows it.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr().add(number * PAGE_SIZE), PAGE_SIZE)
        }
    }
}

/// The cost of an unmap.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unmapped {
    /// Wall time of the caller.
    pub waited: Duration,
    /// CPU time of the whole process.
    pub cpu: Duration,
    /// The address range that was unmapped.
    pub place: Option<Place>,
}

/// An address range that was unmapped.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    base: NonNull<u8>,
    pages: usize,
}

/// An anonymous private mapping without huge pages.
#[derive(Debug)]
pub struct Area {
    base: NonNull<u8>,
    pages: usize,
}

impl Area {
    /// A new mapping of `pages` zero pages.
    pub fn new(pages: usize) -> Result<Self> {
        let base = Mapping.reserve(pages)?;
        Ok(Self { base, pages })
    }

    /// `MADV_PAGEOUT` of the whole mapping.
    pub fn advise_page_out(&self) -> Result<()> {
        // SAFETY: the range is this mapping, and the call keeps its contents.
        let failed = unsafe {
            let bytes = self.pages * PAGE_SIZE;
            libc::madvise(self.base.as_ptr().cast(), bytes, libc::MADV_PAGEOUT)
        };
        ensure!(failed == 0, "MADV_PAGEOUT: {}", io::Error::last_os_error());
        Ok(())
    }

    /// Fraction of the pages that are not present, from 0 to 1.
    pub fn fraction_out(&self) -> Result<f64> {
        const PRESENT: u8 = 1 << 7;
        let mut entries = vec![0; self.pages * 8];
        let first = self.base.as_ptr() as usize / PAGE_SIZE;
        File::open("/proc/self/pagemap")?.read_exact_at(&mut entries, first as u64 * 8)?;
        let present = entries
            .chunks_exact(8)
            .filter(|entry| entry[7] & PRESENT != 0);
        Ok(1.0 - present.count() as f64 / self.pages as f64)
    }

    /// Unmaps the memory. Returns the cost.
    pub fn unmap(self) -> Unmapped {
        let Self { base, pages } = self;
        let cpu = process_cpu();
        let started = Instant::now();
        drop(self);
        Unmapped {
            waited: started.elapsed(),
            cpu: process_cpu().saturating_sub(cpu),
            place: Some(Place { base, pages }),
        }
    }

    /// Maps a range again, checks that it reads as zero and can be written, and unmaps it.
    pub fn check_new(place: Place, data: &mut Data) -> Result<()> {
        let Place { base, pages } = place;
        let mut again = Self::map_at(base, pages)?;
        for number in (0..pages).step_by(61) {
            let page = again.page(number);
            if page.iter().any(|byte| *byte != 0) {
                bail!(Wrong(format!("page {number} of a new mapping is not zero")));
            }
            data.write(page, number + 1);
            if !data.is(again.page(number), number + 1) {
                bail!(Wrong(format!(
                    "page {number} of a new mapping lost what was written"
                )));
            }
        }
        Ok(())
    }

    fn map_at(base: NonNull<u8>, pages: usize) -> Result<Self> {
        // SAFETY: MAP_FIXED_NOREPLACE replaces no existing mapping.
        let address = unsafe {
            libc::mmap(
                base.as_ptr().cast(),
                pages * PAGE_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE
                    | libc::MAP_ANONYMOUS
                    | libc::MAP_NORESERVE
                    | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        ensure!(
            address == base.as_ptr().cast(),
            "mmap: {}",
            io::Error::last_os_error()
        );
        Ok(Self { base, pages })
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and no borrow of it is left.
        unsafe { Mapping.unreserve(self.base, self.pages) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_is_detected() {
        let mut data = Data::new("recorded").unwrap();
        let mut area = Area::new(64).unwrap();
        area.write_all(&data);
        area.check_all(&mut data).unwrap();
        area.spoil();
        let error = area.check_all(&mut data).unwrap_err();
        assert!(error.is::<Wrong>(), "{error}");
    }

    #[test]
    fn a_new_mapping_of_an_unmapped_range_is_zero() {
        let mut data = Data::new("phrases").unwrap();
        let mut area = Area::new(256).unwrap();
        assert_eq!(area.fraction_out().unwrap(), 1.0);
        area.write_all(&data);
        assert_eq!(area.fraction_out().unwrap(), 0.0);
        let place = area.unmap().place.unwrap();
        Area::check_new(place, &mut data).unwrap();
    }
}
