//! Large arrays whose memory is not resident until it is used.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
};

/// A type for which zero bytes are a valid value, the one that `zero` returns.
///
/// # Safety
///
/// All-zero memory must be a valid value. (Not so for loom's types: their arrays are filled with
/// `zero`.) Values need no drop.
pub(crate) unsafe trait Zero {
    #[cfg_attr(not(loom), allow(dead_code, reason = "zeroed memory does"))]
    fn zero() -> Self;
}

/// An array that is initially zero.
#[derive(Debug)]
pub(crate) struct Table<T> {
    first: NonNull<T>,
    count: usize,
}

// SAFETY: the table owns its elements, as a boxed slice does.
unsafe impl<T: Send> Send for Table<T> {}
// SAFETY: as above; shared access gives out shared references only.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T: Zero> Table<T> {
    /// A table of `count` elements, more than none; `None` if the heap refuses memory.
    pub(crate) fn new(count: usize) -> Option<Self> {
        assert!(count > 0 && size_of::<T>() > 0);
        let layout = Layout::array::<T>(count).ok()?;
        // SAFETY: the layout is not empty, as `count` and the element's size are not zero.
        let first: NonNull<T> = NonNull::new(unsafe { alloc_zeroed(layout) })?.cast();
        #[cfg(loom)]
        for index in 0..count {
            // SAFETY: the element lies in the new allocation, which is not shared yet.
            unsafe { first.add(index).write(T::zero()) }
        }
        Some(Self { first, count })
    }
}

impl<T> Table<T> {
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        // SAFETY: `index` is inside the table. Its elements are zero bytes, valid by the contract
        // of `Zero`, or were changed through shared references since; they live as long as `self`.
        (index < self.count).then(|| unsafe { self.first.add(index).as_ref() })
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        let layout = Layout::array::<T>(self.count).expect("it was allocated so");
        // SAFETY: the table was allocated with this layout in `new`; its elements need no drop.
        unsafe { dealloc(self.first.as_ptr().cast(), layout) }
    }
}
