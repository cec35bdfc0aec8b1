//! Access patterns: sequential and strided streams, found in the addresses of faults.
//!
//! A fault where a stream was expected to go on continues it, and doubles its window. Two faults on
//! neighbouring pages begin a sequential stream, forwards or backwards; three with the same distance
//! between them, in bytes, begin a strided one: a column of an array, whose rows need not be whole
//! pages. Any other fault brings in its page alone, so that random access pays for nothing that it
//! does not want. A few streams are kept for each of many threads, so that loops over several arrays
//! do not disturb each other.

use memfold_sys::PAGE_SIZE;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

const STREAMS: usize = 8;
const HISTORY: usize = 8;
const SETS: usize = 64;
/// A larger distance is no stride.
const LONGEST_STRIDE: i64 = 1 << 30;
const PAGE: i64 = PAGE_SIZE as i64;

/// What to bring in at a fault: `count` pages, those of `address`, `address + stride`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice {
    pub address: i64,
    /// In bytes, and not 0.
    pub stride: i64,
    pub count: u32,
    /// The stream goes on as expected: it is worth reading ahead.
    pub steady: bool,
}

impl Advice {
    /// One page.
    pub fn single(address: usize) -> Advice {
        Advice {
            address: address as i64,
            stride: PAGE,
            count: 1,
            steady: false,
        }
    }

    /// The addresses, as they come.
    pub fn addresses(self) -> impl Iterator<Item = i64> {
        (0..i64::from(self.count)).map(move |step| self.address + step * self.stride)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Where the next fault is expected.
    expected: i64,
    /// 0 for no stream.
    stride: i64,
    window: u32,
}

impl Stream {
    /// How many strides behind the expected place an address is, if the stream may have got there:
    /// pages in between may be present already.
    fn distance(&self, address: i64) -> Option<i64> {
        let ahead = address - self.expected;
        let steps = if self.stride.abs() == PAGE {
            (address / PAGE - self.expected / PAGE) * self.stride.signum()
        } else if ahead % self.stride == 0 {
            ahead / self.stride
        } else if address / PAGE == self.expected / PAGE {
            0
        } else {
            return None;
        };
        let slack = i64::from(self.window) * 4;
        (-slack..=slack).contains(&steps).then_some(steps)
    }
}

/// The streams of one thread.
#[derive(Debug, Default)]
struct Set {
    streams: [Stream; STREAMS],
    oldest: usize,
    history: [i64; HISTORY],
    latest: usize,
}

impl Set {
    fn advise(&mut self, address: i64, largest: u32) -> Advice {
        let going_on = |stream: &Stream| stream.stride != 0 && stream.distance(address).is_some();
        if let Some(stream) = self.streams.iter_mut().find(|stream| going_on(stream)) {
            stream.window = (stream.window * 2).min(largest).max(1);
            stream.expected = address + i64::from(stream.window) * stream.stride;
            return Advice {
                address,
                stride: stream.stride,
                count: stream.window,
                steady: true,
            };
        }
        let stride = self.stride_to(address);
        self.latest = (self.latest + 1) % HISTORY;
        self.history[self.latest] = address;
        let Some(stride) = stride else {
            return Advice::single(address as usize);
        };
        let window = 2.min(largest);
        self.streams[self.oldest] = Stream {
            expected: address + i64::from(window) * stride,
            stride,
            window,
        };
        self.oldest = (self.oldest + 1) % STREAMS;
        Advice {
            address,
            stride,
            count: window,
            steady: false,
        }
    }

    /// The stride by which earlier faults lead to this one.
    fn stride_to(&self, address: i64) -> Option<i64> {
        let page = address / PAGE;
        for before in self.history {
            match page - before / PAGE {
                1 => return Some(PAGE),
                -1 => return Some(-PAGE),
                _ => {}
            }
        }
        self.history.iter().find_map(|before| {
            let stride = address - before;
            let regular = stride.abs() >= PAGE
                && stride.abs() < LONGEST_STRIDE
                && self.history.contains(&(before - stride));
            regular.then_some(stride)
        })
    }
}

#[derive(Default)]
struct Guarded {
    taken: AtomicBool,
    set: UnsafeCell<Set>,
}

/// The streams of all threads.
pub struct Streams(Box<[Guarded]>);

// SAFETY: a set is used only by who took it.
unsafe impl Sync for Streams {}
// SAFETY: plain numbers.
unsafe impl Send for Streams {}

impl Default for Streams {
    fn default() -> Self {
        Streams((0..SETS).map(|_| Guarded::default()).collect())
    }
}

impl Streams {
    /// What to bring in at a fault of a thread: at most `largest` pages. Never waits: where another
    /// thread is at the same streams, the answer is one page.
    pub fn advise(&self, thread: usize, address: usize, largest: u32) -> Advice {
        let guarded = &self.0[thread % SETS];
        if guarded.taken.swap(true, Ordering::Acquire) {
            return Advice::single(address);
        }
        // SAFETY: taken above.
        let advice = unsafe { &mut *guarded.set.get() }.advise(address as i64, largest);
        guarded.taken.store(false, Ordering::Release);
        advice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs accesses through a set as a program would: only what is not brought in yet faults.
    /// Returns the number of faults, and of pages brought in.
    fn run(accesses: impl Iterator<Item = i64>, largest: u32) -> (usize, usize) {
        let mut set = Set::default();
        let mut present = std::collections::HashSet::new();
        let mut faults = 0;
        for address in accesses {
            if present.contains(&(address / PAGE)) {
                continue;
            }
            faults += 1;
            let advice = set.advise(address, largest);
            assert_eq!(advice.address, address);
            present.extend(advice.addresses().map(|address| address / PAGE));
        }
        (faults, present.len())
    }

    const BASE: i64 = 0x7000_0000_0000;

    #[test]
    fn sequential_accesses_share_faults() {
        let forwards = (0..1600).map(|page| BASE + page * PAGE);
        let (faults, pages) = run(forwards.clone(), 16);
        assert!(
            faults <= 105 && pages < 1620,
            "{faults} faults, {pages} pages"
        );
        let (backwards, _) = run(forwards.rev(), 16);
        assert!(backwards <= 105, "{backwards}");
    }

    #[test]
    fn columns_of_any_row_length_share_faults() {
        for row in [8192_i64, 12_000, 20_480, 1_000_008] {
            let column = (0..400).map(|index| BASE + 24 + index * row);
            let (faults, pages) = run(column, 16);
            assert!(
                faults <= 32 && pages <= 420,
                "{row}: {faults} faults, {pages} pages"
            );
        }
    }

    #[test]
    fn several_arrays_in_one_loop_keep_their_streams() {
        let starts = [0_i64, 1 << 32, 5 << 33];
        let accesses = (0..3200).flat_map(|index| starts.map(|start| BASE + start + index * 2048));
        let (faults, _) = run(accesses, 16);
        assert!(faults <= 340, "{faults} faults for 4800 pages");
        let strided = (0..400).flat_map(|index| starts.map(|start| BASE + start + index * 30_008));
        let (faults, _) = run(strided, 16);
        assert!(faults <= 110, "{faults} faults for 1200 pages");
    }

    #[test]
    fn scattered_accesses_bring_in_little_else() {
        let mut state = 1_u64;
        let scattered = (0..2000).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            BASE + (state >> 33) as i64 % 1_000_000 * PAGE
        });
        let (faults, pages) = run(scattered, 16);
        assert!(
            faults > 1950 && pages < faults + 40,
            "{faults} faults, {pages} pages"
        );
    }
}
