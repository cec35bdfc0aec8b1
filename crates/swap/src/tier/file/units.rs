//! Allocation of a file's units.

use crate::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::*},
    lock,
};

const BITS: u64 = u64::BITS as u64;

/// Units looked at for a run as long as wanted before a shorter one is taken or the file grows. More
/// makes longer runs and a smaller file, and holds the lock longer.
const NEAR: u64 = 512 * BITS;

/// Shorter runs are taken before the file grows if less than 1/`SPARSE` of it is in use. More makes
/// longer runs and a larger file.
const SPARSE: u64 = 4;

/// They have at least 1/`SHORT` of what is wanted. More makes shorter runs and a smaller file.
const SHORT: u64 = 4;

/// Runs found below where a write failed before the file is to grow beyond again. More leaves room of the
/// file system unused for longer, and lets fewer writes fail where there is none.
const RETRY: u64 = 64;

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
    end: AtomicU64,
    /// From here on a write failed, and none has succeeded since: the file system may be full. A hint.
    failed_at: AtomicU64,
}

const NEVER: u64 = u64::MAX;

impl Units {
    pub(super) fn new(size: u64) -> Self {
        Self {
            map: Mutex::new(Map::new(size)),
            size,
            used: AtomicU64::new(0),
            end: AtomicU64::new(0),
            failed_at: AtomicU64::new(NEVER),
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// The end of the units in use.
    pub(super) fn end(&self) -> u64 {
        self.end.load(Relaxed)
    }

    /// Allocates up to `wanted` contiguous units, at least `least`. Returns the first and their
    /// number.
    pub(super) fn take(&self, wanted: u64, least: u64) -> Option<(u64, u64)> {
        let mut map = lock(&self.map);
        let failed_at = self.failed_at.load(Relaxed);
        let grow_to = if map.below < RETRY {
            failed_at
        } else {
            self.size
        };
        let run = map.take(wanted, least, grow_to);
        if let Some((start, count)) = run {
            let is_below = failed_at != NEVER && start + count <= failed_at;
            map.below = if is_below { map.below + 1 } else { 0 };
        }
        self.publish(&map);
        run
    }

    fn publish(&self, map: &Map) {
        self.used.store(map.used, Relaxed);
        self.end.store(map.end, Relaxed);
    }

    /// Notes that a run was written.
    pub(super) fn note_written(&self, start: u64, count: u64) {
        if start + count > self.failed_at.load(Relaxed) {
            self.failed_at.store(NEVER, Relaxed);
        }
    }

    /// Frees a run that could not be written. If it was the last of the file, what is free below is
    /// tried before the file grows beyond again.
    pub(super) fn note_failed(&self, start: u64, count: u64) {
        let mut map = lock(&self.map);
        let was_last = start + count == map.end;
        map.give_back(start, count);
        if was_last {
            self.failed_at.store(map.end, Relaxed);
        }
        self.publish(&map);
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
        self.publish(&map);
    }
}

#[derive(Debug)]
struct Map {
    /// A bit for each unit up to the last one ever used.
    taken: Vec<u64>,
    /// For each chunk, at least the most free units that follow one another from any unit of it on,
    /// or `UNKNOWN`. Only freeing makes runs longer.
    longest: Vec<u8>,
    size: u64,
    used: u64,
    /// The end of the last unit in use.
    end: u64,
    /// Where the next search below the end starts.
    next: u64,
    /// Runs taken below where a write failed since one was taken beyond.
    below: u64,
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
            end: 0,
            next: 0,
            below: 0,
            #[cfg(test)]
            words: std::cell::Cell::new(0),
        }
    }

