//! A source of zeros for `UFFDIO_COPY`.

use memfold_sys::PAGE_SIZE;
use std::cell::UnsafeCell;
use std::ops::Deref;

/// Pages in [`ZEROS`].
pub(crate) const ZERO_PAGES: usize = 512;

/// 2 MiB of zeros in .bss: unlike a plain static, which is put into .rodata, they take no space in
/// the binary, and reads map the kernel's zero page.
pub(crate) static ZEROS: Zeros = Zeros(UnsafeCell::new([0; ZERO_PAGES * PAGE_SIZE]));

/// The cell is never written; that it could be keeps the static out of .rodata. Aligned for the kernel's copies, as a
/// [`PageBuffer`](memfold_sys::page_buffer::PageBuffer) is.
#[repr(align(4096))]
pub(crate) struct Zeros(UnsafeCell<[u8; ZERO_PAGES * PAGE_SIZE]>);

// SAFETY: the bytes are private to this file, which only reads them.
unsafe impl Sync for Zeros {}

impl Deref for Zeros {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised, live as long as the program, and are never written.
        unsafe { &*self.0.get() }
    }
}
