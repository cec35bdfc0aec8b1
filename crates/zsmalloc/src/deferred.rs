//! Deferred frees.

use crate::{
    class::SizeClass, error::MisuseError, pool::Pool, ring::Ring, source::PageSource,
    sync::atomic::Ordering, word::ObjectWord,
};

/// Words freed at once without a buffer from the heap. They are collected on the stack, because a
/// free must not need memory.
const DRAIN_BATCH: usize = 1024;

/// Words that a thread frees when it finds its queue full.
const SYNCHRONOUS_BATCH: usize = 64;

/// What to do while another thread consumes a queue.
#[derive(Debug, Clone, Copy)]
enum Consumer {
    Wait,
    IfFree,
}

impl<S: PageSource> Pool<S> {
    /// Frees an object, but leaves the work to the next [`flush_deferred`](Pool::flush_deferred),
    /// to a [`Drainer`](crate::Drainer) or to a store that needs the memory. It costs one atomic
    /// instruction on memory of this thread's shard and never waits. When the shard's part of
    /// [`Config::deferred_bytes`](crate::Config::deferred_bytes) is used up, the thread frees some
    /// objects at once.
    ///
    /// The object counts as freed from now on: it must not be read or freed again.
    ///
    /// # Panics
    ///
    /// If `word` cannot be a word of this pool, or is freed at once and names no stored object. A
    /// deferred double free is found later: [`Pool::flush_deferred`] returns it and
    /// [`PoolStats::deferred_misuse`](crate::PoolStats::deferred_misuse) counts it.
    #[inline]
    pub fn free_deferred(&self, word: ObjectWord) {
        let Some(class) = self.classes.get(word.class()) else {
            panic!("{}", MisuseError::Foreign(word));
        };
        let Some(ring) = &self.shards[self.current_shard()].deferred else {
            return self.free(word);
        };
        if ring.push(word, class.size()) {
            self.drain_signal.after_push(ring);
        } else {
            self.free_while_full(ring, word, class.size());
        }
    }

    /// Drains a bounded part of a full queue, which is cheaper for each word than freeing one
    /// object.
    #[cold]
    fn free_while_full(&self, ring: &Ring, word: ObjectWord, bytes: usize) {
        // Misuse among the drained words is counted, not reported to this caller.
        let mut room = [ObjectWord::PLACEHOLDER; SYNCHRONOUS_BATCH];
        let (taken, _counted) = self.drain(ring, &mut room, Consumer::IfFree);
        if taken == 0 || !ring.push(word, bytes) {
            self.free(word);
        }
    }

    /// Frees all objects whose free was deferred before the call. Returns their number.
    ///
    /// # Errors
    ///
    /// A word among them that named no stored object. All others were freed.
    pub fn flush_deferred(&self) -> Result<usize, MisuseError> {
        let mut room = [ObjectWord::PLACEHOLDER; DRAIN_BATCH];
        let freed = self.flush_through(&mut room);
        // Other threads may have taken some and not freed them yet.
        self.rings().for_each(Ring::wait_until_finished);
        freed
    }

    /// Like [`Pool::flush_deferred`], with as many words at once as `room` holds, but does not wait
    /// for words that other threads took.
    pub(crate) fn flush_through(&self, room: &mut [ObjectWord]) -> Result<usize, MisuseError> {
        let mut freed = 0;
        let mut result = Ok(());
        for ring in self.rings() {
            // Bounded by the words that were there: others may defer frees forever.
            let mut left = ring.len();
            while left > 0 {
                let batch = left.min(room.len());
                let room = &mut room[..batch];
                let (taken, outcome) = self.drain(ring, room, Consumer::Wait);
                freed += taken;
                left -= taken;
                result = result.and(outcome);
                if taken == 0 {
                    // A producer is about to write its word.
                    crate::sync::yield_now();
                    left = left.min(ring.len());
                }
            }
        }
        result.map(|()| freed)
    }

    /// The queues of all shards.
    fn rings(&self) -> impl Iterator<Item = &Ring> {
        self.shards
            .iter()
            .filter_map(|shard| shard.deferred.as_ref())
    }

    /// Bytes of the slots whose free was deferred and not yet begun.
    pub fn deferred_bytes(&self) -> usize {
        self.rings().map(Ring::bytes).sum()
    }

    /// Words whose free was deferred and not yet begun.
    pub(crate) fn deferred_words(&self) -> usize {
        self.rings().map(Ring::len).sum()
    }

    /// Does deferred frees because memory is needed, unless another thread is doing them. Returns
    /// whether there were any.
    pub(crate) fn drain_under_pressure(&self) -> bool {
        self.deferred_bytes() > 0 && self.drain_some()
    }

    // Not inlined: its buffer would be on the stack of every store.
    #[cold]
    #[inline(never)]
    fn drain_some(&self) -> bool {
        let mut room = [ObjectWord::PLACEHOLDER; DRAIN_BATCH];
        let mut freed = 0;
        for ring in self.rings() {
            if ring.len() > 0 {
                freed += self.drain(ring, &mut room, Consumer::IfFree).0;
            }
        }
        freed > 0
    }

    /// Does at most `room.len()` deferred frees. Returns their number.
    fn drain(
        &self,
        ring: &Ring,
        room: &mut [ObjectWord],
        consumer: Consumer,
    ) -> (usize, Result<(), MisuseError>) {
        let bytes_of = |word: ObjectWord| self.classes.get(word.class()).map_or(0, SizeClass::size);
        let taken = match consumer {
            Consumer::Wait => ring.take(room, bytes_of),
            Consumer::IfFree => ring.try_take(room, bytes_of),
        };
        let outcome = self.free_words(&mut room[..taken]);
        ring.finished(taken);
        if outcome.is_err() {
            self.deferred_misuse.fetch_add(1, Ordering::Relaxed);
        }
        (taken, outcome)
    }
}
