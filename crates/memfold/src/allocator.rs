//! An allocator for collections whose memory is regions.
//!
//! Its own records lie outside the regions, so that neither allocating nor freeing touches a page
//! that may be in the pool.

use crate::{Memfold, Region};
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes: larger allocations are regions of their own.
const LARGEST_SMALL: usize = 64 << 10;
/// Bytes of a region that smaller allocations are cut from. More makes fewer mappings, and keeps more
/// memory until the last clone of the allocator is dropped.
const CHUNK: usize = 16 << 20;
/// Bytes of a chunk that a size class takes at a time. More keeps objects of a class closer together.
const SLAB: usize = 256 << 10;
/// Bytes of the smallest size class; classes are four to each power of two from there.
const SMALLEST: usize = 16;

/// An allocator for `hashbrown`, `allocator-api2`'s `Vec` and `Box`, and other collections that take
/// one. Clones are the same allocator. Needs the feature `allocator-api2`.
///
/// Allocations above 64 KiB are [regions](crate::Region) of their own, unmapped when they are freed.
/// Smaller ones are cut from shared regions by size class; freed memory serves its class again, and is
/// unmapped with the last clone.
///
/// ```
/// use hashbrown::{DefaultHashBuilder, HashMap};
/// use memfold::Memfold;
///
/// let memfold = Memfold::with_limit(32 << 20)?;
/// let mut squares =
///     HashMap::with_hasher_in(DefaultHashBuilder::default(), memfold.allocator());
/// squares.extend((0..100_000u64).map(|number| (number, number * number)));
/// assert_eq!(squares[&300], 90_000);
/// # Ok::<(), memfold::Error>(())
/// ```
#[derive(Clone)]
pub struct RegionAllocator(Arc<Heap>);

struct Heap {
    memfold: Memfold,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    large: HashMap<usize, Region>,
    chunks: Vec<Region>,
    /// The part of the last chunk that no class has taken yet.
    rest: std::ops::Range<usize>,
    classes: Vec<Class>,
}

#[derive(Default)]
struct Class {
    free: Vec<usize>,
    slab: std::ops::Range<usize>,
}

/// The class of a size, and the size of its objects.
fn class_of(size: usize) -> (usize, usize) {
    let size = size.max(SMALLEST);
    let power = size.next_power_of_two();
    // Sizes in (power / 2, power] in steps of an eighth of the power.
    let step = (power / 8).max(SMALLEST);
    let rounded = size.next_multiple_of(step);
    let shift = power.trailing_zeros() as usize - SMALLEST.trailing_zeros() as usize;
    (shift * 4 + (power - rounded) / step, rounded)
}

impl RegionAllocator {
    pub(crate) fn new(memfold: Memfold) -> Self {
        RegionAllocator(Arc::new(Heap {
            memfold,
            state: Mutex::default(),
        }))
    }

    /// The [`Memfold`] whose limit the allocations are under.
    pub fn memfold(&self) -> &Memfold {
        &self.0.memfold
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate_large(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        if layout.align() > 2 << 20 {
            return Err(AllocError);
        }
        let region = self.0.memfold.map(layout.size()).map_err(|_| AllocError)?;
        let start = region.base();
        let mut state = self.state();
        state.large.try_reserve(1).map_err(|_| AllocError)?;
        state.large.insert(start.as_ptr() as usize, region);
        Ok(start)
    }

    fn allocate_small(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        if self.0.memfold.is_inherited() {
            // The records hold addresses of the parent, where the child may have mapped anything.
            return Err(AllocError);
        }
        let (index, size) = class_of(small_size(layout));
        let mut state = self.state();
        if state.classes.len() <= index {
            state.classes.resize_with(index + 1, Class::default);
        }
        if let Some(address) = state.classes[index].free.pop() {
            return NonNull::new(address as *mut u8).ok_or(AllocError);
        }
        if state.classes[index].slab.len() < size {
            state.classes[index].slab = self.take_slab(&mut state)?;
        }
        let slab = &mut state.classes[index].slab;
        let address = slab.start;
        slab.start += size;
        NonNull::new(address as *mut u8).ok_or(AllocError)
    }

    fn take_slab(&self, state: &mut State) -> Result<std::ops::Range<usize>, AllocError> {
        if state.rest.is_empty() {
            let chunk = self.0.memfold.map(CHUNK).map_err(|_| AllocError)?;
            let start = chunk.base().as_ptr() as usize;
            state.chunks.push(chunk);
            state.rest = start..start + CHUNK;
        }
        let start = state.rest.start;
        state.rest.start += SLAB;
        Ok(start..start + SLAB)
    }
}

/// The size to take so that objects of the class are aligned: slabs are aligned to 256 KiB, and a
/// power of two divides them evenly.
fn small_size(layout: Layout) -> usize {
    if layout.align() <= SMALLEST {
        layout.size()
    } else {
        layout.size().max(layout.align()).next_power_of_two()
    }
}

fn is_small(layout: Layout) -> bool {
    small_size(layout) <= LARGEST_SMALL
}

// SAFETY: memory is given to one owner at a time: large allocations are fresh regions, small ones
// come from a class's slab or its list of freed ones, under the lock. It stays mapped and at its
// place while any clone lives, as clones share the heap.
unsafe impl Allocator for RegionAllocator {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let start = if layout.size() == 0 {
            NonNull::new(std::ptr::without_provenance_mut(layout.align())).ok_or(AllocError)?
        } else if is_small(layout) {
            self.allocate_small(layout)?
        } else {
            self.allocate_large(layout)?
        };
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let memory = self.allocate(layout)?;
        if layout.size() > 0 && is_small(layout) {
            // SAFETY: `allocate` returned these bytes. (Regions of their own are zeros already.)
            unsafe { memory.cast::<u8>().as_ptr().write_bytes(0, layout.size()) };
        }
        Ok(memory)
    }

    unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
        // A forked child has not got the memory; and a thread of its parent may have held the lock.
        if layout.size() == 0 || self.0.memfold.is_inherited() {
            return;
        }
        let address = start.as_ptr() as usize;
        let mut state = self.state();
        if is_small(layout) {
            let (index, _) = class_of(small_size(layout));
            state.classes[index].free.push(address);
        } else {
            let region = state.large.remove(&address);
            // Unmapped outside the lock.
            drop(state);
            drop(region);
        }
    }
}

impl fmt::Debug for RegionAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegionAllocator")
            .field(&self.0.memfold)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_their_sizes_and_waste_little() {
        let mut sizes = HashMap::new();
        for size in 1..=LARGEST_SMALL {
            let (class, rounded) = class_of(size);
            assert!(rounded >= size && rounded <= (size + 15).max(size * 5 / 4));
            assert!(rounded.is_multiple_of(SMALLEST));
            assert_eq!(*sizes.entry(class).or_insert(rounded), rounded, "{size}");
        }
        assert!(sizes.len() < 64);
    }

    #[test]
    fn powers_of_two_are_their_own_class() {
        for shift in 4..=16 {
            assert_eq!(class_of(1 << shift).1, 1 << shift);
        }
    }
}
