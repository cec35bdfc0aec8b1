//! Freeing many objects at once.

use crate::{
    error::MisuseError,
    pool::Pool,
    released::Released,
    source::PageSource,
    sync::atomic::Ordering,
    word::ObjectWord,
    zspage::{Link, NO_LINK, UNTOUCHED, Zspage},
};

impl<S: PageSource> Pool<S> {
    /// Frees many objects, cheaper than one by one: words are sorted by class, each bin is locked
    /// once for up to 1024 of them, and emptied zspages are released with no lock held. Their
    /// memory is returned to the kernel in batches, by the pool's [`Drainer`](crate::Drainer) if
    /// there is one, within [`Config::deferred_bytes`](crate::Config::deferred_bytes).
    ///
    /// The contents of `words` are unspecified afterwards. More than 1024 words are sorted in a
    /// buffer from the heap, and more slowly without one if there is no memory.
    ///
    /// # Panics
    ///
    /// If a word names no stored object, after all others were freed; see [`Pool::try_free_bulk`].
    pub fn free_bulk(&self, words: &mut [ObjectWord]) {
        if let Err(error) = self.try_free_bulk(words) {
            panic!("{error}");
        }
    }

    /// Like [`Pool::free_bulk`], with misuse as an error.
    ///
    /// # Errors
    ///
    /// One of the words that name no stored object. All others were freed.
    pub fn try_free_bulk(&self, words: &mut [ObjectWord]) -> Result<(), MisuseError> {
        let _bulk_free = self.drain_signal.free_begins();
        self.free_words(words)
    }

    /// Frees words without counting as a bulk free that delays the drainer.
    pub(crate) fn free_words(&self, words: &mut [ObjectWord]) -> Result<(), MisuseError> {
        let mut released = Released::new();
        let result = if words.len() > FEW {
            self.free_by_class(words, &mut released)
        } else {
            self.free_group(words, &mut released)
        };
        if !released.is_empty() {
            self.release(released);
        }
        result
    }

    /// Frees words, a class at a time.
    #[inline(never)]
    fn free_by_class(
        &self,
        words: &mut [ObjectWord],
        released: &mut Released,
    ) -> Result<(), MisuseError> {
        let mut unsorted = Vec::new();
        // Positions are 32 bits wide.
        let from_heap = ON_STACK + 1..=u32::MAX as usize;
        if from_heap.contains(&words.len()) && unsorted.try_reserve_exact(words.len()).is_ok() {
            unsorted.extend_from_slice(words);
            return self.free_sorted(words, &unsorted, released);
        }
        let mut result = Ok(());
        for words in words.chunks_mut(ON_STACK) {
            let mut unsorted = [ObjectWord::PLACEHOLDER; ON_STACK];
            let unsorted = &mut unsorted[..words.len()];
            unsorted.copy_from_slice(words);
            result = result.and(self.free_sorted(words, unsorted, released));
        }
        result
    }

    /// Frees words by class, sorting `unsorted` into `words`.
    fn free_sorted(
        &self,
        words: &mut [ObjectWord],
        unsorted: &[ObjectWord],
        released: &mut Released,
    ) -> Result<(), MisuseError> {
        let classes = self.classes().len();
        let ends = sort_by_class(unsorted, words, classes);
        let mut result = Ok(());
        let (mut start, mut fetched) = (0, 0);
        for &end in &ends[..=classes] {
            while start < end as usize {
                let next = (end as usize).min(start + MOST_UNDER_LOCK);
                fetched = self.fetch_records(words, fetched, next + FETCHED_AHEAD);
                result = result.and(self.free_group(&mut words[start..next], released));
                start = next;
            }
        }
        result
    }

    /// Prefetches the zspage records of the words from position `from` up to `to`: otherwise each
    /// look-up would be a cache miss. Returns the position reached.
    fn fetch_records(&self, words: &[ObjectWord], from: usize, to: usize) -> usize {
        let mut next = from;
        while next < to.min(words.len()) {
            if let Ok((_, zspage)) = self.resolve(words[next]) {
                prefetch(zspage);
            }
            next += run_of_one_zspage(&words[next..]);
        }
        next
    }

    /// Frees words, few enough to hold a lock for all of them. Fastest if they are of one class.
    fn free_group(
        &self,
        mut words: &mut [ObjectWord],
        released: &mut Released,
    ) -> Result<(), MisuseError> {
        let mut result = Ok(());
        while let Some(&first) = words.first() {
            let (others, outcome) = self.free_of_one_bin(first, words, released);
            result = result.and(outcome);
            words = &mut words[..others];
        }
        result
    }

