//! A piece of anonymous memory that a workload swaps out and in.

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

/// Memory in whole pages, of any origin.
pub trait Pages {
    /// How many there are.
    fn pages(&self) -> usize;

    /// The bytes of one page.
    fn page(&mut self, number: usize) -> &mut [u8];

    /// All of it.
    fn mebibytes(&self) -> f64 {
        (self.pages() * PAGE_SIZE) as f64 / (1 << 20) as f64
    }

    /// Writes every page. Returns how long it took.
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
                    "page {number} of {pages} is not what was written"
                )));
            }
        }
        Ok(())
    }

    /// Flips one bit in the middle, to show that the checks see it.
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
        // SAFETY: the page lies in the mapping, which is readable, writable and zero at first, and
        // which only this value refers to: the borrow of `self` covers the slice.
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr().add(number * PAGE_SIZE), PAGE_SIZE)
        }
    }
}

/// What it took to give memory up.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unmapped {
    /// How long the caller waited.
    pub waited: Duration,
    /// What the whole process used of its processors for it.
    pub processor: Duration,
    /// Where it was.
    pub place: Option<Place>,
}

/// Where memory was that is no longer mapped.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    base: NonNull<u8>,
    pages: usize,
}

/// An anonymous private mapping of whole pages, without huge pages.
#[derive(Debug)]
pub struct Area {
    base: NonNull<u8>,
    pages: usize,
}

impl Area {
    pub fn new(pages: usize) -> Result<Self> {
        let base = Mapping.reserve(pages)?;
        Ok(Self { base, pages })
    }

    /// Asks the kernel to swap all of it out.
    pub fn advise_page_out(&self) -> Result<()> {
        // SAFETY: the range is this mapping; its contents stay as they are.
        let failed = unsafe {
            let bytes = self.pages * PAGE_SIZE;
            libc::madvise(self.base.as_ptr().cast(), bytes, libc::MADV_PAGEOUT)
        };
        ensure!(failed == 0, "MADV_PAGEOUT: {}", io::Error::last_os_error());
        Ok(())
    }

    /// How much of it is not in memory, from 0 to 1.
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

    /// Gives the memory up. Returns what it took.
    pub fn unmap(self) -> Unmapped {
        let Self { base, pages } = self;
        let cpu = process_cpu();
        let started = Instant::now();
        drop(self);
        Unmapped {
            waited: started.elapsed(),
            processor: process_cpu() - cpu,
            place: Some(Place { base, pages }),
        }
    }

    /// Checks that new memory at the same place is new, and takes it away again.
    pub fn check_new(place: Place, data: &mut Data) -> Result<()> {
        let Place { base, pages } = place;
        let mut again = Self::map_at(base, pages)?;
        for number in (0..pages).step_by(61) {
            let page = again.page(number);
            if page.iter().any(|byte| *byte != 0) {
                bail!(Wrong(format!("page {number} of new memory is not zero")));
            }
            data.write(page, number + 1);
            if !data.is(again.page(number), number + 1) {
                bail!(Wrong(format!(
                    "page {number} of new memory lost what was written"
                )));
            }
        }
        Ok(())
    }

    fn map_at(base: NonNull<u8>, pages: usize) -> Result<Self> {
        // SAFETY: MAP_FIXED_NOREPLACE touches no existing mapping.
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
        // SAFETY: the mapping is this value's own, and nothing borrows from it any more.
        unsafe { Mapping.unreserve(self.base, self.pages) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_is_found() {
        let mut data = Data::new("recorded").unwrap();
        let mut area = Area::new(64).unwrap();
        area.write_all(&data);
        area.check_all(&mut data).unwrap();
        area.spoil();
        let error = area.check_all(&mut data).unwrap_err();
        assert!(error.is::<Wrong>(), "{error}");
    }

    #[test]
    fn unmapped_memory_comes_back_empty() {
        let mut data = Data::new("phrases").unwrap();
        let mut area = Area::new(256).unwrap();
        assert_eq!(area.fraction_out().unwrap(), 1.0);
        area.write_all(&data);
        assert_eq!(area.fraction_out().unwrap(), 0.0);
        let place = area.unmap().place.unwrap();
        Area::check_new(place, &mut data).unwrap();
    }
}