    /// Takes what is free below the end before the file grows, as far as that makes runs long enough
    /// and no long search. Beyond `grow_to` it grows only if there is no room at all below.
    fn take(&mut self, wanted: u64, least: u64, grow_to: u64) -> Option<(u64, u64)> {
        if least == 0 || least > self.size - self.used {
            return None;
        }
        let above = self.size - self.end;
        let may_grow_by = above.min(grow_to.saturating_sub(self.end));
        let may_grow = may_grow_by >= least;
        let enough = if !may_grow {
            least
        } else if self.used < self.end / SPARSE {
            (wanted / SHORT).max(least)
        } else {
            wanted
        };
        let (start, count) = match self.find_near(wanted, enough) {
            Some(run) => run,
            None if may_grow => (self.end, wanted.min(may_grow_by)),
            None => match self.find_anywhere(wanted, least) {
                Some(run) => run,
                None if above >= least => (self.end, wanted.min(above)),
                None => return None,
            },
        };
        let end = self.end.max(start + count);
        let words = end.div_ceil(BITS) as usize;
        if words > self.taken.len() {
            let chunks = end.div_ceil(CHUNK) as usize;
            self.longest.try_reserve(chunks - self.longest.len()).ok()?;
            self.taken.try_reserve(words - self.taken.len()).ok()?;
            self.longest.resize(chunks, UNKNOWN);
            self.taken.resize(words, 0);
        }
        if start < self.end {
            self.next = start + count;
        }
        self.end = end;
        self.set(start, count, true);
        self.used += count;
        Some((start, count))
    }

    /// The first run of `wanted` free units behind the last one found, or else the longest of those
    /// near it, of at least `enough`. Pages written together then lie together. The next search goes
    /// on behind these if there is none.
    fn find_near(&mut self, wanted: u64, enough: u64) -> Option<(u64, u64)> {
        if self.end - self.used < enough {
            return None;
        }
        let from = if self.next < self.end { self.next } else { 0 };
        let mut to = from + NEAR;
        let mut best = self.find(from, to.min(self.end), wanted);
        if to > self.end {
            to = (to - self.end).min(from);
            if best.1 < wanted {
                let again = self.find(0, to, wanted);
                best = if again.1 > best.1 { again } else { best };
            }
        }
        self.next = to;
        (best.1 >= enough).then_some(best)
    }

    /// The next run of at least `least` free units below the end, wherever it is.
    fn find_anywhere(&mut self, wanted: u64, least: u64) -> Option<(u64, u64)> {
        if self.end - self.used < least {
            return None;
        }
        let chunks = self.end.div_ceil(CHUNK);
        let first = (self.next / CHUNK).min(chunks);
        (first..chunks)
            .chain(0..first)
            .find_map(|chunk| self.find_in_chunk(chunk, wanted, least))
    }

