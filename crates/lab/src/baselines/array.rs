//! Building blocks of the baselines: demand-zero arrays of atomics, and a spin lock.

use std::{
    ops::Deref,
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering},
};

use anyhow::Result;
use zsmalloc::{PAGE_SIZE, PageSource};

use crate::mapping::Mapping;

/// A type that consists of atomics only.
///
/// # Safety
///
/// Any bit pattern is a valid value, and the type may be shared between threads.
pub unsafe trait Atomics: Sync {}

// SAFETY: these are plain atomics.
unsafe impl Atomics for AtomicU8 {}
// SAFETY: as above.
unsafe impl Atomics for AtomicU16 {}
// SAFETY: as above.
unsafe impl Atomics for AtomicU64 {}

/// A zero-initialised array in an anonymous mapping; pages are allocated on first write.
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
    /// An array of `length` zeros.
    pub fn new(length: usize) -> Result<Self> {
        assert!(align_of::<T>() <= PAGE_SIZE);
        let pages = (length * size_of::<T>()).div_ceil(PAGE_SIZE).max(1);
        Ok(Self {
            base: Mapping.reserve(pages)?.cast(),
            length,
            pages,
        })
    }

    /// Populates all pages, as the kernel does for an array that it allocates as a whole. Must be
    /// called before the first use: it writes zeros.
    pub fn commit(&self) {
        for page in 0..self.pages {
            // SAFETY: the byte lies in the mapping and is part of an atomic that still holds zero.
            // (Adding zero instead would be compiled to a load, which populates nothing.)
            unsafe {
                (*self.base.cast::<AtomicU8>().as_ptr().add(page * PAGE_SIZE))
                    .store(0, Ordering::Relaxed);
            };
        }
    }
}

impl<T: Atomics> Deref for Array<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `length` elements, of which any bit pattern is valid, and lives
        // until the array is dropped.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }
}

impl<T: Atomics> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: `reserve` returned this range, and all references into it borrow `self`.
        unsafe { Mapping.unreserve(self.base.cast(), self.pages) }
    }
}

/// A lock as the kernel's spinlock: one atomic operation to lock, a plain store to unlock. In user
/// space the holder may be preempted, so waiters yield after spinning for a while.
#[derive(Debug, Default)]
pub struct SpinLock(AtomicBool);

/// Guard of a [`SpinLock`].
#[derive(Debug)]
#[must_use]
pub struct Held<'a>(&'a AtomicBool);

impl SpinLock {
    /// Spins until the lock is held.
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

/// Aligned to two cache lines, against false sharing between threads.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Padded<T>(pub T);
