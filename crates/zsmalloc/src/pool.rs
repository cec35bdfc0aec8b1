//! The pool: storing, reading and freeing objects.

use std::{
    cell::Cell, panic::AssertUnwindSafe, ptr::NonNull, slice, sync::OnceLock, time::Instant,
};

use crate::{
    arena::Arenas,
    bin::{Allowance, Bin, BinContext, BinState},
    boxed,
    class::{ClassTable, SizeClass},
    config::Config,
    epoch::{Epoch, Reader},
    error::{AllocError, MisuseError, NewPoolError},
    geometry::{
        MAX_CAPACITY_PAGES, MAX_CHAIN_PAGES, MAX_EXTENT_PAGES, MAX_SHARDS, PAGE_SIZE, PageNumber,
        UNIT_PAGES,
    },
    lock::Held,
    released::Released,
    ring::Ring,
    runs::RunLists,
    signal::DrainSignal,
    source::{HugePageLimit, PageRun, PageSource},
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    word::ObjectWord,
    zspage::Zspage,
};

/// The smallest capacity; there must be room for some zspages of each length.
const MIN_CAPACITY_PAGES: usize = 1024;
/// The most pages of empty zspages the bins of a shard keep.
const MAX_ALLOWANCE_PAGES: usize = 256;

/// One of the independent parts of a pool.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) bins: Box<[Bin]>,
    pub(crate) allowance: Allowance,
    pub(crate) runs: Mutex<RunLists>,
    /// Words whose free is deferred; `None` if frees are not deferred.
    pub(crate) deferred: Option<Ring>,
}

/// A pool of objects of 1 byte to a page, stored densely.
///
/// Objects are immutable from [`store`](Pool::store) to [`free`](Pool::free). Any number of threads
/// may use a pool; no lock covers all of it.
///
/// ```
/// use zsmalloc::{Config, HeapSource, Pool};
///
/// let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(4096))?;
/// let word = pool.store(&[b"header ", b"and body"])?;
/// // The owner keeps the word and the length.
/// pool.read(word, 15, |object| assert_eq!(object, b"header and body"));
/// pool.free(word);
/// assert!(pool.try_free(word).is_err(), "a double free is reported");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Pool<S: PageSource> {
    pub(crate) source: S,
    pub(crate) base: NonNull<u8>,
    pub(crate) capacity_pages: usize,
    pub(crate) classes: ClassTable,
    pub(crate) arenas: Arenas,
    pub(crate) shards: Box<[Shard]>,
    pub(crate) epoch: Epoch,
    /// One for each class, held by the compacting thread.
    pub(crate) compactors: Box<[Mutex<()>]>,
    pub(crate) drain_signal: DrainSignal,
    pub(crate) deferred_misuse: AtomicU64,
    pub(crate) resident_pages: AtomicUsize,
    pub(crate) discard_failures: AtomicU64,
    pub(crate) retained_pages: usize,
    /// See [`Config::spare_part`]; 0 also if the source has no huge pages.
    pub(crate) spare_part: usize,
    pub(crate) huge_splits: AtomicU64,
    /// It is called with nothing of the pool half changed.
    pub(crate) huge_page_limit: OnceLock<AssertUnwindSafe<Box<dyn HugePageLimit>>>,
    pub(crate) created: Instant,
    /// Milliseconds from `created` to when spare memory became excessive; 0 if it is not.
    pub(crate) spare_excess_since: AtomicU64,
    /// Bytes of deferred objects, and of freed runs, that each shard may leave to a drainer.
    pub(crate) deferred_share: usize,
    zero_freed: bool,
}

// SAFETY: `base` is the pool's own reservation. Bytes are written only by the thread that took the
// slot or run under the lock that guards it, and read only through words of stored objects, which
// are immutable.
unsafe impl<S: PageSource> Send for Pool<S> {}
// SAFETY: as above.
unsafe impl<S: PageSource> Sync for Pool<S> {}

