//! Handles, for owners that have no place of their own for object words.

use std::sync::{
    Mutex, OnceLock, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use crate::{
    compact::CompactReport, config::Config, error::AllocError, geometry::PAGE_SIZE, pool::Pool,
    relocate::Relocate, source::PageSource, word::ObjectWord,
};

/// Names an object of a [`HandleTable`], wherever compaction has moved it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(u32);

impl Handle {
    /// The handle as a number.
    pub fn into_raw(self) -> u32 {
        self.0
    }

    /// The handle of a number from [`Handle::into_raw`]. Any number may be given: an unused one is
    /// refused when it is used.
    pub fn from_raw(raw: u32) -> Self {
        Self(raw)
    }
}

/// No object has this handle: it was never given out, or its object was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("handle {} names no stored object", .0.into_raw())]
pub struct HandleError(pub Handle);

/// An entry is `[length : 13 | object word : 50]`. A value below 2^32 is no object, as no word is
/// so small: zero, or the next handle of the free list.
const LENGTH_SHIFT: u32 = ObjectWord::BITS;

/// Chunk `n` has `FIRST_CHUNK << n` entries, so an entry never moves as the table grows.
const FIRST_CHUNK: usize = 1024;
const CHUNKS: usize = 22;

const NO_HANDLE: u32 = u32::MAX;

/// Each object starts with its handle, so that compaction finds its entry.
const HEADER: usize = size_of::<u32>();

type Chunk = OnceLock<Box<[AtomicU64]>>;

/// A pool together with a table of object words.
///
/// Handles stay valid when compaction moves objects, and the table keeps the lengths. Look-ups take
/// no lock. Costs 8 bytes in the table and 4 in front of each object.
///
/// ```
/// use zsmalloc::{Config, HandleTable, HeapSource};
///
/// let table = HandleTable::new(HeapSource::new(), Config::with_capacity_pages(4096))?;
/// let handle = table.store(b"an object")?;
/// table.compact(|| true);
/// table.read(handle, |object| assert_eq!(object, b"an object"))?;
/// table.free(handle)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HandleTable<S: PageSource> {
    pool: Pool<S>,
    chunks: [Chunk; CHUNKS],
    free: Mutex<FreeHandles>,
}

/// The free list is linked through the entries, so that a free needs no memory.
#[derive(Debug)]
struct FreeHandles {
    /// The first, or [`NO_HANDLE`].
    first: u32,
    /// Handles from here on have not been used.
    next: u32,
}

impl<S: PageSource> HandleTable<S> {
    /// The longest object, in bytes.
    pub const MAX_LENGTH: usize = PAGE_SIZE - HEADER;

    /// An empty table over a new pool.
    ///
    /// # Errors
    ///
    /// As [`Pool::new`].
    pub fn new(source: S, config: Config) -> Result<Self, crate::NewPoolError> {
        Ok(Self {
            pool: Pool::new(source, config)?,
            chunks: [const { OnceLock::new() }; CHUNKS],
            free: Mutex::new(FreeHandles {
                first: NO_HANDLE,
                next: 0,
            }),
        })
    }

    /// The pool, for its statistics.
    pub fn pool(&self) -> &Pool<S> {
        &self.pool
    }

    /// Stores an object.
    ///
    /// # Errors
    ///
    /// As [`Pool::store`], the largest being [`HandleTable::MAX_LENGTH`], and
    /// [`AllocError::Metadata`] if there is no handle left.
    pub fn store(&self, object: &[u8]) -> Result<Handle, AllocError> {
        if object.is_empty() {
            return Err(AllocError::Empty);
        }
        if object.len() > Self::MAX_LENGTH {
            return Err(AllocError::TooLarge(object.len()));
        }
        let handle = self.take_handle()?;
        match self.pool.store(&[&handle.0.to_le_bytes(), object]) {
            Ok(word) => {
                let entry = word.into_raw() | (object.len() as u64) << LENGTH_SHIFT;
                let place = self
                    .entry(handle)
                    .expect("its chunk was made with the handle");
                place.store(entry, Ordering::Release);
                Ok(handle)
            }
            Err(error) => {
                self.give_handle_back(handle);
                Err(error)
            }
        }
    }

