//! Freeing many objects at once.

use crate::{
    error::MisuseError,
    pool::Pool,
    release::Released,
    source::PageSource,
    sync::atomic::Ordering,
    word::ObjectWord,
    zspage::{Link, NO_LINK, UNTOUCHED},
};

impl<S: PageSource> Pool<S> {
    /// Frees many objects at once, cheaper than one by one: the words are grouped by class, the lock
    /// of each bin is taken once for up to a thousand of them, zspages that become empty are
    /// released after all locks are dropped, and their memory is given back in batches: by the
    /// pool's
    /// [`Drainer`](crate::Drainer), if it has one, as far as
    /// [`Config::deferred_bytes`](crate::Config::deferred_bytes) lets memory wait for that.
    ///
    /// `words` is room to work in: what it holds afterwards is of no use.
    ///
    /// # Panics
    ///
    /// If some word names no stored object, after all the others were freed; see
    /// [`Pool::try_free_bulk`].
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
        let _going_on = self.drain_signal.free_begins();
        self.free_words(words)
    }

    /// Frees words, not as one of those that a drainer makes way for.
    pub(crate) fn free_words(&self, words: &mut [ObjectWord]) -> Result<(), MisuseError> {
        if words.len() > FEW {
            self.free_by_class(words)
        } else {
            self.free_groups(std::iter::once(words))
        }
    }

    /// Frees words, a class at a time.
    #[inline(never)]
    fn free_by_class(&self, words: &mut [ObjectWord]) -> Result<(), MisuseError> {
        self.free_groups(Groups::of(words, self.classes().len()))
    }

    /// Frees groups of words, best of one class each.
    fn free_groups<'a>(
        &self,
        groups: impl Iterator<Item = &'a mut [ObjectWord]>,
    ) -> Result<(), MisuseError> {
        let mut released = Released::new();
        let mut result = Ok(());
        for group in groups {
            result = result.and(self.free_group(group, &mut released));
        }
        if !released.is_empty() {
            self.release(released);
        }
        result
    }

    /// Frees words, best of one class.
    fn free_group(
        &self,
        words: &mut [ObjectWord],
        released: &mut Released,
    ) -> Result<(), MisuseError> {
        let mut result = Ok(());
        for mut words in words.chunks_mut(MOST_UNDER_LOCK) {
            while let Some(&first) = words.first() {
                let (others, outcome) = self.free_of_one_bin(first, words, released);
                result = result.and(outcome);
                words = &mut words[..others];
            }
        }
        result
    }

    /// Frees those of `words` that belong to the same bin as `first`, the first of them. Moves the
    /// others to the front and returns how many they are.
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
        // The lock is the right one if the word's class and its zspage's, and then the owner, are
        // the same. A stale word may name a zspage that serves another class now.
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
        for start in (0..words.len()).step_by(LOOKED_UP) {
            let end = words.len().min(start + LOOKED_UP);
            // In a row, so that the processor fetches the records of all of them at once.
            let mut zspages = [None; LOOKED_UP];
            for (zspage, word) in zspages.iter_mut().zip(&words[start..end]) {
                *zspage = of_this_bin(*word);
            }
            for (position, zspage) in (start..end).zip(zspages) {
                let word = words[position];
                let Some(zspage) = zspage else {
                    words[others] = word;
                    others += 1;
                    continue;
                };
                if !zspage.free_slot(word.index()) {
                    result = result.and(Err(MisuseError::NotStored(word)));
                    continue;
                }
                bin.count_free(zspage);
                if zspage.next_touched.load(Ordering::Relaxed) == UNTOUCHED {
                    zspage.next_touched.store(touched, Ordering::Relaxed);
                    touched = word.page().0;
                }
            }
        }
        // Each zspage once, however many of its objects went.
        while let Some(page) = Link(touched).get() {
            let zspage = self.arenas.zspage(page);
            touched = zspage.next_touched.load(Ordering::Relaxed);
            zspage.next_touched.store(UNTOUCHED, Ordering::Relaxed);
            if let Some(page) = bin.settle(&context, page, zspage) {
                released.push(&self.arenas, page);
            }
        }
        (others, result)
    }
}

/// So few words are freed as they come: grouping them costs more than looking at them repeatedly.
const FEW: usize = 16;

/// The records of so many words are looked up before the first of them changes.
const LOOKED_UP: usize = 16;

/// A store of the same class waits no longer than so many frees take.
const MOST_UNDER_LOCK: usize = 1024;

/// Sorts `words` by class, in place and in two passes, and returns where each class ends; those of
/// `classes` and above, which no pool has given out, come last, as one. (This is the "American
/// flag" sort. Inside a class the order does not matter: what is looked up is a cache line a
/// zspage.)
fn group_by_class(words: &mut [ObjectWord], classes: usize) -> [usize; MAX_GROUPS] {
    let group = |word: ObjectWord| word.class().min(classes);
    let mut next = [0; MAX_GROUPS];
    for word in &*words {
        next[group(*word)] += 1;
    }
    let mut ends = [0; MAX_GROUPS];
    let mut start = 0;
    for (next, end) in next.iter_mut().zip(&mut ends).take(classes + 1) {
        *end = start + *next;
        *next = start;
        start = *end;
    }
    for here in 0..=classes {
        while next[here] < ends[here] {
            let position = next[here];
            let home = group(words[position]);
            words.swap(position, next[home]);
            next[home] += 1;
        }
    }
    ends
}

const MAX_GROUPS: usize = ObjectWord::MAX_CLASSES + 1;

/// Words by class, those of each in turn.
struct Groups<'a> {
    rest: &'a mut [ObjectWord],
    ends: [usize; MAX_GROUPS],
    start: usize,
    class: usize,
    classes: usize,
}

impl<'a> Groups<'a> {
    fn of(words: &'a mut [ObjectWord], classes: usize) -> Self {
        Self {
            ends: group_by_class(words, classes),
            rest: words,
            start: 0,
            class: 0,
            classes,
        }
    }
}

impl<'a> Iterator for Groups<'a> {
    type Item = &'a mut [ObjectWord];

    fn next(&mut self) -> Option<Self::Item> {
        let end = *self.ends[..=self.classes].get(self.class)?;
        let (group, rest) = std::mem::take(&mut self.rest).split_at_mut(end - self.start);
        (self.rest, self.start) = (rest, end);
        self.class += 1;
        Some(group)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::zspage::PageNumber;

    #[test]
    fn words_are_grouped_by_class() {
        let foreign = ObjectWord::MAX_CLASSES - 1;
        let mut words: Vec<ObjectWord> = (0..5000_usize)
            .map(|n| {
                let class = [n * n % 250, 0, foreign][n % 3];
                ObjectWord::new(class, PageNumber(n as u32), n % 256)
            })
            .collect();
        let mut sorted = words.clone();
        sorted.sort_unstable();
        let ends = group_by_class(&mut words, 250);
        let mut start = 0;
        for (class, &end) in ends[..250].iter().enumerate() {
            assert!(words[start..end].iter().all(|word| word.class() == class));
            start = end;
        }
        assert!(words[start..].iter().all(|word| word.class() == foreign));
        assert_eq!(ends[250], words.len());
        words.sort_unstable();
        assert!(words == sorted);
    }
}