    /// Frees the words that belong to the same bin as `first`, which is the first of them. Moves
    /// the others to the front and returns their number.
    fn free_of_one_bin(
        &self,
        first: ObjectWord,
        words: &mut [ObjectWord],
        released: &mut Released,
    ) -> (usize, Result<(), MisuseError>) {
        let resolved = self.resolve(first).and_then(|(class, zspage)| {
            let (bin, context) = self.lock_bin_of(first, class, zspage)?;
            Ok((bin, context, zspage.owner()))
        });
        let (mut bin, context, owner) = match resolved {
            Ok(resolved) => resolved,
            Err(error) => {
                let others = words.len() - 1;
                words.swap(0, others);
                return (others, Err(error));
            }
        };
        // The bin's lock covers a word if the class of the word and of its zspage, and then the
        // owner, match. A stale word may name a zspage that serves another class now.
        let of_this_bin = |word: ObjectWord| {
            let (_, zspage) = self.resolve(word).ok()?;
            let right = word.class() == context.class_index
                && zspage.class() == Some(context.class_index)
                && zspage.owner() == owner;
            right.then_some(zspage)
        };
        let mut result = Ok(());
        let mut others = 0;
        let mut touched = NO_LINK;
        let mut start = 0;
        while start < words.len() {
            let first = words[start];
            let end = start + run_of_one_zspage(&words[start..]);
            let run = start..end;
            start = end;
            let Some(zspage) = of_this_bin(first) else {
                words.copy_within(run.clone(), others);
                others += run.len();
                continue;
            };
            let used = zspage.used();
            for &word in &words[run] {
                if word.index() >= context.class.objects() {
                    result = result.and(Err(MisuseError::Foreign(word)));
                } else if zspage.free_slot(word.index()) {
                    bin.count_free(zspage);
                } else {
                    result = result.and(Err(MisuseError::NotStored(word)));
                }
            }
            let freed_some = zspage.used() < used;
            if freed_some && zspage.next_touched.load(Ordering::Relaxed) == UNTOUCHED {
                zspage.next_touched.store(touched, Ordering::Relaxed);
                touched = first.page().0;
            }
        }
        // Each zspage once, not once for each object.
        while let Some(page) = Link(touched).get() {
            let zspage = self.arenas.zspage(page);
            touched = zspage.next_touched.load(Ordering::Relaxed);
            zspage.next_touched.store(UNTOUCHED, Ordering::Relaxed);
            if let Some(page) = bin.reclassify(&context, page, zspage) {
                released.push(&self.arenas, page);
            }
        }
        (others, result)
    }
}

/// Words, up to which they are freed unsorted: sorting costs more than repeated look-ups.
const FEW: usize = 16;

/// Words freed under one hold of a bin's lock: bounds how long a store of the class waits.
const MOST_UNDER_LOCK: usize = 1024;

/// Words sorted in a buffer on the stack, so that freeing them needs no memory and works in a
/// signal handler. Without memory for a larger buffer, more are sorted in pieces of this size.
const ON_STACK: usize = 1024;

/// Distance of the prefetch, in words: long enough to hide the miss, short enough for the line to
/// be in the cache still.
const FETCHED_AHEAD: usize = 1024;

/// Prefetches a record.
fn prefetch(record: &Zspage) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; it reads nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(record).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = record;
}

/// The number of words at the start of `words` that name objects of the same zspage.
fn run_of_one_zspage(words: &[ObjectWord]) -> usize {
    let other = |word: &ObjectWord| !word.is_beside(words[0]);
    words.iter().position(other).unwrap_or(words.len())
}

const MAX_GROUPS: usize = ObjectWord::MAX_CLASSES + 1;

/// Sorts words by class, stably, so that words of one zspage, mostly stored one after another, stay
/// together. Returns the end of each class. Classes from `classes` on, which no pool has, come
/// last, as one.
fn sort_by_class(
    unsorted: &[ObjectWord],
    sorted: &mut [ObjectWord],
    classes: usize,
) -> [u32; MAX_GROUPS] {
    let group = |word: ObjectWord| word.class().min(classes);
    let mut next = [0; MAX_GROUPS];
    for &word in unsorted {
        next[group(word)] += 1;
    }
    let mut start = 0;
    for next in &mut next[..=classes] {
        let count = *next;
        *next = start;
        start += count;
    }
    for &word in unsorted {
        let next = &mut next[group(word)];
        sorted[*next as usize] = word;
        *next += 1;
    }
    // The position for the next word of a class is its end.
    next
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::geometry::PageNumber;

    #[test]
    fn words_are_sorted_by_class() {
        let foreign = ObjectWord::MAX_CLASSES - 1;
        let unsorted: Vec<ObjectWord> = (0..5000_usize)
            .map(|n| {
                let class = [n * n % 250, 0, foreign][n % 3];
                ObjectWord::new(class, PageNumber(n as u32), n % 256)
            })
            .collect();
        let mut sorted = unsorted.clone();
        let ends = sort_by_class(&unsorted, &mut sorted, 250);
        let mut start = 0;
        for (class, &end) in ends[..=250].iter().enumerate() {
            let end = end as usize;
            let of_class = |word: &&ObjectWord| word.class().min(250) == class;
            let expected: Vec<_> = unsorted.iter().filter(of_class).copied().collect();
            assert_eq!(sorted[start..end], expected);
            start = end;
        }
        assert_eq!(start, sorted.len());
    }

    #[test]
    fn runs_end_where_the_zspage_does() {
        let word = |class, page, index| ObjectWord::new(class, PageNumber(page), index);
        let words = [word(3, 7, 0), word(3, 7, 255), word(3, 8, 1), word(4, 8, 1)];
        assert_eq!(run_of_one_zspage(&words), 2);
        assert_eq!(run_of_one_zspage(&words[2..]), 1);
        assert_eq!(run_of_one_zspage(&words[3..]), 1);
        assert_eq!(run_of_one_zspage(&[]), 0);
    }
}
