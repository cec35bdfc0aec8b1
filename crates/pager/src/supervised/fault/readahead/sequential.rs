//! Sequential readahead: windows that follow the access pattern.
//!
//! A fault within one window of the end of a stream's last window continues the stream and doubles its
//! window. Any other fault starts a new stream with a window of one page. So random access brings in no
//! extra pages, and several sequential readers do not disturb each other. Pages that are used together
//! in no order are found by fault-around (`fault_around.rs`). The embedded engine has its own detector
//! with different rules (`embedded/streams.rs`).

use crate::page::{PageRange, VirtualPage};
use crate::supervised::fault::readahead::fault_around::FaultAround;

/// Number of concurrent streams per address space. More serves more interleaved readers and takes
/// longer per fault.
const STREAMS: usize = 8;

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// The page after the last window.
    next: VirtualPage,
    /// Size of the last window, in pages.
    window: u32,
}

/// A ring of sequential streams; a new one replaces the oldest.
#[derive(Debug, Default)]
struct Streams {
    streams: [Stream; STREAMS],
    oldest: usize,
}

impl Streams {
    /// The number of pages to bring in from `page` on, at most `largest`.
    fn advise(&mut self, page: VirtualPage, largest: u32) -> u32 {
        for stream in &mut self.streams {
            let slack = u64::from(stream.window);
            if stream.window > 0
                && page.0 + slack >= stream.next.0
                && page.0 <= stream.next.0 + slack
            {
                stream.window = (stream.window * 2).min(largest).max(1);
                stream.next = page.plus(u64::from(stream.window));
                return stream.window;
            }
        }
        self.streams[self.oldest] = Stream {
            next: page.plus(1),
            window: 1,
        };
        self.oldest = (self.oldest + 1) % STREAMS;
        1
    }
}

/// Readahead state of one address space, guarded by a mutex of it; used by the threads that serve its
/// faults.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// Separate streams for first touches, so that scattered swap-ins do not evict them.
    first_touches: Streams,
    swap_ins: Streams,
    around: FaultAround,
}

impl Windows {
    /// The number of zero-filled pages to bring in from `page` on, at most `largest`.
    pub(crate) fn first_touch(&mut self, page: VirtualPage, largest: u32) -> u32 {
        self.first_touches.advise(page, largest)
    }

    /// The window of a swap-in of `page`, which it contains: at most `largest` pages. `swapped` returns
    /// a bitmap of the swapped-out pages of a block of 16 pages.
    pub(crate) fn swap_in(
        &mut self,
        page: VirtualPage,
        largest: u32,
        swapped: impl FnOnce(PageRange) -> u16,
    ) -> PageRange {
        let around = self.around.advise(page, swapped);
        let ahead = u64::from(self.swap_ins.advise(page, largest));
        if around.pages() >= ahead {
            return around;
        }
        PageRange {
            start: page,
            end: page.plus(ahead),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_faults_grow_the_window() {
        let mut windows = Windows::default();
        let mut page = VirtualPage(1000);
        let mut sizes = Vec::new();
        for _ in 0..7 {
            let size = windows.first_touch(page, 16);
            sizes.push(size);
            page = page.plus(u64::from(size));
        }
        assert_eq!(sizes, [1, 2, 4, 8, 16, 16, 16]);
    }

    #[test]
    fn scattered_faults_bring_in_one_page() {
        let mut windows = Windows::default();
        for step in 0..100u64 {
            assert_eq!(
                windows.first_touch(VirtualPage(step * 7919 % 100_003 + (step << 20)), 16),
                1
            );
        }
    }

    #[test]
    fn interleaved_streams_keep_their_windows() {
        let mut windows = Windows::default();
        let mut pages = [
            VirtualPage(10_000),
            VirtualPage(900_000),
            VirtualPage(5_000_000),
        ];
        let mut last = 0;
        for _ in 0..6 {
            for page in &mut pages {
                last = windows.first_touch(*page, 32);
                *page = page.plus(u64::from(last));
            }
        }
        assert_eq!(last, 32);
    }
}
