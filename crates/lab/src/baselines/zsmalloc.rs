//! The kernel's zsmalloc before and partway through W. Hao's series of April 2026, reimplemented in
//! user space from its description.
//!
//! A handle is an index into a table of object words. An object starts with its handle (8 bytes), a
//! free slot with the index of the next free slot. A pool-wide lock excludes compaction from frees,
//! and a per-class lock guards the class's lists.
//!
//! It is cheaper than the kernel's in two ways: zspages are contiguous, so that one call frees all
//! pages of one, where the kernel frees page by page; and handles need no allocation.

use std::{
    ptr::NonNull,
    sync::{
        Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result};
use zsmalloc::{PAGE_SIZE, PageRun, PageSource};

use crate::mapping::Mapping;

/// A step of the series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The pool lock, then the class lock; an empty zspage is freed under the latter.
    PoolLock,
    /// The same, but freed zspages are kept for reuse. The kernel returns them to the page
    /// allocator with a function call, where user space needs a system call: this is a lower bound.
    PoolLockKept,
    /// As `PoolLock`, with the zspage freed after the class lock is dropped.
    OutsideLock,
    /// The object word holds the class: no pool lock. Zspages are freed outside the class lock.
    ClassIndex,
}

/// Longest zspage in pages: the kernel's default.
const MAX_CHAIN: usize = 8;
/// Smallest class and distance between classes, in bytes.
const MIN_CLASS: usize = 32;
const CLASS_STEP: usize = 16;
const HANDLE_BYTES: usize = 8;
/// Lists of partly used zspages per class; one more holds full ones.
const FULLNESS_GROUPS: usize = 10;

/// End of a list.
const NONE: u32 = u32::MAX;

/// `[page : 32 | class : 12 | index : 12]` in the low 56 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Word(u64);

impl Word {
    fn new(page: u32, class: usize, index: u32) -> Self {
        Self(u64::from(page) << 24 | (class as u64) << 12 | u64::from(index))
    }

    fn page(self) -> u32 {
        (self.0 >> 24) as u32
    }

    fn class(self) -> usize {
        (self.0 >> 12) as usize & 0xfff
    }

    fn index(self) -> u32 {
        self.0 as u32 & 0xfff
    }
}

#[derive(Debug, Clone, Copy)]
struct Zspage {
    first: u32,
    next: u32,
    previous: u32,
    used: u32,
    /// Head of the list of free slots.
    free: u32,
    group: usize,
}

#[derive(Debug)]
struct Class {
    size: usize,
    pages: usize,
    objects: u32,
    state: Mutex<ClassState>,
}

/// Guarded by the class lock: the zspages of a class and their free slots.
#[derive(Debug, Default)]
struct ClassState {
    zspages: Vec<Zspage>,
    unused: Vec<u32>,
    groups: [Option<u32>; FULLNESS_GROUPS + 1],
}

/// A pool.
#[derive(Debug)]
pub struct Original {
    step: Step,
    source: Mapping,
    base: NonNull<u8>,
    capacity: usize,
    lock: RwLock<()>,
    classes: Vec<Class>,
    /// By first page of a zspage: its class, and its number in the class.
    page_class: Vec<AtomicU32>,
    page_zspage: Vec<AtomicU32>,
    /// Object words by handle, with [`STORED`]; 0 for none.
    handles: Vec<AtomicU64>,
    next_page: AtomicU32,
    runs: [Mutex<Vec<u32>>; MAX_CHAIN + 1],
    resident_pages: AtomicUsize,
}

// SAFETY: the pool owns the mapping at `base`; slots are written under their class lock or by the
// thread that allocated them.
unsafe impl Send for Original {}
// SAFETY: as above.
unsafe impl Sync for Original {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn chain(size: usize) -> usize {
    if size.is_power_of_two() {
        return 1;
    }
    (1..=MAX_CHAIN)
        .min_by_key(|pages| pages * PAGE_SIZE % size)
        .unwrap_or(1)
}

impl Original {
    /// An empty pool of `capacity` pages, for handles below `handles`.
    pub fn new(step: Step, capacity: usize, handles: usize) -> Result<Self> {
        let source = Mapping;
        let base = source.reserve(capacity)?;
        let steps = (PAGE_SIZE - MIN_CLASS) / CLASS_STEP;
        let class = |step: usize| {
            let size = MIN_CLASS + step * CLASS_STEP;
            let pages = chain(size);
            let objects = (pages * PAGE_SIZE / size) as u32;
            Class {
                size,
                pages,
                objects,
                state: Mutex::default(),
            }
        };
        Ok(Self {
            step,
            source,
            base,
            capacity,
            lock: RwLock::new(()),
            classes: (0..=steps).map(class).collect(),
            page_class: (0..capacity).map(|_| AtomicU32::new(NONE)).collect(),
            page_zspage: (0..capacity).map(|_| AtomicU32::new(NONE)).collect(),
            handles: (0..handles).map(|_| AtomicU64::new(0)).collect(),
            next_page: AtomicU32::new(0),
            runs: std::array::from_fn(|_| Mutex::default()),
            resident_pages: AtomicUsize::new(0),
        })
    }

