//! Finding a slot for an object: in its own class, in one a little larger, or in a new zspage.

use crate::{error::AllocError, pool::Pool, source::PageSource, word::ObjectWord};

/// A store may use a slot of a larger class if that is at most 1/`BORROWED_PART` larger than its
/// own. A smaller value finds free slots more often and wastes more of each.
const BORROWED_PART: usize = 16;

impl<S: PageSource> Pool<S> {
    /// Takes a slot of a class, or of a slightly larger one.
    #[inline(never)]
    pub(crate) fn allocate(
        &self,
        shard: usize,
        class_index: usize,
    ) -> Result<ObjectWord, AllocError> {
        let context = self.context(shard, class_index);
        let bin = &self.shards[shard].bins[class_index].state;
        if let Some(word) = bin.lock().allocate(&context) {
            return Ok(word);
        }
        // Deferred frees may provide a slot, or memory for one.
        if self.drain_under_pressure()
            && let Some(word) = bin.lock().allocate(&context)
        {
            return Ok(word);
        }
        // Before a new zspage: a free slot of a slightly larger class,
        if let Some(word) = self.borrow_slot(shard, class_index) {
            return Ok(word);
        }
        // or a partly used zspage of another shard.
        for other in (0..self.shards.len()).filter(|&other| other != shard) {
            let given = self.shards[other].bins[class_index]
                .state
                .try_lock()
                .and_then(|mut bin| bin.give_away(&self.context(other, class_index), shard));
            if let Some(page) = given {
                return Ok(bin.lock().adopt(&context, page));
            }
        }
        let page = self.take_run(shard, context.class.pages())?;
        Ok(bin.lock().open(&context, page, shard))
    }

    /// Takes a slot of a class that is at most [`BORROWED_PART`] larger and has a partly used zspage
    /// besides the one it allocates from.
    ///
    /// Zspages seldom empty by themselves while the number of objects of a class varies, so classes
    /// that have free slots lend them. A growing class lends none: its free slots are all in its
    /// current zspage.
    fn borrow_slot(&self, shard: usize, class_index: usize) -> Option<ObjectWord> {
        let classes = self.classes.classes();
        let most = classes[class_index].size() / BORROWED_PART;
        let size = classes[class_index].size();
        (class_index + 1..classes.len())
            .take_while(|&larger| classes[larger].size() - size <= most)
            .find_map(|larger| {
                let mut bin = self.shards[shard].bins[larger].state.lock();
                bin.lend(&self.context(shard, larger))
            })
    }
}