    /// Passes an object to `read`. Takes no lock and copies nothing. The object must not be freed
    /// during the call.
    ///
    /// # Errors
    ///
    /// If there is no such object.
    pub fn read<R>(&self, handle: Handle, read: impl FnOnce(&[u8]) -> R) -> Result<R, HandleError> {
        // The pin comes first: the word that is loaded then stays readable.
        let _pin = self.pool.pin();
        let entry = self
            .entry(handle)
            .ok_or(HandleError(handle))?
            .load(Ordering::Acquire);
        let (word, length) = decode(entry).ok_or(HandleError(handle))?;
        self.pool
            .try_read_slot(word, |slot| read(&slot[HEADER..HEADER + length]))
            .map_err(|_| HandleError(handle))
    }

    /// Frees an object.
    ///
    /// # Errors
    ///
    /// If there is no such object.
    pub fn free(&self, handle: Handle) -> Result<(), HandleError> {
        let place = self.entry(handle).ok_or(HandleError(handle))?;
        // The thread that clears the entry frees the object; compaction replaces the word
        // atomically. Other values are left alone: they may be links of the free list.
        let entry = place
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |entry| {
                decode(entry).map(|_| 0)
            })
            .map_err(|_| HandleError(handle))?;
        let (word, _) = decode(entry).ok_or(HandleError(handle))?;
        self.pool.try_free(word).map_err(|_| HandleError(handle))?;
        self.give_handle_back(handle);
        Ok(())
    }

    /// Compacts the pool; see [`Pool::compact`].
    pub fn compact(&self, go_on: impl FnMut() -> bool) -> CompactReport {
        self.pool.compact(self, go_on)
    }

    fn free_handles(&self) -> std::sync::MutexGuard<'_, FreeHandles> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_handle(&self) -> Result<Handle, AllocError> {
        let mut free = self.free_handles();
        let handle = Handle(free.first);
        if handle.0 != NO_HANDLE {
            let entry = self.entry(handle).expect("it was given out before");
            free.first = entry.swap(0, Ordering::Relaxed) as u32;
            return Ok(handle);
        }
        let handle = Handle(free.next);
        let (chunk, _) = position(handle);
        let chunk_entries = FIRST_CHUNK << chunk;
        let cell = self.chunks.get(chunk).ok_or(AllocError::Metadata)?;
        if cell.get().is_none() {
            let mut entries = Vec::new();
            entries
                .try_reserve_exact(chunk_entries)
                .map_err(|_| AllocError::Metadata)?;
            entries.extend((0..chunk_entries).map(|_| AtomicU64::new(0)));
            // Only the holder of the lock makes chunks.
            let _ = cell.set(entries.into_boxed_slice());
        }
        free.next += 1;
        Ok(handle)
    }

    fn give_handle_back(&self, handle: Handle) {
        let mut free = self.free_handles();
        let entry = self.entry(handle).expect("it was given out");
        // Below 2^32: not an object.
        entry.store(u64::from(free.first), Ordering::Relaxed);
        free.first = handle.0;
    }

    fn entry(&self, handle: Handle) -> Option<&AtomicU64> {
        let (chunk, index) = position(handle);
        self.chunks.get(chunk)?.get()?.get(index)
    }
}

impl<S: PageSource> Relocate for HandleTable<S> {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        let Some((header, _)) = object.split_first_chunk::<HEADER>() else {
            return false;
        };
        let handle = Handle(u32::from_le_bytes(*header));
        let Some(place) = self.entry(handle) else {
            return false;
        };
        let entry = place.load(Ordering::Relaxed);
        if decode(entry).is_none_or(|(word, _)| word != old) {
            return false;
        }
        let moved = entry - old.into_raw() + new.into_raw();
        place
            .compare_exchange(entry, moved, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

/// The chunk of a handle's entry, and its place there.
fn position(handle: Handle) -> (usize, usize) {
    let number = handle.0 as usize + FIRST_CHUNK;
    let chunk = number.ilog2() - FIRST_CHUNK.ilog2();
    (chunk as usize, number - (FIRST_CHUNK << chunk))
}

fn decode(entry: u64) -> Option<(ObjectWord, usize)> {
    let word = ObjectWord::from_raw(entry & ((1 << LENGTH_SHIFT) - 1))?;
    Some((word, (entry >> LENGTH_SHIFT) as usize))
}
