//! Frees that are done later, by somebody else.

use crate::{
    class::SizeClass, error::MisuseError, pool::Pool, ring::Ring, source::PageSource,
    sync::atomic::Ordering, word::ObjectWord,
};

/// How many words are freed at once where there is no buffer for more. They are collected on the
/// stack: a free needs no memory.
const DRAIN_BATCH: usize = 1024;

/// How many words a thread that finds its queue full frees in place of its own.
const SYNCHRONOUS_BATCH: usize = 64;

/// What to do when another thread is taking words from a queue.
#[derive(Debug, Clone, Copy)]
enum Consumer {
    Wait,
    IfFree,
}

impl<S: PageSource> Pool<S> {
    /// Frees an object, but leaves the work to the next [`flush_deferred`](Pool::flush_deferred),
    /// to a [`Drainer`](crate::Drainer) or to a store that needs the memory. It costs one atomic
    /// instruction on memory of this thread's shard and never waits. When the shard's part of
    /// `Config::deferred_bytes` is used up, the object is freed at once.
    ///
    /// The object counts as freed from now on: it must not be read or freed again.
    ///
    /// # Panics
    ///
    /// If `word` cannot be a word of this pool, or is freed at once and names no stored object.
    /// A double free that is deferred is found out later; [`Pool::flush_deferred`] reports it and
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

    /// Makes some room in a full queue, which is cheaper than freeing one object, and bounds the
    /// time it takes.
    #[cold]
    fn free_while_full(&self, ring: &Ring, word: ObjectWord, bytes: usize) {
        // A misuse among the words is counted, not blamed on this caller.
        let mut room = [ObjectWord::PLACEHOLDER; SYNCHRONOUS_BATCH];
        let (taken, _counted) = self.drain(ring, &mut room, Consumer::IfFree);
        if taken == 0 || !ring.push(word, bytes) {
            self.free(word);
        }
    }

    /// Frees all objects whose free was deferred before the call. Returns how many there were.
    ///
    /// # Errors
    ///
    /// A word among them that named no stored object. All others were freed.
    pub fn flush_deferred(&self) -> Result<usize, MisuseError> {
        let mut room = [ObjectWord::PLACEHOLDER; DRAIN_BATCH];
        let freed = self.flush_through(&mut room);
        // Others may have taken some.
        self.rings().for_each(Ring::wait_for_takers);
        freed
    }

    /// Like [`Pool::flush_deferred`], with as many words at once as `room` holds, but for those that
    /// others are about to free.
    pub(crate) fn flush_through(&self, room: &mut [ObjectWord]) -> Result<usize, MisuseError> {
        let mut freed = 0;
        let mut result = Ok(());
        for ring in self.rings() {
            // Not more than were there: others may go on deferring for ever.
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

    /// Does deferred frees because memory is needed, without waiting for others who do the same.
    /// Returns whether any was done.
    pub(crate) fn drain_under_pressure(&self) -> bool {
        self.deferred_bytes() > 0 && self.drain_some()
    }

    // Apart: its room on the stack is not for every store.
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

    /// Does the deferred frees of at most `room.len()` words. Returns how many there were.
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
        ring.dealt_with(taken);
        if outcome.is_err() {
            self.deferred_misuse.fetch_add(1, Ordering::Relaxed);
        }
        (taken, outcome)
    }
}