/// A read-side critical section: while it exists, the place of an object that compaction moves is
/// not reused.
///
/// See [`Pool::pin`].
#[derive(Debug)]
#[must_use = "the pin holds only until it is dropped"]
pub struct ReadGuard<'a> {
    _reader: Reader<'a>,
}

impl<S: PageSource> Pool<S> {
    /// Makes a pool and reserves its address range from `source`.
    ///
    /// # Errors
    ///
    /// If a value of the configuration is out of range, or the source or the heap refuses memory.
    pub fn new(source: S, config: Config) -> Result<Self, NewPoolError> {
        if !(1..=MAX_CHAIN_PAGES).contains(&config.max_chain_pages) {
            return Err(NewPoolError::Config("max_chain_pages must be 1 to 16"));
        }
        if config.capacity_pages > MAX_CAPACITY_PAGES {
            return Err(NewPoolError::Config("capacity_pages must be at most 2^31"));
        }
        let capacity_pages = config
            .capacity_pages
            .max(MIN_CAPACITY_PAGES)
            .next_power_of_two();
        let huge_pages = source.huge_pages();
        let has_huge_pages = huge_pages.is_power_of_two()
            && (UNIT_PAGES..=MAX_EXTENT_PAGES).contains(&huge_pages)
            && huge_pages <= capacity_pages / 64;
        // Small pools need a few extents for each run length and shard.
        let extent_pages = (capacity_pages / 64).clamp(UNIT_PAGES, MAX_EXTENT_PAGES);
        let block_pages = if has_huge_pages {
            huge_pages
        } else {
            extent_pages
        };
        let arenas = Arenas::new(capacity_pages / extent_pages, extent_pages, block_pages)
            .ok_or(NewPoolError::Metadata)?;
        let classes = ClassTable::try_new(config.max_chain_pages).ok_or(NewPoolError::Metadata)?;
        let class_count = classes.classes().len();
        let shard_count = match config.shards {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            shards => shards,
        };
        let shard_count = shard_count.min(MAX_SHARDS).next_power_of_two();
        let deferred_share = config.deferred_bytes / shard_count;
        let shard = || {
            Some(Shard {
                bins: boxed(class_count, Bin::new)?,
                allowance: Allowance::new(config.retained_pages.min(MAX_ALLOWANCE_PAGES)),
                runs: Mutex::new(RunLists::new()),
                deferred: match deferred_share {
                    0 => None,
                    share => Some(Ring::for_bytes(share)?),
                },
            })
        };
        let mut shards = Vec::new();
        shards
            .try_reserve_exact(shard_count)
            .map_err(|_| NewPoolError::Metadata)?;
        for _ in 0..shard_count {
            shards.push(shard().ok_or(NewPoolError::Metadata)?);
        }
        let compactors = boxed(class_count, || Mutex::new(())).ok_or(NewPoolError::Metadata)?;
        let epoch = Epoch::new(shard_count).ok_or(NewPoolError::Metadata)?;
        let base = source.reserve(capacity_pages)?;
        Ok(Self {
            source,
            base,
            capacity_pages,
            classes,
            arenas,
            shards: shards.into_boxed_slice(),
            epoch,
            compactors,
            drain_signal: DrainSignal::new(),
            deferred_misuse: AtomicU64::new(0),
            resident_pages: AtomicUsize::new(0),
            discard_failures: AtomicU64::new(0),
            retained_pages: config.retained_pages,
            spare_part: if has_huge_pages { config.spare_part } else { 0 },
            huge_splits: AtomicU64::new(0),
            huge_page_limit: OnceLock::new(),
            created: Instant::now(),
            spare_excess_since: AtomicU64::new(0),
            deferred_share,
            zero_freed: config.zero_freed,
        })
    }

