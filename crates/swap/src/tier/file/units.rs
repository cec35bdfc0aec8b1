//! Allocation of a file's units.

use crate::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::*},
    lock,
};

const BITS: u64 = u64::BITS as u64;

/// Units looked at for a run as long as wanted before a shorter one is taken. More makes longer runs,
/// and holds the lock longer.
const NEAR: u64 = 512 * BITS;

/// Units of a chunk, for which the longest run is remembered.
const CHUNK: u64 = 64 * BITS;

/// The longest run of a chunk that has changed since it was searched, or that does not fit the byte.
const UNKNOWN: u8 = u8::MAX;

/// The units of a file, and which of them are allocated.
#[derive(Debug)]
pub(super) struct Units {
    map: Mutex<Map>,
    size: u64,
    // Copies of what the map has, so that threads that load pages never wait for a search.
    used: AtomicU64,
    reached: AtomicU64,
}

impl Units {
    pub(super) fn new(size: u64) -> Self {
        Self {
            map: Mutex::new(Map::new(size)),
            size,
            used: AtomicU64::new(0),
            reached: AtomicU64::new(0),
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// The end of the units ever used.
    pub(super) fn reached(&self) -> u64 {
        self.reached.load(Relaxed)
    }

    /// Allocates up to `wanted` contiguous units, at least `least`. Returns the first and their
    /// number.
    pub(super) fn take(&self, wanted: u64, least: u64) -> Option<(u64, u64)> {
        let mut map = lock(&self.map);
        let run = map.take(wanted, least);
        self.used.store(map.used, Relaxed);
        self.reached.store(map.reached(), Relaxed);
        run
    }

    /// Frees runs of units, each given by its first and their number.
    ///
    /// # Panics
    ///
    /// If one of them is free: an entry was invalid.
    pub(super) fn give_back(&self, runs: impl IntoIterator<Item = (u64, u64)>) {
        let mut map = lock(&self.map);
        for (start, count) in runs {
            map.give_back(start, count);
        }
        self.used.store(map.used, Relaxed);
    }
}

/// A bit for each unit up to the last one ever used.
#[derive(Debug)]
struct Map {
    taken: Vec<u64>,
    /// For each chunk, at least the most free units that follow one another from any unit of it on,
    /// or `UNKNOWN`. Only freeing makes runs longer.
    longest: Vec<u8>,
    size: u64,
    used: u64,
    /// Where the next search starts.
    next: u64,
    /// Words that searches looked at.
    #[cfg(test)]
    words: std::cell::Cell<u64>,
}

impl Map {
    fn new(size: u64) -> Self {
        Self {
            taken: Vec::new(),
            longest: Vec::new(),
            size,
            used: 0,
            next: 0,
            #[cfg(test)]
            words: std::cell::Cell::new(0),
        }
    }

    fn reached(&self) -> u64 {
        (self.taken.len() as u64 * BITS).min(self.size)
    }

    fn take(&mut self, wanted: u64, least: u64) -> Option<(u64, u64)> {
        if least == 0 || least > self.size - self.used {
            return None;
        }
        let (start, count) = match self.find_near(wanted) {
            near if near.1 >= least => near,
            _ => self.find_anywhere(wanted, least)?,
        };
        let words = (start + count).div_ceil(BITS) as usize;
        if words > self.taken.len() {
            let chunks = (start + count).div_ceil(CHUNK) as usize;
            self.longest.try_reserve(chunks - self.longest.len()).ok()?;
            self.taken.try_reserve(words - self.taken.len()).ok()?;
            self.longest.resize(chunks, UNKNOWN);
            self.taken.resize(words, 0);
        }
        self.set(start, count, true);
        self.used += count;
        self.next = start + count;
        Some((start, count))
    }

    /// The first run of `wanted` free units behind the last allocation, or else the longest of those
    /// near it. Pages written together then lie together.
    fn find_near(&self, wanted: u64) -> (u64, u64) {
        let end = self.next + NEAR;
        let best = self.find(self.next, end.min(self.size), wanted);
        if best.1 >= wanted || end <= self.size {
            return best;
        }
        let again = self.find(0, (end - self.size).min(self.next), wanted);
        if again.1 > best.1 { again } else { best }
    }

    /// The next run of at least `least` free units, wherever it is.
    fn find_anywhere(&mut self, wanted: u64, least: u64) -> Option<(u64, u64)> {
        let chunks = self.size.div_ceil(CHUNK);
        let first = self.next / CHUNK;
        (first..chunks)
            .chain(0..first.min(chunks))
            .find_map(|chunk| self.find_in_chunk(chunk, wanted, least))
    }

    /// A run of at least `least` free units that starts in a chunk.
    fn find_in_chunk(&mut self, chunk: u64, wanted: u64, least: u64) -> Option<(u64, u64)> {
        let longest = self.longest.get(chunk as usize).copied();
        if longest.is_some_and(|longest| u64::from(longest) < least.min(UNKNOWN.into())) {
            return None;
        }
        let start = chunk * CHUNK;
        let end = (start + CHUNK + least - 1).min(self.size);
        let (start, count) = self.find(start, end, least);
        if count >= least {
            return Some(self.find(start, start.saturating_add(wanted).min(self.size), wanted));
        }
        if let Some(longest) = self.longest.get_mut(chunk as usize) {
            *longest = u8::try_from(count).unwrap_or(UNKNOWN);
        }
        None
    }

    /// The first run of `wanted` free units between `from` and `to`, or else the longest: its start
    /// and length.
    fn find(&self, from: u64, to: u64, wanted: u64) -> (u64, u64) {
        let mut best = (from, 0);
        let mut start = from;
        let mut at = from;
        while at < to {
            let word = self.taken.get((at / BITS) as usize).copied();
            let Some(word) = word else {
                // Units from here on were never used.
                at = to;
                break;
            };
            let rest = word >> (at % BITS);
            let in_word = BITS - at % BITS;
            let free = u64::from(rest.trailing_zeros()).min(in_word);
            at += free;
            if free == in_word && at - start < wanted {
                continue;
            }
            let length = at.min(to) - start;
            if length > best.1 {
                best = (start, length);
            }
            if length >= wanted {
                break;
            }
            // Skip the allocated units that follow.
            let taken = rest.checked_shr(free as u32).unwrap_or(0);
            at += u64::from(taken.trailing_ones());
            start = at;
        }
        let length = at.min(to).saturating_sub(start);
        if length > best.1 {
            best = (start, length);
        }
        #[cfg(test)]
        self.words
            .set(self.words.get() + (at.min(to) - from).div_ceil(BITS));
        (best.0, best.1.min(wanted))
    }

    fn give_back(&mut self, start: u64, count: u64) {
        if count == 0 {
            return;
        }
        self.set(start, count, false);
        self.used -= count;
        // Runs that start in the chunk before may go on here. Those from farther away cover all of
        // that chunk, and are longer than what is remembered.
        let first = (start / CHUNK).saturating_sub(1) as usize;
        let last = ((start + count - 1) / CHUNK) as usize;
        self.longest[first..=last].fill(UNKNOWN);
    }

    fn set(&mut self, start: u64, count: u64, taken: bool) {
        let mut at = start;
        while at < start + count {
            let bits = (BITS - at % BITS).min(start + count - at);
            let mask = (u64::MAX >> (BITS - bits)) << (at % BITS);
            let word = self.taken.get_mut((at / BITS) as usize);
            let word =
                word.unwrap_or_else(|| panic!("unit {at} of the swap file was never allocated"));
            let before = if taken { !*word } else { *word };
            assert_eq!(
                before & mask,
                mask,
                "units of the swap file from {start} on are in the wrong state"
            );
            *word ^= mask;
            at += bits;
        }
    }
}

#[cfg(test)]
mod tests {
    use memfold_testing::Random;

    use super::*;

    /// Units in use, each owned by one run.
    struct Model {
        units: Units,
        runs: Vec<(u64, u64)>,
        owned: Vec<bool>,
    }

    impl Model {
        fn take(&mut self, wanted: u64, least: u64) -> bool {
            let Some((start, count)) = self.units.take(wanted, least) else {
                let free = self.owned.split(|&owned| owned).map(<[bool]>::len).max();
                assert!(free < Some(least as usize), "{free:?} units were free");
                return false;
            };
            assert!((least..=wanted).contains(&count));
            for owned in &mut self.owned[start as usize..(start + count) as usize] {
                assert!(!std::mem::replace(owned, true));
            }
            self.runs.push((start, count));
            true
        }

        fn give_back(&mut self, index: usize) {
            let (start, count) = self.runs.swap_remove(index);
            self.units.give_back([(start, count)]);
            self.owned[start as usize..(start + count) as usize].fill(false);
        }
    }

    #[test]
    fn runs_never_overlap_and_all_space_is_found() {
        for size in [1000, 3 * CHUNK + 1000] {
            let mut model = Model {
                units: Units::new(size),
                runs: Vec::new(),
                owned: vec![false; size as usize],
            };
            let mut random = Random::new(size);
            while model.take(1 + random.next_word() % 90, 1) {}
            for _ in 0..20_000 {
                let word = random.next_word();
                let count = 1 + (word >> 33) % 90;
                if word.is_multiple_of(2) {
                    model.take(count, 1 + (word >> 16) % count);
                } else if !model.runs.is_empty() {
                    model.give_back((word >> 16) as usize % model.runs.len());
                }
                let used: u64 = model.runs.iter().map(|run| run.1).sum();
                assert_eq!(model.units.used(), used);
            }
        }
    }

    /// A full file of records of three units each.
    fn full(size: u64) -> Units {
        let units = Units::new(size);
        while units.take(3, 3).is_some() {}
        units
    }

    /// Words that searches have looked at since the last call.
    fn words(units: &Units) -> u64 {
        lock(&units.map).words.take()
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes: millions of units")]
    fn a_search_for_more_than_there_is_ends_soon() {
        let size = 1 << 24;
        let units = full(size);
        let mut random = Random::new(1);
        let freed = (0..size / 3).filter(|_| random.next_word() % 10 < 4);
        units.give_back(freed.map(|record| (record * 3, 3)));
        words(&units);
        for _ in 0..1000 {
            let (_, count) = units.take(192, 3).unwrap();
            assert!(count >= 3);
            let looked_at = words(&units);
            assert!(looked_at <= NEAR / BITS + 2, "{looked_at} words");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes: millions of units")]
    fn a_full_file_is_not_searched_again_and_again() {
        let size = 1 << 24;
        let units = full(size);
        units.give_back((0..size / 3).step_by(10).map(|record| (record * 3, 1)));
        assert_eq!(units.take(4, 2), None);
        words(&units);
        let few = NEAR / BITS + 2;
        assert_eq!(units.take(4, 2), None);
        assert!(words(&units) <= few);
        // What is freed is found without a search of the rest.
        units.give_back([(3003, 3), (size / 2 / 3 * 3, 3)]);
        for _ in 0..2 {
            assert!(units.take(4, 3).is_some());
            assert!(words(&units) <= few + 4 * CHUNK / BITS);
        }
        assert_eq!(units.take(4, 3), None);
    }

    #[test]
    #[should_panic(expected = "in the wrong state")]
    fn a_double_free_panics() {
        let units = Units::new(100);
        let (start, _) = units.take(7, 7).unwrap();
        units.give_back([(start, 7)]);
        units.give_back([(start, 7)]);
    }
}
