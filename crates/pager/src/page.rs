//! Page numbers and ranges of a program's address space.

use memfold_sys::PAGE_SIZE;

// The preload library is freestanding and has the constant of `sys`, the pool that of `zsmalloc`; neither crate uses
// another one of ours.
const _: () = assert!(PAGE_SIZE == zsmalloc::PAGE_SIZE);

/// A page of a program's memory: its address divided by the page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct VirtualPage(pub u64);

impl VirtualPage {
    /// The page that holds an address.
    pub fn containing(address: u64) -> VirtualPage {
        VirtualPage(address / PAGE_SIZE as u64)
    }

    /// The address of the page's first byte.
    pub fn address(self) -> u64 {
        self.0 * PAGE_SIZE as u64
    }

    /// The page `pages` above this one.
    #[must_use]
    pub fn plus(self, pages: u64) -> VirtualPage {
        VirtualPage(self.0 + pages)
    }
}

/// Pages from `start` up to, not including, `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct PageRange {
    /// First page.
    pub start: VirtualPage,
    /// First page after the range.
    pub end: VirtualPage,
}

impl PageRange {
    /// The pages of an address range, rounded outwards to whole pages.
    pub fn of_addresses(start: u64, end: u64) -> PageRange {
        PageRange {
            start: VirtualPage::containing(start),
            end: VirtualPage::containing(end + PAGE_SIZE as u64 - 1),
        }
    }

    /// The naturally aligned block of `size` pages that contains `page`.
    pub fn around(page: VirtualPage, size: u64) -> PageRange {
        let start = VirtualPage(page.0 / size * size);
        PageRange {
            start,
            end: start.plus(size),
        }
    }

    /// Number of pages.
    pub fn pages(self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether the range has no page.
    pub fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// Whether the page is in the range.
    pub fn contains(self, page: VirtualPage) -> bool {
        (self.start..self.end).contains(&page)
    }

    /// Where the range lies after an mremap from `from` to `to`.
    #[must_use]
    pub fn moved(self, from: VirtualPage, to: VirtualPage) -> PageRange {
        let place = |page: VirtualPage| to.plus(page.0 - from.0);
        PageRange {
            start: place(self.start),
            end: place(self.end),
        }
    }

    /// The pages that are in both ranges; empty if there are none.
    #[must_use]
    pub fn intersection(self, other: PageRange) -> PageRange {
        PageRange {
            start: self.start.max(other.start),
            end: self.end.min(other.end),
        }
    }
}

/// The size of `pages` pages in bytes.
pub(crate) fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}

/// A range from page numbers.
#[cfg(test)]
pub(crate) fn range(start: u64, end: u64) -> PageRange {
    PageRange {
        start: VirtualPage(start),
        end: VirtualPage(end),
    }
}
