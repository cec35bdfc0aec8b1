//! Arrays of atomics that are zero until they are used, and a spin lock: what the designs here are
//! made of.

use std::{
    ops::Deref,
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering},
};

use anyhow::Result;
use zsmalloc::{PAGE_SIZE, PageSource};

use crate::mapping::Mapping;

/// Something made of atomics alone.
///
/// # Safety
///
/// Any bytes are a valid value, and it may be shared between threads.
pub unsafe trait Atomics: Sync {}

// SAFETY: these are plain atomics.
unsafe impl Atomics for AtomicU8 {}
// SAFETY: as above.
unsafe impl Atomics for AtomicU16 {}
// SAFETY: as above.
unsafe impl Atomics for AtomicU64 {}

/// An array that starts as zero and takes memory for the pages that were written.
#[derive(Debug)]
pub struct Array<T: Atomics> {
    base: NonNull<T>,
    length: usize,
    pages: usize,
}

// SAFETY: the mapping is this array's own, and its elements are shared atomics.
unsafe impl<T: Atomics> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Atomics> Sync for Array<T> {}

impl<T: Atomics> Array<T> {
    pub fn new(length: usize) -> Result<Self> {
        assert!(align_of::<T>() <= PAGE_SIZE);
        let pages = (length * size_of::<T>()).div_ceil(PAGE_SIZE).max(1);
        Ok(Self {
            base: Mapping.reserve(pages)?.cast(),
            length,
            pages,
        })
    }

    /// Takes memory for all of it, as an array does that is allocated as a whole. To be called
    /// before it is used.
    pub fn commit(&self) {
        for page in 0..self.pages {
            // SAFETY: the byte lies in the mapping and is part of an atomic, and zero is what it
            // holds as yet. (An addition of nothing would be compiled to a load.)
            unsafe {
                (*self.base.cast::<AtomicU8>().as_ptr().add(page * PAGE_SIZE))
                    .store(0, Ordering::Relaxed)
            };
        }
    }
}

impl<T: Atomics> Deref for Array<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping has room for `length` elements, of which any bytes are valid, and
        // stays until the array is dropped.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }
}

impl<T: Atomics> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: this is what `reserve` gave, and all references to it borrow `self`.
        unsafe { Mapping.unreserve(self.base.cast(), self.pages) }
    }
}

/// A lock as the kernel's: taken with one atomic operation, given back with a plain store. As a
/// thread here may lose its processor while it holds one, those who wait yield after a while.
#[derive(Debug, Default)]
pub struct SpinLock(AtomicBool);

/// The lock held.
#[derive(Debug)]
#[must_use]
pub struct Held<'a>(&'a AtomicBool);

impl SpinLock {
    #[inline]
    pub fn lock(&self) -> Held<'_> {
        while self.0.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Held(&self.0)
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..200 {
            if !self.0.load(Ordering::Relaxed) {
                return;
            }
            std::hint::spin_loop();
        }
        std::thread::yield_now();
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Keeps what belongs to one thread off the cache lines of others.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);
