//! Regions: memory whose cold pages are in the compressed pool.

use crate::{Error, Stats};
use memfold_pager::embedded::{PinnedPages, Region as EngineRegion};
use std::fmt;
use std::ops::{Bound, Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;

/// A range of memory under the limit of its [`Memfold`](crate::Memfold): an ordinary slice of bytes.
///
/// A region reads as zeros at first and starts at a multiple of 2 MiB. Dropping it unmaps it at once;
/// its pages in the pool are released in the background.
///
/// Threads share a region as they share any slice. A forked child does not inherit it: the addresses
/// are unmapped there.
///
/// ```
/// use memfold::Memfold;
///
/// let memfold = Memfold::with_limit(32 << 20)?;
/// let mut region = memfold.map(1 << 20)?;
/// region.view_mut::<u32>()[7] = 42;
/// assert!(region.page_out(..)? > 0);
/// assert_eq!(region.view::<u32>()[7], 42); // swapped in by the fault
/// # Ok::<(), memfold::Error>(())
/// ```
pub struct Region(EngineRegion);

fn bytes(range: impl RangeBounds<usize>, length: usize) -> std::ops::Range<usize> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => length,
    };
    start..end
}

impl Region {
    pub(crate) fn new(region: EngineRegion) -> Self {
        Region(region)
    }

    /// The region as a slice of numbers or other plain data. Bytes at the end that do not fill an
    /// element are left out.
    pub fn view<T: bytemuck::AnyBitPattern>(&self) -> &[T] {
        let whole = self.whole_elements::<T>();
        bytemuck::cast_slice(&self[..whole])
    }

    /// Like [`view`](Self::view), for writing.
    pub fn view_mut<T: bytemuck::NoUninit + bytemuck::AnyBitPattern>(&mut self) -> &mut [T] {
        let whole = self.whole_elements::<T>();
        bytemuck::cast_slice_mut(&mut self[..whole])
    }

    fn whole_elements<T>(&self) -> usize {
        match size_of::<T>() {
            0 => 0,
            size => self.len() / size * size,
        }
    }

    /// The address of the first byte, for programs that share parts of a region among threads by raw
    /// pointers. Writes through it must not race with a reference to the same bytes.
    pub fn base(&self) -> NonNull<u8> {
        self.0.start()
    }

    /// Bytes that are resident now.
    pub fn resident_bytes(&self) -> u64 {
        self.0.resident_bytes()
    }

    /// Whether this process was forked from the one that mapped the region: its addresses are
    /// unmapped here.
    pub fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// Statistics of the region's [`Memfold`](crate::Memfold).
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Swaps a range in before it is touched, as far as there is room without moving other pages
    /// out: `MADV_WILLNEED`. Pages on other machines stay there until they are touched.
    ///
    /// # Errors
    /// If the range is not within the region.
    ///
    /// ```
    /// # let memfold = memfold::Memfold::with_limit(32 << 20)?;
    /// # let mut region = memfold.map(1 << 20)?;
    /// # region.fill(1);
    /// region.page_out(..)?;
    /// region.prefetch(..64 << 10)?;
    /// assert_eq!(region.resident_bytes(), 64 << 10);
    /// # Ok::<(), memfold::Error>(())
    /// ```
    pub fn prefetch(&self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        self.0.prefetch(bytes(range, self.len()))
    }

    /// Marks a range as cold: reclaim moves it out first: `MADV_COLD`.
    ///
    /// # Errors
    /// If the range is not within the region.
    pub fn mark_cold(&self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        self.0.mark_cold(bytes(range, self.len()))
    }

    /// Moves a range out now, whether room is needed or not: `MADV_PAGEOUT`. Returns how many bytes
    /// were moved out. Pages that another thread touches meanwhile, or that are pinned, stay.
    ///
    /// # Errors
    /// If the range is not within the region.
    pub fn page_out(&self, range: impl RangeBounds<usize>) -> Result<u64, Error> {
        self.0.page_out(bytes(range, self.len()))
    }

    /// Discards the contents of a range, which reads as zeros afterwards and takes no memory:
    /// `MADV_DONTNEED`, on bytes.
    ///
    /// # Errors
    /// If the range is not within the region.
    ///
    /// ```
    /// # let memfold = memfold::Memfold::with_limit(32 << 20)?;
    /// # let mut region = memfold.map(1 << 20)?;
    /// region.fill(1);
    /// region.discard(10..)?;
    /// assert_eq!((region[9], region[10]), (1, 0));
    /// # Ok::<(), memfold::Error>(())
    /// ```
    pub fn discard(&mut self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        let range = bytes(range, self.len());
        // SAFETY: the region is borrowed mutably.
        unsafe { self.0.discard(range) }
    }