    /// Stores one object, the concatenation of `parts`, and returns the word that names it.
    ///
    /// # Errors
    ///
    /// If the object is empty or longer than a page, or there is no memory. Nothing is stored then.
    pub fn store(&self, parts: &[&[u8]]) -> Result<ObjectWord, AllocError> {
        let size = parts.iter().map(|part| part.len()).sum();
        let class_index = self.class_for(size)?;
        let shard = self.current_shard();
        {
            // The common case: a slot is free. It is filled under the lock, which a compactor takes
            // to isolate a zspage, so it never sees a half-written object.
            let mut bin = self.shards[shard].bins[class_index].state.lock();
            if let Some(word) = bin.allocate(&self.context(shard, class_index)) {
                join(parts, self.new_slot(word, size));
                return Ok(word);
            }
        }
        self.store_with(size, |slot| join(parts, slot))
    }

    /// Stores one object of `size` bytes that `fill` writes in place. `fill` gets initialised, but
    /// otherwise unspecified bytes (zeros with [`Config::zero_freed`]).
    ///
    /// # Errors
    ///
    /// As [`Pool::store`].
    pub fn store_with(
        &self,
        size: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<ObjectWord, AllocError> {
        let class_index = self.class_for(size)?;
        let shard = self.current_shard();
        // A compactor waits for the pin before it reads the slot, which is half written until then.
        let _pin = self.epoch.enter(shard);
        let word = self.allocate(shard, class_index)?;
        let slot = self.new_slot(word, size);
        let unfinished = FreeOnUnwind { pool: self, word };
        fill(slot);
        std::mem::forget(unfinished);
        Ok(word)
    }

    /// The class for an object of `size` bytes.
    #[inline]
    fn class_for(&self, size: usize) -> Result<usize, AllocError> {
        match size {
            0 => Err(AllocError::Empty),
            1..=PAGE_SIZE => Ok(self.classes.index_of(size)),
            _ => Err(AllocError::TooLarge(size)),
        }
    }

    /// The first `size` bytes of the slot of a new object: this thread has just allocated `word`,
    /// of a large enough class, and not published it.
    #[allow(
        clippy::mut_from_ref,
        reason = "the word is not published yet, so this thread alone accesses its slot"
    )]
    fn new_slot(&self, word: ObjectWord, size: usize) -> &mut [u8] {
        let slot = self.slot(word, &self.classes.classes()[word.class()]);
        // SAFETY: the slot lies in the reservation, is initialised (it reads as zero or as an
        // earlier object), and is used by this thread alone until `word` is published.
        let slot = unsafe { slice::from_raw_parts_mut(slot.as_ptr(), slot.len()) };
        let (object, rest) = slot.split_at_mut(size);
        if self.zero_freed {
            rest.fill(0);
        }
        object
    }

    /// Passes the object that `word` names, `len` bytes long, to `f`. Takes no lock and copies
    /// nothing.
    ///
    /// A pool does not record lengths: `len` must be the length the object was stored with. With
    /// a larger one, `f` also sees bytes after the object, up to the end of its slot.
    ///
    /// The object must not be freed during the call. If the pool is compacted concurrently, take
    /// a [`pin`](Pool::pin) before loading `word` from where it is kept, and drop it afterwards.
    ///
    /// # Panics
    ///
    /// If `word` names no stored object, or `len` is longer than its slot; see
    /// [`Pool::try_read`].
    #[inline]
    pub fn read<R>(&self, word: ObjectWord, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        match self.try_read(word, len, f) {
            Ok(result) => result,
            Err(error) => panic!("{error}"),
        }
    }

    /// Like [`Pool::read`], but returns misuse as an error.
    ///
    /// # Errors
    ///
    /// If `word` names no stored object, or `len` is longer than its slot.
    #[inline]
    pub fn try_read<R>(
        &self,
        word: ObjectWord,
        len: usize,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, MisuseError> {
        self.try_read_slot(word, |slot| match slot.get(..len) {
            Some(object) => Ok(f(object)),
            None => Err(MisuseError::TooLong { word, len }),
        })?
    }

    /// Passes the whole slot of an object to `f`: the object, followed by unspecified bytes. For
    /// owners that keep the length in the object itself. Otherwise as [`Pool::read`].
    ///
    /// # Panics
    ///
    /// If `word` names no stored object; see [`Pool::try_read_slot`].
    #[inline]
    pub fn read_slot<R>(&self, word: ObjectWord, f: impl FnOnce(&[u8]) -> R) -> R {
        match self.try_read_slot(word, f) {
            Ok(result) => result,
            Err(error) => panic!("{error}"),
        }
    }

    /// Like [`Pool::read_slot`], but returns misuse as an error.
    ///
    /// # Errors
    ///
    /// If `word` names no stored object.
    #[inline]
    pub fn try_read_slot<R>(
        &self,
        word: ObjectWord,
        f: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, MisuseError> {
        let (class, zspage) = self.resolve(word)?;
        if zspage.class() != Some(word.class()) || !zspage.is_stored(word.index()) {
            return Err(MisuseError::NotStored(word));
        }
        let slot = self.slot(word, class);
        // SAFETY: the slot lies in the reservation and holds a stored object. Its bytes are not
        // written until it is freed, which the caller must not do during the call; if compaction
        // has moved it, the slot is not reused before the caller drops its pin.
        let slot = unsafe { slice::from_raw_parts(slot.as_ptr(), slot.len()) };
        Ok(f(slot))
    }

    /// The length in bytes of the slot that a word names. It follows from the class in the word:
    /// whether there is such an object is not checked. `None` if this pool has no such class.
    #[inline]
    pub fn slot_bytes(&self, word: ObjectWord) -> Option<usize> {
        self.classes().get(word.class()).map(SizeClass::size)
    }

    /// Enters a read-side critical section: until the guard is dropped, the place of an object that
    /// compaction moves is not reused.
    ///
    /// A reader of a word that [compaction](crate::Relocate) may change takes a pin, loads the
    /// word, reads the object and drops the pin. A pin costs two atomic additions on memory of this
    /// shard and never waits. Do not hold it longer than a read takes.
    #[inline]
    pub fn pin(&self) -> ReadGuard<'_> {
        ReadGuard {
            _reader: self.epoch.enter(self.current_shard()),
        }
    }

    /// Frees an object.
    ///
    /// # Panics
    ///
    /// If `word` names no stored object; see [`Pool::try_free`].
    pub fn free(&self, word: ObjectWord) {
        if let Err(error) = self.try_free(word) {
            panic!("{error}");
        }
    }

    /// Like [`Pool::free`], but returns misuse as an error, which changes nothing.
    ///
    /// # Errors
    ///
    /// If `word` names no stored object.
    pub fn try_free(&self, word: ObjectWord) -> Result<(), MisuseError> {
        let (class, zspage) = self.resolve(word)?;
        let (mut bin, context) = self.lock_bin_of(word, class, zspage)?;
        if !zspage.free_slot(word.index()) {
            return Err(MisuseError::NotStored(word));
        }
        let emptied = bin.after_free(&context, word.page(), zspage);
        drop(bin);
        if let Some(page) = emptied {
            let mut released = Released::new();
            released.push(&self.arenas, page);
            self.release(released);
        }
        Ok(())
    }

    /// Resident bytes of the pool: zspages, freed runs that are not discarded yet, and free parts
    /// of huge pages. Loads one counter.
    pub fn resident_bytes(&self) -> usize {
        self.resident_pages.load(Ordering::Relaxed) * PAGE_SIZE
    }

    /// Bytes of heap of the pool's own records.
    pub fn metadata_bytes(&self) -> usize {
        let places = |shard: &Shard| shard.deferred.as_ref().map_or(0, Ring::places);
        let queues = self.shards.iter().map(places).sum::<usize>() * size_of::<u64>();
        let bins = self.shards.len() * (self.classes.classes().len() * size_of::<Bin>());
        size_of::<Self>()
            + self.shards.len() * size_of::<Shard>()
            + bins
            + queues
            + self.arenas.metadata_bytes()
    }

    /// Pages of address space that the pool has reserved.
    pub fn capacity_pages(&self) -> usize {
        self.capacity_pages
    }

    /// The pool's size classes, smallest first.
    pub fn classes(&self) -> &[SizeClass] {
        self.classes.classes()
    }

    /// The source the pool was made with.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The shard the current thread uses.
    #[inline]
    pub(crate) fn current_shard(&self) -> usize {
        thread_number() & (self.shards.len() - 1)
    }

    pub(crate) fn context(&self, shard: usize, class_index: usize) -> BinContext<'_> {
        BinContext {
            arenas: &self.arenas,
            allowance: &self.shards[shard].allowance,
            class_index,
            class: &self.classes.classes()[class_index],
        }
    }

    /// The class of `word` and the record of its zspage.
    #[inline]
    pub(crate) fn resolve(&self, word: ObjectWord) -> Result<(&SizeClass, &Zspage), MisuseError> {
        let foreign = MisuseError::Foreign(word);
        let class = self.classes.get(word.class()).ok_or(foreign)?;
        let (zspage, pages) = self.arenas.find(word.page()).ok_or(foreign)?;
        if pages != class.pages() || word.index() >= class.objects() {
            return Err(foreign);
        }
        Ok((class, zspage))
    }

    /// Locks the bin that the zspage of `word` belongs to.
    #[inline(always)]
    pub(crate) fn lock_bin_of<'a>(
        &'a self,
        word: ObjectWord,
        class: &'a SizeClass,
        zspage: &Zspage,
    ) -> Result<(Held<'a, BinState>, BinContext<'a>), MisuseError> {
        loop {
            let owner = zspage.owner();
            let shard = &self.shards[owner];
            let bin = shard.bins[word.class()].state.lock();
            if zspage.class() != Some(word.class()) {
                return Err(MisuseError::NotStored(word));
            }
            if zspage.owner() == owner {
                let context = BinContext {
                    arenas: &self.arenas,
                    allowance: &shard.allowance,
                    class_index: word.class(),
                    class,
                };
                return Ok((bin, context));
            }
            // Another shard took the zspage over in between.
        }
    }

    /// The bytes of an object's slot.
    #[inline]
    pub(crate) fn slot(&self, word: ObjectWord, class: &SizeClass) -> Slot {
        let offset = word.page().0 as usize * PAGE_SIZE + word.index() * class.size();
        // SAFETY: zspages lie inside the reservation and objects inside their zspage.
        let start = unsafe { self.base.add(offset) };
        Slot {
            start,
            len: class.size(),
        }
    }

    pub(crate) fn run(&self, page: PageNumber, pages: usize) -> PageRun {
        // SAFETY: the page is one of an arena, so it lies inside the reservation.
        let start = unsafe { self.base.add(page.0 as usize * PAGE_SIZE) };
        PageRun { start, pages }
    }
}

impl<S: PageSource> Drop for Pool<S> {
    fn drop(&mut self) {
        // SAFETY: `new` reserved the range, and nothing borrows the pool any more.
        unsafe { self.source.unreserve(self.base, self.capacity_pages) }
    }
}

/// Where an object lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    start: NonNull<u8>,
    len: usize,
}

impl Slot {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Frees a slot whose filling panicked.
struct FreeOnUnwind<'a, S: PageSource> {
    pool: &'a Pool<S>,
    word: ObjectWord,
}

impl<S: PageSource> Drop for FreeOnUnwind<'_, S> {
    fn drop(&mut self) {
        // The word was just allocated and not published, so this cannot fail.
        let _ = self.pool.try_free(self.word);
    }
}

/// Writes the concatenation of `parts`, which is as long as `whole`.
fn join(parts: &[&[u8]], whole: &mut [u8]) {
    let mut rest = whole;
    for part in parts {
        let (here, after) = rest.split_at_mut(part.len());
        here.copy_from_slice(part);
        rest = after;
    }
}

/// A number of the current thread, counted up from zero.
#[inline]
fn thread_number() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    const UNSET: usize = usize::MAX;
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(UNSET) };
    }
    NUMBER.with(|number| {
        if number.get() == UNSET {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
