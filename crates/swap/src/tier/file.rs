//! Pages in a file: compressed, encrypted, and written in long runs.
//!
//! All metadata is in memory and the key is made for one run, so the file is worthless to others
//! and after the end. A page is encrypted with AES-256-GCM under a nonce that is used once and kept
//! in the slot's annex. Slot and location are authenticated too. So a page that is damaged, moved,
//! truncated, encrypted under another key, or an older one of the same place (a lost write) is
//! refused.
//!
//! The tier makes no system call; it is given a [`FileBackend`].

mod units;

use std::{fmt, io};

use units::Units;

use crate::{
    PAGE_SIZE,
    entry::{Location, TierKind},
    error::{Corruption, LoadError, NewSwapSpaceError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
    },
    tier::{
        Placed, Stored, Tier, TierKey,
        record::{MAX_DATA, OVERHEAD, RecordCodec},
        store_one,
    },
};

/// The unit of allocation, in bytes: a disk's sector, so that each page can be read and written
/// alone with `O_DIRECT`.
const UNIT: usize = FileTier::SECTOR;

/// Bytes read at once when pages are loaded in the order they were written. More saves reads of
/// sequential loads.
const READ_AHEAD: usize = 64 << 10;

/// A file, or something like one, of a fixed size. Offsets and lengths are multiples of
/// [`FileTier::SECTOR`].
pub trait FileBackend: Send + Sync {
    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    ///
    /// If not all of it could be read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes all of `data` at `offset`. Success is final: an error reported later would be a lost
    /// page.
    ///
    /// # Errors
    ///
    /// If not all of it could be written. Some of it may have been.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;
}

/// A page in the file: its first unit, and the length of its data; 0 for an uncompressed page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    unit: u64,
    length: u16,
}

const LENGTH_BITS: u32 = 12;
const UNIT_BITS: u32 = Location::BITS - LENGTH_BITS;

const _: () = assert!(MAX_DATA < 1 << LENGTH_BITS);

impl Extent {
    fn location(self) -> Location {
        Location::from_raw(self.unit << LENGTH_BITS | u64::from(self.length))
    }

    fn of(location: Location) -> Self {
        Self {
            unit: location.into_raw() >> LENGTH_BITS,
            length: (location.into_raw() & ((1 << LENGTH_BITS) - 1)) as u16,
        }
    }

    fn offset(self) -> u64 {
        self.unit * UNIT as u64
    }

    fn data(self) -> usize {
        if self.length == 0 {
            PAGE_SIZE
        } else {
            usize::from(self.length)
        }
    }

    /// Bytes in the file.
    fn bytes(self) -> usize {
        self.data() + OVERHEAD
    }

    fn units(self) -> usize {
        self.bytes().div_ceil(UNIT)
    }
}

/// Data that was read ahead, as it lies in the file.
#[derive(Default)]
struct ReadAhead {
    /// The offset of a load that continues the last one.
    expected: u64,
    start: u64,
    data: Vec<u8>,
}

/// Statistics of the file tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FileUsage {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Failed writes. Their pages stayed where they were.
    pub write_errors: u64,
    /// Failed reads.
    pub read_errors: u64,
}

/// Pages in a file.
///
/// ```no_run
/// use std::{fs::File, io, os::unix::fs::FileExt};
/// use memfold_swap::{FileBackend, TierKey, FileTier};
///
/// struct SwapFile(File);
///
/// impl FileBackend for SwapFile {
///     fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
///         self.0.read_exact_at(buffer, offset)
///     }
///
///     fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
///         self.0.write_all_at(data, offset)
///     }
/// }
///
/// # fn random() -> [u8; 32] { [0; 32] }
/// # let config = memfold_swap::SwapConfig::default();
/// # let mut space = memfold_swap::SwapSpace::new(zsmalloc::HeapSource::new(), config)?;
/// let size = 1 << 30;
/// let file = File::create_new("swap")?;
/// file.set_len(size)?;
/// let key = TierKey::new(random());
/// space.add_tier(Box::new(FileTier::new(Box::new(SwapFile(file)), size, &key, 3)?))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FileTier {
    backend: Box<dyn FileBackend>,
    records: RecordCodec,
    units: Units,
    read_ahead: Mutex<ReadAhead>,
    write_errors: AtomicU64,
    read_errors: AtomicU64,
    /// Failed writes since the last that did not fail.
    failures: AtomicU64,
    /// Batches to refuse before the next write after an error.
    pause: AtomicU64,
    /// The file is full while more units are in use. A hint.
    full_above: AtomicU64,
    /// Whether the tier accepts no more pages.
    closed: AtomicBool,
}