    /// [`discard`](Self::discard) without a mutable borrow, for memory that threads share by raw
    /// pointers.
    ///
    /// # Errors
    /// If the range is not within the region.
    ///
    /// # Safety
    /// No other thread accesses the range until this returns, and no reference to it is live.
    pub unsafe fn discard_shared(&self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.0.discard(bytes(range, self.len())) }
    }

    /// Swaps a range in and keeps it resident until the returned value is dropped, for system calls
    /// that read it, such as `write`.
    ///
    /// In signal and protection mode a system call that is given a missing page fails with `EFAULT`,
    /// because the kernel's own accesses raise no signal. In any mode, pin what is accessed by
    /// physical address: buffers of devices, rings shared with the kernel.
    ///
    /// # Errors
    /// If the range is not within the region, or the limit has no room for it.
    ///
    /// ```
    /// use std::io::Write;
    /// # let memfold = memfold::Memfold::with_limit(32 << 20)?;
    /// # let region = memfold.map(1 << 20)?;
    /// # let mut file = std::fs::File::create("/dev/null")?;
    /// file.write_all(&region.pin(..4096)?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pin(&self, range: impl RangeBounds<usize>) -> Result<Pinned<'_>, Error> {
        let range = bytes(range, self.len());
        let pin = self.0.pin(range.clone())?;
        Ok(Pinned {
            bytes: &self[range],
            _pin: pin,
        })
    }

    /// Like [`pin`](Self::pin), for system calls that write to the range, such as `read`.
    ///
    /// # Errors
    /// If the range is not within the region, or the limit has no room for it.
    pub fn pin_mut(&mut self, range: impl RangeBounds<usize>) -> Result<PinnedMut<'_>, Error> {
        let range = bytes(range, self.len());
        let pin = self.0.pin(range.clone())?;
        Ok(PinnedMut {
            bytes: &mut self[range],
            _pin: pin,
        })
    }

    /// Like [`pin`](Self::pin), without a borrow of the region: for bindings to other languages, which
    /// keep the region alive themselves. Dropping the region ends the pin.
    ///
    /// # Errors
    /// If the range is not within the region, or the limit has no room for it.
    pub fn pin_detached(&self, range: impl RangeBounds<usize>) -> Result<PinnedDetached, Error> {
        let range = bytes(range, self.len());
        Ok(PinnedDetached {
            pages: self.0.pin(range)?,
        })
    }

    /// Whether system calls work on pages of the region that are not pinned: only in
    /// [thread mode](crate::Mode::Thread).
    pub fn supports_syscalls(&self) -> bool {
        self.0.supports_syscalls()
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region is mapped and readable as long as `self` lives, starts as zeros, and
        // is written only through `&mut self`, or through `base`, whose callers must not race with
        // this slice. Paging keeps the contents.
        unsafe { std::slice::from_raw_parts(self.0.start().as_ptr(), self.0.length()) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), self.0.length()) }
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Region {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("base", &self.base())
            .field("length", &self.0.length())
            .field("resident_bytes", &self.resident_bytes())
            .finish()
    }
}

/// Bytes of a region that stay resident until this is dropped; see [`Region::pin`].
#[must_use = "the range is pinned only until this is dropped"]
pub struct Pinned<'a> {
    bytes: &'a [u8],
    _pin: PinnedPages,
}

impl Deref for Pinned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl AsRef<[u8]> for Pinned<'_> {
    fn as_ref(&self) -> &[u8] {
        self.bytes
    }
}

/// Bytes of a region that stay resident until this is dropped; see [`Region::pin_mut`].
#[must_use = "the range is pinned only until this is dropped"]
pub struct PinnedMut<'a> {
    bytes: &'a mut [u8],
    _pin: PinnedPages,
}

impl Deref for PinnedMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for PinnedMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl AsRef<[u8]> for PinnedMut<'_> {
    fn as_ref(&self) -> &[u8] {
        self.bytes
    }
}

impl AsMut<[u8]> for PinnedMut<'_> {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

/// A range that stays resident until this, or its region, is dropped; see [`Region::pin_detached`].
#[must_use = "the range is pinned only until this is dropped"]
pub struct PinnedDetached {
    pages: PinnedPages,
}

/// Address and length only: the contents may be large, and secret.
fn debug_range(name: &str, bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.debug_struct(name)
        .field("start", &bytes.as_ptr())
        .field("length", &bytes.len())
        .finish()
}

impl fmt::Debug for Pinned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_range("Pinned", self.bytes, f)
    }
}

impl fmt::Debug for PinnedMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_range("PinnedMut", self.bytes, f)
    }
}

impl fmt::Debug for PinnedDetached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedDetached").field(&self.pages).finish()
    }
}