    /// Bytes of the zspages in use.
    pub fn resident_bytes(&self) -> usize {
        self.resident_pages.load(Ordering::Relaxed) * PAGE_SIZE
    }

    /// Stores an object under an unused handle.
    pub fn store(&self, handle: usize, bytes: &[u8]) -> Result<()> {
        let size = (bytes.len() + HANDLE_BYTES).min(PAGE_SIZE);
        let class_index = size.saturating_sub(MIN_CLASS).div_ceil(CLASS_STEP);
        let class = &self.classes[class_index];
        let mut state = lock(&class.state);
        let partial = (0..FULLNESS_GROUPS)
            .rev()
            .find_map(|group| state.groups[group]);
        let number = match partial {
            Some(number) => number,
            None => self.new_zspage(&mut state, class, class_index)?,
        };
        let index = self.take_slot(&mut state, class, number);
        let word = Word::new(state.zspages[number as usize].first, class_index, index);
        drop(state);
        let slot = self.slot(word);
        let body = &bytes[..size - HANDLE_BYTES];
        // SAFETY: the slot was allocated by this thread just now and is at least `size` long.
        unsafe {
            slot.cast::<u64>().write_unaligned(handle as u64);
            slot.add(HANDLE_BYTES).copy_from(body.as_ptr(), body.len());
        }
        self.handles[handle].store(word.0 | STORED, Ordering::Release);
        Ok(())
    }

    /// Frees a handle's object.
    pub fn free(&self, handle: usize) {
        let entry = &self.handles[handle];
        match self.step {
            Step::ClassIndex => {
                // An object's class never changes; compaction may change the rest, so read the word
                // again under the class lock.
                let class_index = Word(entry.load(Ordering::Acquire) & !STORED).class();
                let mut state = lock(&self.classes[class_index].state);
                let word = Word(entry.load(Ordering::Acquire) & !STORED);
                let emptied = self.free_slot(&mut state, class_index, word);
                drop(state);
                emptied
                    .into_iter()
                    .for_each(|page| self.free_pages(page, class_index));
            }
            Step::PoolLock | Step::PoolLockKept | Step::OutsideLock => {
                let pool = self.lock.read().unwrap_or_else(PoisonError::into_inner);
                let word = Word(entry.load(Ordering::Acquire) & !STORED);
                let class_index =
                    self.page_class[word.page() as usize].load(Ordering::Relaxed) as usize;
                let mut state = lock(&self.classes[class_index].state);
                drop(pool);
                let emptied = self.free_slot(&mut state, class_index, word);
                if self.step == Step::OutsideLock {
                    drop(state);
                    emptied
                        .into_iter()
                        .for_each(|page| self.free_pages(page, class_index));
                } else {
                    emptied
                        .into_iter()
                        .for_each(|page| self.free_pages(page, class_index));
                }
            }
        }
        entry.store(0, Ordering::Release);
    }

    /// Compacts all classes while `go_on` returns true. Returns the number of objects moved.
    pub fn compact(&self, go_on: &dyn Fn() -> bool) -> usize {
        let mut moved = 0;
        for class_index in 0..self.classes.len() {
            while go_on() {
                let pool = self.lock.write().unwrap_or_else(PoisonError::into_inner);
                let mut state = lock(&self.classes[class_index].state);
                let (count, emptied) = self.empty_one(&mut state, class_index);
                drop(state);
                drop(pool);
                moved += count;
                match emptied {
                    Some(page) => self.free_pages(page, class_index),
                    None => break,
                }
            }
        }
        moved
    }