    /// A run of at least `least` free units that starts in a chunk.
    fn find_in_chunk(&mut self, chunk: u64, wanted: u64, least: u64) -> Option<(u64, u64)> {
        let longest = self.longest.get(chunk as usize).copied();
        if longest.is_some_and(|longest| u64::from(longest) < least.min(UNKNOWN.into())) {
            return None;
        }
        let start = chunk * CHUNK;
        let end = (start + CHUNK + least - 1).min(self.end);
        let (start, count) = self.find(start, end, least);
        if count >= least {
            return Some(self.find(start, start.saturating_add(wanted).min(self.end), wanted));
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
            let word = self.taken[(at / BITS) as usize];
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
        if start + count == self.end {
            self.lower_end();
        }
    }

    /// Brings the end to the last unit in use. What it looks at was written since the end was there, so
    /// all of it takes no longer than the writes.
    fn lower_end(&mut self) {
        while self.end > 0 {
            let word = (self.end - 1) / BITS;
            let bits = self.end - word * BITS;
            let taken = self.taken[word as usize] << (BITS - bits);
            let free = u64::from(taken.leading_zeros()).min(bits);
            self.end -= free;
            if free < bits {
                break;
            }
        }
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

        fn fail(&mut self, index: usize) {
            let (start, count) = self.runs.swap_remove(index);
            self.units.note_failed(start, count);
            self.owned[start as usize..(start + count) as usize].fill(false);
        }

        fn end(&self) -> u64 {
            let ends = self.runs.iter().map(|(start, count)| start + count);
            ends.max().unwrap_or(0)
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
                } else if word.is_multiple_of(63) && !model.runs.is_empty() {
                    model.fail(model.runs.len() - 1);
                } else if !model.runs.is_empty() {
                    model.give_back((word >> 16) as usize % model.runs.len());
                }
                let used: u64 = model.runs.iter().map(|run| run.1).sum();
                assert_eq!(model.units.used(), used);
                assert_eq!(model.units.end(), model.end());
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
    #[cfg_attr(miri, ignore = "minutes: millions of units")]
    fn a_file_grows_by_whole_runs_and_has_its_long_gaps_filled() {
        let records = (1 << 22) / 3;
        let units = Units::new(1 << 40);
        for _ in 0..records {
            units.take(3, 3).unwrap();
        }
        units.give_back((0..records).step_by(2).map(|record| (record * 3, 3)));
        let gap = records / 4 * 6;
        units.give_back((0..32).map(|record| (gap + 3 + 6 * record, 3)));
        words(&units);
        let mut starts = (0..=units.end() / NEAR).map(|_| {
            let (start, count) = units.take(192, 3).unwrap();
            assert_eq!(count, 192);
            let looked_at = words(&units);
            assert!(looked_at <= NEAR / BITS + 2, "{looked_at} words");
            start
        });
        assert!(starts.any(|start| start.abs_diff(gap) < 6));
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes: many units")]
    fn a_file_that_failed_to_grow_is_filled_first() {
        let units = Units::new(1 << 20);
        while units.take(3, 3).unwrap().0 < 30_000 {}
        let (start, count) = units.take(90, 3).unwrap();
        units.note_failed(start, count);
        assert_eq!(units.end(), start);
        units.give_back([(3, 3), (9, 3), (20_001, 3)]);
        let mut found = [(); 3].map(|()| units.take(90, 3).unwrap());
        found.sort_unstable();
        assert_eq!(found, [(3, 3), (9, 3), (20_001, 3)]);
        // It is tried where there is no room below, and grows again once that succeeds.
        assert_eq!(units.take(90, 3), Some((start, 90)));
        units.give_back([(3, 3)]);
        units.note_written(start, 90);
        assert_eq!(units.take(90, 3), Some((start + 90, 90)));
    }

    /// A file of records of three units each, where a write behind the last one failed. Returns where that was.
    fn failed_to_grow() -> (Units, u64) {
        let units = Units::new(1 << 20);
        while units.take(3, 3).unwrap().0 < 30_000 {}
        let (start, count) = units.take(90, 3).unwrap();
        units.note_failed(start, count);
        (units, start)
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes: many units")]
    fn a_file_grows_up_to_where_it_failed() {
        let (units, failed_at) = failed_to_grow();
        let end = 10_002;
        units.give_back((end / 3..failed_at / 3).map(|record| (record * 3, 3)));
        units.give_back((0..end / 3).step_by(2).map(|record| (record * 3, 3)));
        assert_eq!(units.end(), end);
        let all = failed_at - end;
        assert_eq!(units.take(192, 3), Some((end, 192)));
        assert_eq!(units.take(1 << 19, 3), Some((end + 192, all - 192)));
        assert!(units.take(192, 3).unwrap().0 < end);
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes: many units")]
    fn a_file_tries_again_to_grow_beyond_where_it_failed() {
        let (units, failed_at) = failed_to_grow();
        units.give_back(
            (0..failed_at / 3 - 1)
                .step_by(2)
                .map(|record| (record * 3, 3)),
        );
        for _ in 0..3 {
            let below = |_: &u64| units.take(90, 3).unwrap().0 < failed_at;
            assert_eq!((0..=RETRY).take_while(below).count() as u64, RETRY);
            units.note_failed(failed_at, 90);
        }
        while units.take(90, 3).unwrap().0 < failed_at {}
        units.note_written(failed_at, 90);
        assert_eq!(units.take(90, 3), Some((failed_at + 90, 90)));
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
