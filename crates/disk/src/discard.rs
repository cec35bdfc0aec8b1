//! Freeing of discarded blocks in the background.
//!
//! A discard detaches whole leaves from the map, which takes a pointer for each 2 MiB, and returns. A
//! worker collects their slots and frees them in bulk. A writer that finds no room frees what is left
//! itself.

use crate::block_map::{LEAF_BLOCKS, Leaf};
use crate::sync::{self, unpoisoned};
use memfold_swap::{SlotRanges, SwapSpace};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use zsmalloc::PageSource;

/// Leaves freed at a time. More makes fewer steps, and delays a writer that waits for room.
const LEAVES_AT_A_TIME: usize = 16;

/// Leaves of 2 KiB, which move as pointers under the locks.
pub(crate) type Leaves = Vec<Box<Leaf>>;

#[derive(Default)]
struct Queue {
    leaves: Leaves,
    /// Threads that free leaves which they have taken from the queue.
    freeing: usize,
    closed: bool,
}

struct Shared<S: PageSource> {
    space: Arc<SwapSpace<S>>,
    queue: Mutex<Queue>,
    changed: Condvar,
    backlog: Arc<Backlog>,
}

/// Counts the blocks of leaves that are not freed yet: in the queue or being freed.
#[derive(Debug, Default)]
pub(crate) struct Backlog(AtomicU64);

impl Backlog {
    /// Their number.
    pub(crate) fn blocks(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Bytes of these leaves.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks() / LEAF_BLOCKS * size_of::<Leaf>() as u64
    }
}

/// Frees discarded leaves. Dropping it frees what is left.
pub(crate) struct Discarder<S: PageSource + 'static> {
    shared: Arc<Shared<S>>,
    worker: Option<JoinHandle<()>>,
    /// Free in the thread that discards.
    in_caller: bool,
}

impl<S: PageSource + 'static> Discarder<S> {
    /// Starts the worker.
    pub(crate) fn new(space: Arc<SwapSpace<S>>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            space,
            queue: Mutex::default(),
            changed: Condvar::new(),
            backlog: Arc::default(),
        });
        let its = shared.clone();
        let builder = std::thread::Builder::new().name("memfold-discard".to_owned());
        let worker = builder.spawn(move || its.work())?;
        Ok(Self {
            shared,
            worker: Some(worker),
            in_caller: false,
        })
    }

    /// Frees in the thread that discards, or in the worker.
    pub(crate) fn set_in_caller(&mut self, in_caller: bool) {
        self.in_caller = in_caller;
    }

    /// Takes leaves over.
    pub(crate) fn discard(&self, leaves: Leaves) {
        if leaves.is_empty() {
            return;
        }
        if self.in_caller {
            return self.shared.free(&leaves);
        }
        let blocks = (leaves.len() as u64) * LEAF_BLOCKS;
        self.shared.backlog.0.fetch_add(blocks, Ordering::Relaxed);
        self.shared.lock().leaves.extend(leaves);
        self.shared.changed.notify_all();
    }

    /// Frees everything that was discarded before the call, with the worker. Returns whether there was
    /// anything.
    pub(crate) fn flush(&self) -> bool {
        let mut any = false;
        while self.shared.free_some() {
            any = true;
        }
        let mut queue = self.shared.lock();
        while queue.freeing > 0 {
            any = true;
            queue = self.shared.wait(queue);
        }
        any
    }

    /// What is not freed yet.
    pub(crate) fn backlog(&self) -> &Arc<Backlog> {
        &self.shared.backlog
    }
}

impl<S: PageSource + 'static> Discarder<S> {
    /// Ends the worker, which frees what is left before.
    fn end(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            // It panics only where the swap space finds a bug, and has reported it.
            let _ = worker.join();
        }
    }
}

impl<S: PageSource + 'static> Drop for Discarder<S> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<S: PageSource + 'static> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        sync::lock(&self.queue)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        unpoisoned(self.changed.wait(queue))
    }

    fn free(&self, leaves: &Leaves) {
        let slots: SlotRanges = leaves.iter().flat_map(|leaf| leaf.slots()).collect();
        self.space.release_ranges(slots.as_slice());
    }

    /// Frees some leaves; `false` if there are none.
    fn free_some(&self) -> bool {
        let leaves: Leaves = {
            let mut queue = self.lock();
            let keep = queue.leaves.len().saturating_sub(LEAVES_AT_A_TIME);
            let taken = queue.leaves.split_off(keep);
            queue.freeing += usize::from(!taken.is_empty());
            taken
        };
        if leaves.is_empty() {
            return false;
        }
        self.free(&leaves);
        let blocks = (leaves.len() as u64) * LEAF_BLOCKS;
        drop(leaves);
        self.backlog.0.fetch_sub(blocks, Ordering::Relaxed);
        self.lock().freeing -= 1;
        self.changed.notify_all();
        true
    }

    fn work(&self) {
        loop {
            if self.free_some() {
                continue;
            }
            let queue = self.lock();
            if !queue.leaves.is_empty() {
                continue;
            }
            if queue.closed {
                return;
            }
            drop(self.wait(queue));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use memfold_swap::SwapConfig;
    use zsmalloc::HeapSource;

    #[test]
    fn leaves_count_until_they_are_freed() {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 10,
            max_slots: 1 << 12,
            ..SwapConfig::default()
        };
        let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
        let mut memory = Memory::new(space, None, 1 << 20, 1 << 30).expect("memory");
        // No worker, which would free them.
        memory.discarder.end();
        let before = memory.used_bytes();
        let leaves: Leaves = (0..100).map(|_| Leaf::new()).collect();
        memory.map.note_leaves(100);
        memory.discard(leaves);
        assert_eq!(memory.used_bytes(), before + 100 * 2048);
        assert!(memory.discarder.flush());
        assert_eq!(memory.used_bytes(), before);
    }
}