    /// Moves the objects of the sparsest zspage of a class into the fullest ones.
    fn empty_one(&self, state: &mut ClassState, class_index: usize) -> (usize, Option<u32>) {
        let class = &self.classes[class_index];
        let Some(source) = (0..FULLNESS_GROUPS).find_map(|group| state.groups[group]) else {
            return (0, None);
        };
        let first = state.zspages[source as usize].first;
        let room: u32 = (0..FULLNESS_GROUPS)
            .flat_map(|group| members(state, group))
            .filter(|&number| number != source)
            .map(|number| class.objects - state.zspages[number as usize].used)
            .sum();
        if room < state.zspages[source as usize].used {
            return (0, None);
        }
        let free = self.free_slots(state, class, source, class_index);
        let mut moved = 0;
        for index in (0..class.objects).filter(|&index| !free[index as usize]) {
            let target = (0..FULLNESS_GROUPS)
                .rev()
                .flat_map(|group| members(state, group))
                .find(|&number| number != source);
            let Some(target) = target else {
                return (moved, None);
            };
            let to_index = self.take_slot(state, class, target);
            let old = Word::new(first, class_index, index);
            let new = Word::new(state.zspages[target as usize].first, class_index, to_index);
            // SAFETY: both slots are in zspages of this class, whose lock is held; the old slot
            // holds an object, the new one was free.
            let handle = unsafe {
                self.slot(new)
                    .copy_from_nonoverlapping(self.slot(old), class.size);
                self.slot(new).cast::<u64>().read_unaligned()
            };
            self.handles[handle as usize].store(new.0 | STORED, Ordering::Release);
            moved += 1;
            if let Some(page) = self.free_slot(state, class_index, old) {
                return (moved, Some(page));
            }
        }
        (moved, None)
    }

    /// Which slots of a zspage are on its free list.
    fn free_slots(
        &self,
        state: &ClassState,
        class: &Class,
        number: u32,
        class_index: usize,
    ) -> Vec<bool> {
        let zspage = &state.zspages[number as usize];
        let mut free = vec![false; class.objects as usize];
        let mut index = zspage.free;
        while index != NONE {
            free[index as usize] = true;
            let slot = self.slot(Word::new(zspage.first, class_index, index));
            // SAFETY: a free slot holds the index of the next, and the class lock is held.
            index = unsafe { slot.cast::<u32>().read_unaligned() };
        }
        free
    }

    fn new_zspage(&self, state: &mut ClassState, class: &Class, class_index: usize) -> Result<u32> {
        let recycled = lock(&self.runs[class.pages]).pop();
        let first = match recycled {
            Some(first) => first,
            None => {
                let first = self
                    .next_page
                    .fetch_add(class.pages as u32, Ordering::Relaxed);
                (first as usize + class.pages <= self.capacity)
                    .then_some(first)
                    .context("full")?
            }
        };
        self.resident_pages
            .fetch_add(class.pages, Ordering::Relaxed);
        let number = state.unused.pop().unwrap_or(state.zspages.len() as u32);
        let zspage = Zspage {
            first,
            next: NONE,
            previous: NONE,
            used: 0,
            free: 0,
            group: usize::MAX,
        };
        if number as usize == state.zspages.len() {
            state.zspages.push(zspage);
        } else {
            state.zspages[number as usize] = zspage;
        }
        for index in 0..class.objects {
            let next = if index + 1 < class.objects {
                index + 1
            } else {
                NONE
            };
            // SAFETY: the zspage is new: no other thread refers to it.
            unsafe {
                self.slot(Word::new(first, class_index, index))
                    .cast::<u32>()
                    .write_unaligned(next);
            }
        }
        self.page_class[first as usize].store(class_index as u32, Ordering::Relaxed);
        self.page_zspage[first as usize].store(number, Ordering::Relaxed);
        regroup(state, class, number);
        Ok(number)
    }

    fn take_slot(&self, state: &mut ClassState, class: &Class, number: u32) -> u32 {
        let zspage = &mut state.zspages[number as usize];
        let index = zspage.free;
        let class_index = (class.size - MIN_CLASS) / CLASS_STEP;
        let slot = self.slot(Word::new(zspage.first, class_index, index));
        // SAFETY: a free slot holds the index of the next, and the class lock is held.
        zspage.free = unsafe { slot.cast::<u32>().read_unaligned() };
        zspage.used += 1;
        regroup(state, class, number);
        index
    }

    /// Frees a slot. Returns the first page of the zspage if it became empty and was unlinked.
    fn free_slot(&self, state: &mut ClassState, class_index: usize, word: Word) -> Option<u32> {
        let class = &self.classes[class_index];
        let number = self.page_zspage[word.page() as usize].load(Ordering::Relaxed);
        let zspage = &mut state.zspages[number as usize];
        // SAFETY: the object is freed, so its slot is unused, and the class lock is held.
        unsafe { self.slot(word).cast::<u32>().write_unaligned(zspage.free) };
        zspage.free = word.index();
        zspage.used -= 1;
        if zspage.used > 0 {
            regroup(state, class, number);
            return None;
        }
        unlink(state, number);
        state.unused.push(number);
        Some(word.page())
    }