/// The most batches refused after an error, so that a full disk is not written all the time. More
/// leave a disk unused for longer once it has room again.
const LONGEST_PAUSE: u64 = 32;

/// Units that are freed before a full file has room again: those of a batch of incompressible pages. More
/// leave it unused for longer.
const ROOM: u64 = 64 * (PAGE_SIZE + OVERHEAD).div_ceil(UNIT) as u64;

impl FileTier {
    /// Bytes of a sector. Offsets and lengths of reads and writes are multiples of it.
    pub const SECTOR: usize = 512;

    /// A tier on a file of `bytes` bytes. Pages are compressed with Zstandard at `level`.
    ///
    /// # Errors
    ///
    /// If the size is out of range: at least a page, at most 2^49 bytes.
    pub fn new(
        backend: Box<dyn FileBackend>,
        bytes: u64,
        key: &TierKey,
        level: i32,
    ) -> Result<Self, NewSwapSpaceError> {
        let units = bytes / UNIT as u64;
        if bytes < PAGE_SIZE as u64 || units > 1 << UNIT_BITS {
            return Err(NewSwapSpaceError::Config(
                "the swap file must have 4 KiB to 512 TiB",
            ));
        }
        Ok(Self {
            backend,
            records: RecordCodec::new(TierKind::File, key, level),
            units: Units::new(units),
            read_ahead: Mutex::default(),
            write_errors: AtomicU64::new(0),
            read_errors: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            pause: AtomicU64::new(0),
            full_above: AtomicU64::new(u64::MAX),
            closed: AtomicBool::new(false),
        })
    }

    /// Makes the tier refuse pages, so that it can be [evacuated](crate::SwapSpace::evacuate), or
    /// accept them again.
    pub fn set_closed(&self, closed: bool) {
        self.closed.store(closed, Relaxed);
    }

    /// Whether the tier refuses pages.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Whether the last page that was refused found no room, and few have left since. A full file may
    /// have room for smaller pages.
    pub fn is_full(&self) -> bool {
        self.units.used() > self.full_above.load(Relaxed)
    }

    fn note_full(&self) {
        let room = ROOM.min(self.units.size() / 8);
        let above = self.units.used().saturating_sub(room);
        self.full_above.store(above, Relaxed);
    }

    /// Whether the last write failed.
    pub fn is_failing(&self) -> bool {
        self.failures.load(Relaxed) > 0
    }

    /// Tries whether a write succeeds, with zeros where the file has room, and nothing is kept of them.
    /// For a tier that [fails](Self::is_failing) while there is no page to store.
    ///
    /// # Errors
    ///
    /// If the write failed, or the tier would refuse a page without one.
    pub fn probe(&self) -> Result<(), StoreError> {
        if let Some(reason) = self.refusal() {
            return Err(Self::error(reason));
        }
        // As much as a page, where there is so much: less may fit in a block that a full file system
        // had given to the file before.
        let zeros = [0_u8; (PAGE_SIZE + OVERHEAD).next_multiple_of(UNIT)];
        let Some((unit, count)) = self.units.take((zeros.len() / UNIT) as u64, 1) else {
            return Err(Self::error("the file is full"));
        };
        let zeros = &zeros[..count as usize * UNIT];
        let outcome = self.backend.write_at(unit * UNIT as u64, zeros);
        self.note_write(unit, count, &outcome)?;
        self.units.give_back([(unit, count)]);
        Ok(())
    }

    /// Statistics of the tier.
    pub fn usage(&self) -> FileUsage {
        FileUsage {
            used_bytes: self.units.used() * UNIT as u64,
            size_bytes: self.units.size() * UNIT as u64,
            write_errors: self.write_errors.load(Relaxed),
            read_errors: self.read_errors.load(Relaxed),
        }
    }

    const fn error(reason: &'static str) -> StoreError {
        StoreError::Tier {
            tier: TierKind::File,
            reason,
        }
    }

