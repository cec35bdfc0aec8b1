//! Finding a slot for an object: in its own class, in one a little larger, or in a new zspage.

use crate::{error::AllocError, pool::Pool, source::PageSource, word::ObjectWord};

/// An object may take the slot of a class that is larger than its own by this part. On the recorded
/// traces an eighth gains little more than a sixteenth, and a 32nd only half as much in some.
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
        // Memory is needed: what was deferred may give some.
        if self.drain_under_pressure()
            && let Some(word) = bin.lock().allocate(&context)
        {
            return Ok(word);
        }
        // Before a new zspage is made, a free slot of a slightly larger class will do,
        if let Some(word) = self.borrow_slot(shard, class_index) {
            return Ok(word);
        }
        // or a zspage with free slots in another shard.
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
    /// How many objects a class has goes up and down, but its zspages seldom become empty by
    /// themselves. So the classes that have fewer just now lend to those that have more. One that
    /// grows has nothing to lend: all it has free is in one zspage.
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
