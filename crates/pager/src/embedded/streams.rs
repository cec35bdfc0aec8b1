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
/// Bytes: a larger distance between faults is no stride.
const LONGEST_STRIDE: i64 = 1 << 30;
const PAGE: i64 = PAGE_SIZE as i64;
/// Pages of a span to be read ahead, its marker included.
pub(super) const SPAN: u32 = 64;

/// What to bring in at a fault: `count` pages, those of `address`, `address + stride`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Advice {
    pub address: i64,
    /// In bytes, and not 0.
    pub stride: i64,
    pub count: u32,
    /// How many pages are to be read ahead, and how far ahead; 0 for none.
    ahead: (i64, u32),
}

impl Advice {
    /// One page.
    pub(super) fn single(address: usize) -> Advice {
        Advice {
            address: address as i64,
            stride: PAGE,
            count: 1,
            ahead: (0, 0),
        }
    }

    /// What is worth reading ahead.
    pub(super) fn ahead(self) -> Option<Advice> {
        let (address, count) = self.ahead;
        (count > 0).then_some(Advice {
            address,
            count,
            ahead: (0, 0),
            ..self
        })
    }

    /// Its beginning: at most `count` pages.
    pub(super) fn first(self, count: u32) -> Advice {
        Advice {
            count: self.count.min(count),
            ..self
        }
    }

    /// What follows: `count` pages more.
    pub(super) fn behind(self, count: u32) -> Advice {
        Advice {
            address: self.end(),
            count,
            ahead: (0, 0),
            ..self
        }
    }

    /// Where it ends.
    pub(super) fn end(self) -> i64 {
        self.address + i64::from(self.count) * self.stride
    }

    /// A run of neighbouring pages.
    pub(super) fn run(address: usize, count: u32) -> Advice {
        Advice {
            count,
            ..Advice::single(address)
        }
    }

    /// The addresses, as they come.
    pub(super) fn addresses(self) -> impl Iterator<Item = i64> {
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
    /// Pages brought in at its latest fault.
    latest: u32,
    /// What was asked to be read ahead ends here: the place of the next marker.
    asked_to: i64,
}

impl Stream {
    /// Whether a stream that is there may have got to an address. Pages before the expected place
    /// may have had no room, those behind it may be present already, or read ahead. What lies
    /// further back is another stream, in the opposite direction for instance.
    fn goes_on(&self, address: i64) -> bool {
        let Some(steps) = self.steps_to(address) else {
            return false;
        };
        let read_ahead = match self.asked_to {
            0 => 0,
            asked_to => (asked_to - self.expected) / self.stride,
        };
        (-i64::from(self.latest)..=read_ahead.max(i64::from(self.window))).contains(&steps)
    }