    /// Appends a page's checksum and data to `batch`, with room for the tag and padding to the next
    /// unit. Returns the length of the data as an extent has it.
    fn pack(
        &self,
        slot: Slot,
        page: &Page,
        scratch: &mut Scratch,
        batch: &mut Vec<u8>,
    ) -> Result<u16, StoreError> {
        let length = self.records.pack(slot, page, scratch, batch)?;
        batch.resize(batch.len().next_multiple_of(UNIT), 0);
        Ok(length)
    }

    /// Encrypts the packed pages of a run that starts at `unit`, and writes it.
    fn write(
        &self,
        unit: u64,
        packed: &[(Slot, u16)],
        batch: &mut [u8],
        placed: &mut Vec<Placed>,
    ) -> io::Result<()> {
        let mut rest = &mut *batch;
        let mut next = unit;
        for &(slot, length) in packed {
            let extent = Extent { unit: next, length };
            let (record, after) = rest.split_at_mut(extent.units() * UNIT);
            let number = self
                .records
                .seal(slot, extent.location(), &mut record[..extent.bytes()]);
            placed.push(Placed::WithAnnex(extent.location(), number));
            rest = after;
            next += extent.units() as u64;
        }
        self.backend.write_at(unit * UNIT as u64, batch)
    }

    /// Writes packed pages in runs as long as there is contiguous room, and appends the outcome of
    /// each to `out`. Nothing is kept of pages that could not be written.
    fn write_packed(
        &self,
        mut packed: &[(Slot, u16)],
        mut batch: &mut [u8],
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        if !self.is_full() {
            // It was, and would be again with as many pages.
            self.full_above.store(u64::MAX, Relaxed);
        }
        let units_of = |&(_, length): &(Slot, u16)| Extent { unit: 0, length }.units();
        // The length in units for which no room was found.
        let mut too_long = usize::MAX;
        while let Some(first) = packed.first() {
            let least = units_of(first);
            let wanted = (batch.len() / UNIT) as u64;
            let room = if least < too_long {
                self.units.take(wanted, least as u64)
            } else {
                None
            };
            let Some((unit, found)) = room else {
                too_long = too_long.min(least);
                self.note_full();
                out.push(Err(Self::error("the file is full")));
                packed = &packed[1..];
                batch = &mut std::mem::take(&mut batch)[least * UNIT..];
                continue;
            };
            let (mut count, mut units) = (0, 0);
            for next in packed.iter().map(units_of) {
                if (units + next) as u64 > found {
                    break;
                }
                units += next;
                count += 1;
            }
            let rest = (unit + units as u64, found - units as u64);
            self.units.give_back([rest]);
            let (now, later) = std::mem::take(&mut batch).split_at_mut(units * UNIT);
            if let Err(error) = self.write_run(unit, &packed[..count], now, out) {
                out.extend(packed.iter().map(|_| Err(error)));
                return;
            }
            packed = &packed[count..];
            batch = later;
        }
    }

    /// Writes packed pages to an allocated run of units, and frees it on failure.
    fn write_run(
        &self,
        unit: u64,
        packed: &[(Slot, u16)],
        batch: &mut [u8],
        out: &mut Vec<Result<Placed, StoreError>>,
    ) -> Result<(), StoreError> {
        let mut placed = Vec::with_capacity(packed.len());
        let outcome = self.write(unit, packed, batch, &mut placed);
        self.note_write(unit, (batch.len() / UNIT) as u64, &outcome)?;
        out.extend(placed.into_iter().map(Ok));
        Ok(())
    }

    /// Notes the outcome of a write to an allocated run of units, and frees it on failure.
    fn note_write(
        &self,
        unit: u64,
        count: u64,
        outcome: &io::Result<()>,
    ) -> Result<(), StoreError> {
        if outcome.is_ok() {
            self.units.note_written(unit, count);
            self.failures.store(0, Relaxed);
            self.pause.store(0, Relaxed);
            return Ok(());
        }
        self.units.note_failed(unit, count);
        self.write_errors.fetch_add(1, Relaxed);
        let failures = self.failures.fetch_add(1, Relaxed);
        self.pause
            .store((1 << failures.min(63)).min(LONGEST_PAUSE), Relaxed);
        Err(Self::error("a write failed"))
    }

    /// Whether this batch is refused because of failed writes.
    fn is_paused(&self) -> bool {
        self.pause
            .fetch_update(Relaxed, Relaxed, |pause| pause.checked_sub(1))
            .is_ok()
    }

