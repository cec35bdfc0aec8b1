//! Regions: bytes whose cold pages are in the pool.

use crate::{Error, Stats};
use memfold_pager::embedded::{Pin as EnginePin, Region as EngineRegion};
use std::fmt;
use std::ops::{Bound, Deref, DerefMut, RangeBounds};

/// A range of memory under the limit of its [`Memfold`](crate::Memfold): an ordinary slice of bytes.
/// It starts as zeros, at a multiple of 2 MiB, and is unmapped on drop; what it had in the pool is
/// released in bulk, in the background.
///
/// Regions are shared by threads as any slice is. They are not inherited by forked children, where
/// their addresses are unmapped.
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

    /// The region as a slice of numbers or other plain data. What does not fill a whole element at
    /// the end is left out.
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

    /// The first byte, for those who share a region's parts among threads by pointers.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start().as_ptr()
    }

    /// Bytes that are in memory now.
    pub fn resident_bytes(&self) -> u64 {
        self.0.resident_bytes()
    }

    /// Whether this process was forked from the one that mapped the region: its addresses are
    /// unmapped here.
    pub fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// The figures of its [`Memfold`](crate::Memfold).
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Brings a range back from the pool before it is touched, as far as there is room without
    /// moving others out.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn will_need(&self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        self.0.will_need(bytes(range, self.len()))
    }

    /// Says that a range will not be touched soon: it goes first when room is needed.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn cold(&self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        self.0.cold(bytes(range, self.len()))
    }

    /// Moves a range out now, whether room is needed or not. Returns how many bytes left memory:
    /// pages that another thread touches meanwhile, or that are pinned, stay.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn page_out(&self, range: impl RangeBounds<usize>) -> Result<u64, Error> {
        self.0.page_out(bytes(range, self.len()))
    }

    /// Drops the contents of a range, which reads as zeros afterwards and takes no memory.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn dont_need(&mut self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        let range = bytes(range, self.len());
        // SAFETY: the region is borrowed mutably.
        unsafe { self.0.dont_need(range) }
    }

    /// Brings a range in and keeps it in memory until the pin is dropped, to be given to system
    /// calls that read it, such as `write`.
    ///
    /// In signal and protection mode a system call that is given a missing page answers `EFAULT`:
    /// there is no thread in the program's own code whose signal handler could bring the page in.
    /// Devices, and rings shared with the kernel, use memory by its physical address, in any mode.
    ///
    /// # Errors
    /// If the range is not in the region, or the limit has no room for it.
    pub fn pin(&self, range: impl RangeBounds<usize>) -> Result<Pin<'_>, Error> {
        let range = bytes(range, self.len());
        let pin = self.0.pin(range.clone())?;
        Ok(Pin {
            bytes: &self[range],
            _pin: pin,
        })
    }

    /// Like [`pin`](Self::pin), for system calls that write to the range, such as `read`.
    ///
    /// # Errors
    /// If the range is not in the region, or the limit has no room for it.
    pub fn pin_mut(&mut self, range: impl RangeBounds<usize>) -> Result<PinMut<'_>, Error> {
        let range = bytes(range, self.len());
        let pin = self.0.pin(range.clone())?;
        Ok(PinMut {
            bytes: &mut self[range],
            _pin: pin,
        })
    }

    /// [`dont_need`](Self::dont_need) without a mutable borrow, for memory that is shared by
    /// pointers.
    ///
    /// # Errors
    /// If the range is not in the region.
    ///
    /// # Safety
    /// No other thread accesses the range until this returns, and no reference to it is live.
    pub unsafe fn discard_shared(&self, range: impl RangeBounds<usize>) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.0.dont_need(bytes(range, self.len())) }
    }

    /// Like [`pin`](Self::pin), without a borrow of the region: for other languages, whose own
    /// objects keep it. Once the region is dropped, the pin means nothing.
    ///
    /// # Errors
    /// If the range is not in the region, or the limit has no room for it.
    pub fn pin_detached(&self, range: impl RangeBounds<usize>) -> Result<DetachedPin, Error> {
        let range = bytes(range, self.len());
        Ok(DetachedPin {
            _pin: self.0.pin(range)?,
        })
    }

    /// Whether system calls may be given the region's memory without a pin: only in
    /// [thread mode](crate::Mode::Thread).
    pub fn serves_system_calls(&self) -> bool {
        self.0.serves_system_calls()
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region is mapped and readable as long as `self` lives, starts as zeros, and
        // is written only through `&mut self` or by those who use `as_ptr`. Pages come and go, but
        // their contents stay.
        unsafe { std::slice::from_raw_parts(self.0.start().as_ptr(), self.0.length()) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), self.0.length()) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("start", &self.as_ptr())
            .field("length", &self.0.length())
            .field("resident_bytes", &self.resident_bytes())
            .finish()
    }
}

/// Bytes of a region that stay in memory until this is dropped; see [`Region::pin`].
#[must_use = "the range is pinned only until this is dropped"]
pub struct Pin<'a> {
    bytes: &'a [u8],
    _pin: EnginePin,
}

impl Deref for Pin<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

/// Bytes of a region that stay in memory until this is dropped; see [`Region::pin_mut`].
#[must_use = "the range is pinned only until this is dropped"]
pub struct PinMut<'a> {
    bytes: &'a mut [u8],
    _pin: EnginePin,
}

impl Deref for PinMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for PinMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

/// A range that stays in memory until this is dropped; see [`Region::pin_detached`].
#[must_use = "the range is pinned only until this is dropped"]
pub struct DetachedPin {
    _pin: EnginePin,
}