    /// How many strides an address is behind the expected place.
    fn steps_to(&self, address: i64) -> Option<i64> {
        let ahead = address - self.expected;
        match self.stride {
            0 => None,
            PAGE => Some(address / PAGE - self.expected / PAGE),
            stride if stride == -PAGE => Some(self.expected / PAGE - address / PAGE),
            stride if ahead % stride == 0 => Some(ahead / stride),
            _ => (address / PAGE == self.expected / PAGE).then_some(0),
        }
    }
}

impl Stream {
    /// How many pages to bring in at a fault of a stream that goes on, and what to read ahead.
    fn read_ahead(&mut self, address: i64, largest: u32) -> (u32, (i64, u32)) {
        // First touches, whose windows are larger, have nothing to read.
        if self.window < largest || largest > SPAN {
            return (self.window, (0, 0));
        }
        let span = i64::from(SPAN) * self.stride;
        let steps_left = (self.asked_to - address) / self.stride;
        let mut count = self.window;
        if self.asked_to == 0 || !(0..=2 * i64::from(SPAN)).contains(&steps_left) {
            // It begins, or was overtaken.
            self.asked_to = address + i64::from(count) * self.stride;
        } else if steps_left > i64::from(SPAN) {
            return (count, (0, 0));
        } else if steps_left == i64::from(SPAN) {
            // A marker: the pages behind it are there.
            count = 1;
        }
        let marker = self.asked_to;
        self.asked_to = marker + span;
        (count, (marker + self.stride, SPAN - 1))
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
        let going_on = |stream: &&mut Stream| stream.goes_on(address);
        if let Some(stream) = self.streams.iter_mut().find(going_on) {
            stream.window = (stream.window * 2).min(largest).max(1);
            let (count, ahead) = stream.read_ahead(address, largest);
            stream.latest = count;
            stream.expected = address + i64::from(count) * stream.stride;
            return Advice {
                address,
                stride: stream.stride,
                count,
                ahead,
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
            latest: window,
            asked_to: 0,
        };
        self.oldest = (self.oldest + 1) % STREAMS;
        Advice {
            address,
            stride,
            count: window,
            ahead: (0, 0),
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
pub(super) struct Streams(Box<[Guarded]>);

// SAFETY: only the thread that took a set uses it.
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
    pub(super) fn advise(&self, thread: usize, address: usize, largest: u32) -> Advice {
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
        run_with(accesses, largest, Some)
    }

    /// The same without readahead.
    fn run_alone(accesses: impl Iterator<Item = i64>) -> (usize, usize) {
        run_with(accesses, 16, |_| None)
    }

    fn run_with(
        accesses: impl Iterator<Item = i64>,
        largest: u32,
        read_ahead: fn(Advice) -> Option<Advice>,
    ) -> (usize, usize) {
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
            if let Some(span) = advice.ahead().and_then(read_ahead) {
                present.extend(span.addresses().map(|address| address / PAGE));
            }
        }
        (faults, present.len())
    }

    const BASE: i64 = 0x7000_0000_0000;

    #[test]
    fn sequential_accesses_share_faults() {
        let forwards = (0..1600).map(|page| BASE + page * PAGE);
        let (faults, pages) = run(forwards.clone(), 16);
        assert!(
            faults <= 35 && pages <= 1600 + 2 * SPAN as usize,
            "{faults} faults, {pages} pages"
        );
        let (backwards, _) = run(forwards.clone().rev(), 16);
        assert!(backwards <= 40, "{backwards}");
        let (alone, _) = run_alone(forwards);
        assert!(alone <= 130, "{alone}");
    }

    /// A stream in one direction must not take over another that crosses its place: its windows
    /// would hold only what is there already.
    #[test]
    fn a_change_of_direction_is_a_stream_of_its_own() {
        let back_and_forth = |turns: i64| {
            (0..turns).flat_map(|turn| {
                let middle = BASE + turn * 1000 * PAGE;
                let back = (0..60).map(move |page| middle - page * PAGE);
                back.chain((1..200).map(move |page| middle + page * PAGE))
            })
        };
        let (faults, pages) = run_alone(back_and_forth(10));
        assert!(
            faults <= 400 && pages < 259 * 10 + 300,
            "{faults} faults, {pages} pages"
        );
    }

    #[test]
    fn columns_of_any_row_length_share_faults() {
        for row in [8192_i64, 12_000, 20_480, 1_000_008] {
            let column = (0..400).map(|index| BASE + 24 + index * row);
            let (faults, pages) = run(column, 16);
            assert!(
                faults <= 32 && pages <= 400 + 2 * SPAN as usize,
                "{row}: {faults} faults, {pages} pages"
            );
        }
    }

    #[test]
    fn several_arrays_in_one_loop_keep_their_streams() {
        let starts = [0_i64, 1 << 32, 5 << 33];
        let accesses = (0..3200).flat_map(|index| starts.map(|start| BASE + start + index * 2048));
        let (faults, _) = run(accesses, 16);
        assert!(faults <= 150, "{faults} faults for 4800 pages");
        let strided = (0..400).flat_map(|index| starts.map(|start| BASE + start + index * 30_008));
        let (faults, _) = run(strided, 16);
        assert!(faults <= 60, "{faults} faults for 1200 pages");
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