    /// Why this batch is refused before anything is written.
    fn refusal(&self) -> Option<&'static str> {
        if self.is_closed() {
            Some("it is being switched off")
        } else if self.is_paused() {
            Some("a recent write failed")
        } else {
            None
        }
    }

    /// Reads the units of a record, from the read-ahead data if they are there. `Ok(true)` if they
    /// were.
    fn read(&self, extent: Extent, record: &mut [u8]) -> io::Result<bool> {
        let Ok(mut ahead) = self.read_ahead.try_lock() else {
            return self.read_from_file(extent, record);
        };
        let (start, end) = (extent.offset(), extent.offset() + record.len() as u64);
        let sequential = ahead.expected == start;
        ahead.expected = start + (extent.units() * UNIT) as u64;
        if ahead.start <= start && end <= ahead.start + ahead.data.len() as u64 {
            let at = (start - ahead.start) as usize;
            record.copy_from_slice(&ahead.data[at..at + record.len()]);
            return Ok(true);
        }
        if !sequential {
            drop(ahead);
            return self.read_from_file(extent, record);
        }
        let written = self.units.end() * UNIT as u64;
        let length = (written.saturating_sub(start) as usize).clamp(record.len(), READ_AHEAD);
        ahead.start = start;
        ahead.data.resize(length, 0);
        if self.backend.read_at(start, &mut ahead.data).is_err() {
            ahead.data.clear();
            drop(ahead);
            return self.read_from_file(extent, record);
        }
        record.copy_from_slice(&ahead.data[..record.len()]);
        Ok(false)
    }

    fn read_from_file(&self, extent: Extent, record: &mut [u8]) -> io::Result<bool> {
        self.backend
            .read_at(extent.offset(), record)
            .map(|()| false)
    }

    fn decode(
        &self,
        stored: Stored<'_>,
        record: &mut [u8],
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), Corruption> {
        let extent = Extent::of(stored.location());
        let sealed = &mut record[..extent.bytes()];
        self.records.open(stored, sealed, out, scratch)
    }
}

impl Tier for FileTier {
    fn kind(&self) -> TierKind {
        TierKind::File
    }

    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError> {
        store_one(self, slot, page, scratch)
    }

    fn store_batch(
        &self,
        pages: &[(Slot, &Page)],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        if let Some(reason) = self.refusal() {
            out.extend(pages.iter().map(|_| Err(Self::error(reason))));
            return;
        }
        let mut batch = Vec::with_capacity(pages.len() * PAGE_SIZE / 2);
        let mut packed = Vec::with_capacity(pages.len());
        let mut outcomes = Vec::with_capacity(pages.len());
        for &(slot, page) in pages {
            let length = self.pack(slot, page, scratch, &mut batch);
            packed.extend(length.map(|length| (slot, length)));
            outcomes.push(length.map(drop));
        }
        let mut placed = Vec::with_capacity(packed.len());
        self.write_packed(&packed, &mut batch, &mut placed);
        let mut placed = placed.into_iter();
        out.extend(outcomes.into_iter().map(|outcome| {
            outcome.and_then(|()| placed.next().unwrap_or(Err(Self::error("no outcome"))))
        }));
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let (slot, tier) = (stored.slot(), TierKind::File);
        let failed = |_| {
            self.read_errors.fetch_add(1, Relaxed);
            LoadError::Tier {
                slot,
                tier,
                reason: "a read failed",
            }
        };
        let extent = Extent::of(stored.location());
        let mut buffer = [0; (PAGE_SIZE + OVERHEAD).next_multiple_of(UNIT)];
        let record = &mut buffer[..extent.units() * UNIT];
        let from_cache = self.read(extent, record).map_err(failed)?;
        let mut decoded = self.decode(stored, record, out, scratch);
        if decoded.is_err() && from_cache {
            // The file may have been written since the read-ahead.
            self.read_from_file(extent, record).map_err(failed)?;
            decoded = self.decode(stored, record, out, scratch);
        }
        decoded.map_err(|what| LoadError::Corrupt { slot, tier, what })
    }

    fn free(&self, locations: &mut [Location]) {
        let extents = locations.iter().map(|&location| Extent::of(location));
        self.units
            .give_back(extents.map(|extent| (extent.unit, extent.units() as u64)));
    }

    fn bytes(&self, location: Location) -> u64 {
        (Extent::of(location).units() * UNIT) as u64
    }
}

impl fmt::Debug for FileTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileTier")
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}
