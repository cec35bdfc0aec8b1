//! Pages of this process's own memory that begin where pages of the kernel do.

use crate::PAGE_SIZE;
use crate::memory::Mapping;
use std::io;
use std::ops::{Deref, DerefMut};

/// A buffer for contents of pages, zeroed at first.
///
/// It begins at a multiple of the page size: on some CPUs the kernel copies pages more slowly to 16 bytes behind one, where
/// `malloc` puts large blocks.
#[derive(Debug)]
pub struct PageBuffer(Mapping);

impl PageBuffer {
    /// A buffer of `pages` pages, which take memory when first touched.
    ///
    /// # Errors
    /// If the kernel has no addresses left, or no more mappings.
    pub fn new(pages: usize) -> io::Result<PageBuffer> {
        let bytes = pages.checked_mul(PAGE_SIZE);
        Mapping::anonymous(bytes.ok_or(io::ErrorKind::OutOfMemory)?).map(PageBuffer)
    }

    /// What it lies in.
    pub fn mapping(&self) -> &Mapping {
        &self.0
    }

    fn pages(&self) -> usize {
        self.0.length() / PAGE_SIZE
    }
}

impl Deref for PageBuffer {
    type Target = [[u8; PAGE_SIZE]];

    fn deref(&self) -> &Self::Target {
        // SAFETY: the mapping is this value's own, so long, and any bytes make a page.
        unsafe { std::slice::from_raw_parts(self.0.start().as_ptr().cast(), self.pages()) }
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut Self::Target {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr().cast(), self.pages()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_where_the_kernels_do() {
        let mut buffer = PageBuffer::new(3).unwrap();
        assert_eq!(buffer.as_ptr().addr() % PAGE_SIZE, 0);
        assert_eq!(*buffer, [[0; PAGE_SIZE]; 3]);
        buffer[2][PAGE_SIZE - 1] = 7;
        assert_eq!(buffer.as_flattened()[3 * PAGE_SIZE - 1], 7);
        assert!(PageBuffer::new(usize::MAX).is_err());
    }
}
