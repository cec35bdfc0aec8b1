//! Allocation of a file's units.

/// A bit for each unit up to the last one ever used.
#[derive(Debug)]
pub(super) struct Units {
    taken: Vec<u64>,
    size: u64,
    used: u64,
    /// Where the next search starts.
    next: u64,
}

const BITS: u64 = u64::BITS as u64;

impl Units {
    pub(super) fn new(size: u64) -> Self {
        Self {
            taken: Vec::new(),
            size,
            used: 0,
            next: 0,
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// The end of the units ever used.
    pub(super) fn reached(&self) -> u64 {
        (self.taken.len() as u64 * BITS).min(self.size)
    }

    /// Allocates up to `wanted` contiguous units, as many as possible, at least `least`. Returns
    /// the first and their number.
    pub(super) fn take(&mut self, wanted: u64, least: u64) -> Option<(u64, u64)> {
        if least == 0 || least > self.size - self.used {
            return None;
        }
        // Continue behind the last allocation first: pages written together then lie together.
        let mut best = self.find(self.next, self.size, wanted);
        if best.1 < wanted {
            let again = self.find(0, self.next.saturating_add(wanted).min(self.size), wanted);
            if again.1 > best.1 {
                best = again;
            }
        }
        let (start, count) = best;
        if count < least {
            return None;
        }
        let words = (start + count).div_ceil(BITS) as usize;
        if words > self.taken.len() {
            self.taken.try_reserve(words - self.taken.len()).ok()?;
            self.taken.resize(words, 0);
        }
        self.set(start, count, true);
        self.used += count;
        self.next = start + count;
        Some((start, count))
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
        (best.0, best.1.min(wanted))
    }

    /// Frees units.
    ///
    /// # Panics
    ///
    /// If one of them is free: an entry was invalid.
    pub(super) fn give_back(&mut self, start: u64, count: u64) {
        self.set(start, count, false);
        self.used -= count;
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
    use super::*;

    #[test]
    fn runs_never_overlap_and_all_space_is_found() {
        let size = 1000;
        let mut units = Units::new(size);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut owner = vec![false; size as usize];
        let mut random = 12345_u64;
        for _ in 0..20_000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let count = 1 + (random >> 33) % 90;
            if random >> 63 == 0 {
                let least = 1 + (random >> 50) % count;
                if let Some((start, count)) = units.take(count, least) {
                    assert!(count >= least);
                    for unit in start..start + count {
                        assert!(!std::mem::replace(&mut owner[unit as usize], true));
                    }
                    runs.push((start, count));
                } else {
                    let mut longest = 0;
                    let mut length = 0;
                    for &taken in &owner {
                        length = if taken { 0 } else { length + 1 };
                        longest = longest.max(length);
                    }
                    assert!(longest < least, "{longest} units were free");
                }
            } else if !runs.is_empty() {
                let (start, count) = runs.swap_remove((random >> 40) as usize % runs.len());
                units.give_back(start, count);
                owner[start as usize..(start + count) as usize].fill(false);
            }
            assert_eq!(units.used(), runs.iter().map(|run| run.1).sum::<u64>());
        }
    }

    #[test]
    #[should_panic(expected = "in the wrong state")]
    fn a_double_free_panics() {
        let mut units = Units::new(100);
        let (start, _) = units.take(7, 7).unwrap();
        units.give_back(start, 7);
        units.give_back(start, 7);
    }
}
