//! Freeing many objects at once.

use crate::{
    error::MisuseError, pool::Pool, release::Released, source::PageSource, word::ObjectWord,
};

impl<S: PageSource> Pool<S> {
    /// Frees many objects at once, cheaper than one by one: the words are sorted, the lock of each
    /// bin is taken once, zspages that become empty are released after all locks are dropped, and
    /// their memory is given back in batches.
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
    /// The first word, in their sorted order, that names no stored object. All others were freed.
    pub fn try_free_bulk(&self, words: &mut [ObjectWord]) -> Result<(), MisuseError> {
        words.sort_unstable();
        let mut released = Released::new();
        let mut result = Ok(());
        let mut rest = &*words;
        while !rest.is_empty() {
            let outcome;
            (rest, outcome) = self.free_run(rest, &mut released);
            if result.is_ok() {
                result = outcome;
            }
        }
        if !released.is_empty() {
            self.release(released);
        }
        result
    }

    /// Frees the first words of `words`, as far as one bin's lock reaches, and gives the others
    /// back.
    fn free_run<'w>(
        &self,
        words: &'w [ObjectWord],
        released: &mut Released,
    ) -> (&'w [ObjectWord], Result<(), MisuseError>) {
        let first = words[0];
        let resolved = self.resolve(first).and_then(|(class, zspage)| {
            let (bin, context) = self.lock_bin_of(first, class, zspage)?;
            Ok((bin, context, zspage.owner()))
        });
        let (mut bin, context, owner) = match resolved {
            Ok(resolved) => resolved,
            Err(error) => return (&words[1..], Err(error)),
        };
        let mut result = Ok(());
        let mut rest = words;
        while let Some(&next) = rest.first() {
            let Ok((_, zspage)) = self.resolve(next) else {
                break;
            };
            // The lock is the right one for this zspage too if its class and owner are the same.
            let same_bin = next.class() == first.class()
                && zspage.class() == Some(next.class())
                && zspage.owner() == owner;
            if !same_bin {
                break;
            }
            let count = rest
                .iter()
                .take_while(|word| same_zspage(**word, next))
                .count();
            let mut freed = 0;
            for word in &rest[..count] {
                if word.index() >= context.class.objects() {
                    result = result.and(Err(MisuseError::Foreign(*word)));
                } else if zspage.free_slot(word.index()) {
                    freed += 1;
                } else {
                    result = result.and(Err(MisuseError::NotStored(*word)));
                }
            }
            if freed > 0
                && let Some(page) = bin.after_free(&context, next.page(), zspage, freed)
            {
                released.push(&self.arenas, page);
            }
            rest = &rest[count..];
        }
        (rest, result)
    }
}

fn same_zspage(one: ObjectWord, other: ObjectWord) -> bool {
    one.class() == other.class() && one.page() == other.page()
}