    fn free_pages(&self, first: u32, class_index: usize) {
        let pages = self.classes[class_index].pages;
        if self.step != Step::PoolLockKept {
            // SAFETY: the page is in the mapping.
            let start = unsafe { self.base.add(first as usize * PAGE_SIZE) };
            // SAFETY: the zspage is empty and on no list.
            let result = unsafe { self.source.discard(&[PageRun { start, pages }]) };
            assert!(result.is_ok(), "MADV_DONTNEED of a zspage failed");
        }
        self.resident_pages.fetch_sub(pages, Ordering::Relaxed);
        lock(&self.runs[pages]).push(first);
    }

    fn slot(&self, word: Word) -> *mut u8 {
        let class = &self.classes[word.class()];
        let offset = word.page() as usize * PAGE_SIZE + word.index() as usize * class.size;
        // SAFETY: the word names a slot of a zspage, which is in the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Original {
    fn drop(&mut self) {
        // SAFETY: `new` reserved the mapping with this length, and no reference to it is left.
        unsafe { self.source.unreserve(self.base, self.capacity) }
    }
}

/// Set in a used entry of the handle table: a word itself may be 0.
const STORED: u64 = 1 << 63;

fn group_of(used: u32, class: &Class) -> usize {
    used as usize * FULLNESS_GROUPS / class.objects as usize
}

/// The zspages of a fullness group.
fn members(state: &ClassState, group: usize) -> impl Iterator<Item = u32> + '_ {
    std::iter::successors(state.groups[group], |&number| {
        let next = state.zspages[number as usize].next;
        (next != NONE).then_some(next)
    })
}

/// Moves a zspage to the list of its fullness group.
fn regroup(state: &mut ClassState, class: &Class, number: u32) {
    let group = group_of(state.zspages[number as usize].used, class);
    if state.zspages[number as usize].group == group {
        return;
    }
    unlink(state, number);
    let head = state.groups[group].replace(number);
    let zspage = &mut state.zspages[number as usize];
    (zspage.group, zspage.previous, zspage.next) = (group, NONE, head.unwrap_or(NONE));
    if let Some(next) = head {
        state.zspages[next as usize].previous = number;
    }
}

fn unlink(state: &mut ClassState, number: u32) {
    let Zspage {
        group,
        next,
        previous,
        ..
    } = state.zspages[number as usize];
    if group == usize::MAX {
        return;
    }
    if previous == NONE {
        state.groups[group] = (next != NONE).then_some(next);
    } else {
        state.zspages[previous as usize].next = next;
    }
    if next != NONE {
        state.zspages[next as usize].previous = previous;
    }
    state.zspages[number as usize].group = usize::MAX;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn it_stores_frees_and_compacts() {
        for step in [
            Step::PoolLock,
            Step::PoolLockKept,
            Step::OutsideLock,
            Step::ClassIndex,
        ] {
            let pool = Original::new(step, 1 << 14, 5000).unwrap();
            let sizes: Vec<usize> = (0..5000)
                .map(|handle| [500, 1100, 2000][handle % 3])
                .collect();
            for (handle, &size) in sizes.iter().enumerate() {
                pool.store(handle, &vec![handle as u8; size]).unwrap();
            }
            let peak = pool.resident_bytes();
            let mut order: Vec<usize> = (0..5000).collect();
            Random::new(1).shuffle(&mut order);
            order[..3500].iter().for_each(|&handle| pool.free(handle));
            assert!(pool.compact(&|| true) > 0);
            assert!(pool.resident_bytes() < peak / 2);
            for &handle in &order[3500..] {
                let word = Word(pool.handles[handle].load(Ordering::Relaxed) & !STORED);
                // SAFETY: the slot holds the object, and no other thread uses the pool.
                let bytes = unsafe {
                    std::slice::from_raw_parts(pool.slot(word), HANDLE_BYTES + sizes[handle])
                };
                assert!(
                    bytes[HANDLE_BYTES..]
                        .iter()
                        .all(|&byte| byte == handle as u8)
                );
                pool.free(handle);
            }
            assert_eq!(pool.resident_bytes(), 0);
        }
    }
}
