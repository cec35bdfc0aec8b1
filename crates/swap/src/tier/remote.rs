//! Pages in a store on other machines: compressed, encrypted, and sent in batches.
//!
//! ```text
//!  in the pool ──► sent ──► acknowledged ──► entry changed ──► freed in the pool
//!       ▲            │ error, or too few replicas
//!       └────────────┘ the batch is abandoned and removed later
//! ```
//!
//! - **Nothing is freed before it is acknowledged.** A store returns once the backend has the store's
//!   acknowledgement; only then does the space change the entry and free the pool's copy. On any error
//!   the page stays where it was, and the batch, which may have arrived, is removed later.
//! - **No place is used twice.** A command that arrives late can neither remove nor replace another
//!   page, so a load needs no lock and may take long ([`Tier::may_wait`]).
//! - **A record is bound to its place.** It is encrypted with AES-256-GCM under a nonce that is used
//!   once and kept in the slot's annex; slot and location are authenticated. What was forged, damaged,
//!   moved or replayed is refused ([`Corruption::Forged`]), and what is gone, too
//!   ([`Corruption::Lost`]).
//! - **A load waits** for a store that does not answer, for a bounded time ([`RemoteConfig::patience`]).
//! - **Time to live.** The store forgets what is not renewed ([`RemoteTier::maintain`]), so a run that
//!   was killed leaves nothing behind.
//!
//! The tier makes no system call and knows no network: it is given a [`RemoteBackend`].

mod ahead;
mod backend;
mod batches;
mod config;
mod health;
#[cfg(feature = "testing")]
pub(super) mod model;
mod upkeep;
mod waits;

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

pub use backend::{Batch, BatchId, Place, RemoteBackend, RemoteError, Removal};
pub use config::{RemoteConfig, RemoteUsage};

use ahead::Ahead;
use backend::{BATCH_PAGES, UNIT, units};
use batches::{Batches, FileCopy};
use health::{Health, pause_before};
use upkeep::Renewal;

use crate::{
    PAGE_SIZE,
    entry::{Location, TierKind},
    error::{Corruption, LoadError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::*},
        lock,
    },
    tier::{
        Placed, Stored, Tier, TierKey,
        file::FileTier,
        record::{OVERHEAD, RecordCodec},
        store_one,
    },
};

#[derive(Debug, Default)]
struct Counters {
    pages_out: AtomicU64,
    pages_in: AtomicU64,
    retries: AtomicU64,
    store_failures: AtomicU64,
    load_failures: AtomicU64,
    copies_read: AtomicU64,
    lost_pages: AtomicU64,
}

/// Pages in a store on other machines.
///
/// Any number of threads may use a tier. One must call [`maintain`](Self::maintain) at intervals.
pub struct RemoteTier {
    backend: Box<dyn RemoteBackend>,
    records: RecordCodec,
    config: RemoteConfig,
    /// Where a copy of each page is kept.
    copies: OnceLock<Arc<FileTier>>,
    batches: Mutex<Batches>,
    /// What they take, read without their lock.
    batches_bytes: AtomicU64,
    ahead: Mutex<Ahead>,
    health: Health,
    renewal: Mutex<Renewal>,
    counters: Counters,
    /// Whether the tier accepts no more pages.
    closed: AtomicBool,
    /// Whether nothing waits for the store any more.
    ending: AtomicBool,
}

/// A page that is packed for the store.
struct Packed {
    slot: Slot,
    record: Vec<u8>,
    /// Its place in the outcomes.
    outcome: usize,
    copy: Option<FileCopy>,
}

/// Whether a record has the length that its location says.
fn is_as_long(record: &[u8], location: Location) -> bool {
    record.len().div_ceil(UNIT) == units(location)
}

impl RemoteTier {
    /// The most bytes of a record: a backend need not accept a longer one from a store.
    pub const LONGEST_RECORD: usize = PAGE_SIZE + OVERHEAD;

    /// A tier in the store behind `backend`.
    pub fn new(backend: Box<dyn RemoteBackend>, key: &TierKey, config: RemoteConfig) -> Self {
        let renewal = Renewal::new(backend.time_of_store() + config.renew_every);
        Self {
            backend,
            records: RecordCodec::new(TierKind::Remote, key, config.level),
            config,
            copies: OnceLock::new(),
            batches: Mutex::default(),
            batches_bytes: AtomicU64::new(0),
            ahead: Mutex::default(),
            health: Health::default(),
            renewal: Mutex::new(renewal),
            counters: Counters::default(),
            closed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    /// Writes each page to `file` before it is sent, and reads it from there where the store fails. To
    /// be called before the tier is used.
    ///
    /// # Panics
    ///
    /// If it was called before.
    pub fn keep_copies_in(&self, file: Arc<FileTier>) {
        let is_first = self.copies.set(file).is_ok();
        assert!(is_first, "copies are kept in one file");
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

    /// Whether the tier refuses pages for now, because the store failed to take some.
    pub fn is_paused(&self) -> bool {
        self.health.is_paused(self.backend.now()).is_some()
    }

    /// Statistics of the tier.
    pub fn usage(&self) -> RemoteUsage {
        let (waiting, waiting_for, trouble) = self.health.waiting(self.backend.now());
        let counters = &self.counters;
        RemoteUsage {
            pages_out: counters.pages_out.load(Relaxed),
            pages_in: counters.pages_in.load(Relaxed),
            retries: counters.retries.load(Relaxed),
            store_failures: counters.store_failures.load(Relaxed),
            load_failures: counters.load_failures.load(Relaxed),
            copies_read: counters.copies_read.load(Relaxed),
            lost_pages: counters.lost_pages.load(Relaxed),
            waiting,
            waiting_for,
            trouble,
        }
    }

    const fn error(reason: &'static str) -> StoreError {
        StoreError::Tier {
            tier: TierKind::Remote,
            reason,
        }
    }

    /// Writes the copies of pages to the file. Returns the outcome of each. A file that was given up (swapoff) keeps no
    /// more: pages go to the store alone.
    fn keep_copies(
        &self,
        pages: &[(Slot, &Page)],
        scratch: &mut Scratch,
    ) -> Vec<Result<Option<FileCopy>, StoreError>> {
        let Some(file) = self.copies.get().filter(|file| !file.is_closed()) else {
            return pages.iter().map(|_| Ok(None)).collect();
        };
        let mut placed = Vec::with_capacity(pages.len());
        file.store_batch(pages, scratch, &mut placed);
        let copy = |placed| match placed {
            Placed::WithAnnex(location, word) => Ok(Some((location, word))),
            _ => Err(Self::error("the file kept no copy")),
        };
        placed.into_iter().map(|one| one.and_then(copy)).collect()
    }

    /// When the store has forgotten what is not renewed from now on. What is under way to it may still arrive,
    /// such as a renewal.
    fn expires(&self) -> Duration {
        self.backend.time_of_store() + self.config.time_to_live + self.config.renew_every
    }

    fn publish_bytes(&self, batches: &Batches) {
        self.batches_bytes
            .store(batches.heap_bytes() as u64, Relaxed);
    }

    fn free_copies(&self, copies: impl Iterator<Item = FileCopy>) {
        if let Some(file) = self.copies.get() {
            let mut locations: Vec<_> = copies.map(|(location, _)| location).collect();
            if !locations.is_empty() {
                file.free(&mut locations);
            }
        }
    }

    /// Sends packed pages, in batches at once, and writes the outcome of each to `out`.
    fn send(&self, packed: Vec<Packed>, out: &mut [Result<Placed, StoreError>]) {
        let mut rest = packed.into_iter().peekable();
        let (mut batches, mut sent) = (Vec::new(), Vec::new());
        while rest.peek().is_some() {
            let Some(id) = lock(&self.batches).number() else {
                let left = rest.by_ref();
                self.free_copies(left.filter_map(|page| page.copy));
                break;
            };
            let (mut records, mut pages) = (Vec::new(), Vec::new());
            for (mut page, index) in rest.by_ref().take(BATCH_PAGES).zip(0..) {
                let location = Place { batch: id, index }.location(page.record.len());
                let word = self.records.seal(page.slot, location, &mut page.record);
                records.push(page.record);
                pages.push((page.outcome, Placed::WithAnnex(location, word), page.copy));
            }
            batches.push(Batch { id, records });
            sent.push(pages);
        }
        let outcomes = self.backend.put(&batches);
        self.health.note_store(&outcomes, self.backend.now());
        for ((batch, pages), outcome) in batches.iter().zip(sent).zip(outcomes) {
            let copies = pages.iter().filter_map(|(.., copy)| *copy);
            let is_noted = {
                let mut batches = lock(&self.batches);
                let is_noted = match outcome {
                    Ok(()) => batches.add(batch.id, pages.len(), copies.clone().collect()),
                    Err(_) => {
                        batches.abandon(batch.id, self.expires());
                        false
                    }
                };
                self.publish_bytes(&batches);
                is_noted
            };
            let reason = match outcome {
                Ok(()) if is_noted => {
                    let count = pages.len() as u64;
                    self.counters.pages_out.fetch_add(count, Relaxed);
                    for (outcome, placed, _) in pages {
                        out[outcome] = Ok(placed);
                    }
                    continue;
                }
                Ok(()) => "the store was cleared",
                Err(error) => error.reason(),
            };
            self.counters.store_failures.fetch_add(1, Relaxed);
            self.free_copies(copies);
            for (outcome, ..) in pages {
                out[outcome] = Err(Self::error(reason));
            }
        }
    }

    fn decode(
        &self,
        stored: Stored<'_>,
        mut record: Vec<u8>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), Corruption> {
        if !is_as_long(&record, stored.location()) {
            return Err(Corruption::Forged);
        }
        self.records.open(stored, &mut record, out, scratch)
    }

    /// Gets a record, waiting for a store that does not answer. `Err` if it did not for too long.
    fn fetch(&self, place: Place, patience: Duration) -> Result<Option<Vec<u8>>, RemoteError> {
        let started = self.backend.now();
        let (mut tries, mut waiting) = (0, None);
        let got = loop {
            if self.is_ending() {
                break Err(RemoteError::Unavailable("it is no longer waited for"));
            }
            let got = self.backend.get(&[place]).pop();
            let error = match got.unwrap_or(Err(RemoteError::Unavailable("no outcome"))) {
                Ok(record) => break Ok(record),
                Err(error) => error,
            };
            tries += 1;
            let now = self.backend.now();
            waiting.get_or_insert_with(|| {
                self.health.begin_wait(error, now);
                now
            });
            let waited = now.saturating_sub(started);
            if waited >= patience {
                break Err(error);
            }
            self.counters.retries.fetch_add(1, Relaxed);
            self.backend.sleep(pause_before(tries));
        };
        self.health.end_load(waiting, got.is_ok());
        got
    }

    /// Loads a page from the store, waiting for it as long as `patience`.
    fn load_remote(
        &self,
        patience: Duration,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let (slot, tier) = (stored.slot(), TierKind::Remote);
        let place = Place::of(stored.location());
        let ahead = lock(&self.ahead).take(place);
        if let Some(record) = ahead
            && self.decode(stored, record, out, scratch).is_ok()
        {
            return Ok(());
        }
        let mut found = Corruption::Lost;
        // What is missing or wrong is asked for once more: an answer may have been mixed up.
        for _ in 0..2 {
            let record = self
                .fetch(place, patience)
                .map_err(|error| LoadError::Tier {
                    slot,
                    tier,
                    reason: error.reason(),
                })?;
            found = match record {
                None => Corruption::Lost,
                Some(record) => match self.decode(stored, record, out, scratch) {
                    Ok(()) => return Ok(()),
                    Err(what) => what,
                },
            };
        }
        Err(LoadError::Corrupt {
            slot,
            tier,
            what: found,
        })
    }

    /// Loads a page from its copy in the file; `None` if there is none.
    fn load_copy(
        &self,
        file: &FileTier,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Option<Result<(), LoadError>> {
        let (location, word) = lock(&self.batches).copy(Place::of(stored.location()))?;
        self.counters.copies_read.fetch_add(1, Relaxed);
        let annex = AtomicU64::new(word);
        Some(file.load(Stored::new(stored.slot(), location, &annex), out, scratch))
    }
}

impl RemoteTier {
    /// Loads a page from the store, or else from its copy in the file. The store is waited for only if
    /// the copy cannot be read either. After a load that it did not answer it is not asked first, until it answers
    /// [`maintain`](Self::maintain): each call could take as long as a store that hangs is waited for.
    fn load_either(
        &self,
        file: &FileTier,
        patience: Duration,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        if self.health.not_returned().is_some()
            && let Some(Ok(())) = self.load_copy(file, stored, out, scratch)
        {
            return Ok(());
        }
        let remote = self.load_remote(Duration::ZERO, stored, out, scratch);
        if remote.is_ok() {
            return Ok(());
        }
        let copy = self.load_copy(file, stored, out, scratch);
        match (remote, copy) {
            (Err(LoadError::Tier { .. }), Some(Ok(()))) => {
                self.health.note_not_returned(Place::of(stored.location()));
                Ok(())
            }
            (_, Some(Ok(()))) => Ok(()),
            (Err(LoadError::Tier { .. }), _) if !patience.is_zero() => {
                self.load_remote(patience, stored, out, scratch)
            }
            (Err(error @ LoadError::Tier { .. }), _) => Err(error),
            (remote, copy) => copy.unwrap_or(remote),
        }
    }

    /// Loads a page from the store or from its copy.
    fn load_within(
        &self,
        patience: Duration,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let loaded = match self.copies.get() {
            Some(file) => self.load_either(file, patience, stored, out, scratch),
            None => self.load_remote(patience, stored, out, scratch),
        };
        let counter = match loaded {
            Ok(()) => &self.counters.pages_in,
            Err(_) => &self.counters.load_failures,
        };
        counter.fetch_add(1, Relaxed);
        loaded
    }
}

impl Tier for RemoteTier {
    fn kind(&self) -> TierKind {
        TierKind::Remote
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
        let refusal = if self.is_closed() {
            Some("it is being switched off")
        } else {
            let paused = self.health.is_paused(self.backend.now());
            paused.map(RemoteError::reason)
        };
        if let Some(reason) = refusal {
            out.extend(pages.iter().map(|_| Err(Self::error(reason))));
            return;
        }
        let first = out.len();
        out.resize(
            first + pages.len(),
            Err(Self::error("all places are used up")),
        );
        let out = &mut out[first..];
        let copies = self.keep_copies(pages, scratch);
        let mut packed = Vec::with_capacity(pages.len());
        for (outcome, (&(slot, page), copy)) in pages.iter().zip(copies).enumerate() {
            let record = copy.and_then(|copy| {
                let mut record = Vec::new();
                let packed = self.records.pack(slot, page, scratch, &mut record);
                if packed.is_err() {
                    self.free_copies(copy.into_iter());
                }
                packed.map(|_| (copy, record))
            });
            match record {
                Ok((copy, record)) => packed.push(Packed {
                    slot,
                    record,
                    outcome,
                    copy,
                }),
                Err(error) => out[outcome] = Err(error),
            }
        }
        self.send(packed, out);
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.load_within(self.config.patience, stored, out, scratch)
    }

    fn load_now(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.load_within(Duration::ZERO, stored, out, scratch)
    }

    fn free(&self, locations: &mut [Location]) {
        let mut copies = Vec::new();
        let expires = self.expires();
        {
            let mut batches = lock(&self.batches);
            for &location in &*locations {
                copies.extend(batches.free(Place::of(location), expires));
            }
            self.publish_bytes(&batches);
        }
        self.free_copies(copies.into_iter());
    }

    fn bytes(&self, location: Location) -> u64 {
        (units(location) * UNIT) as u64
    }

    fn metadata_bytes(&self) -> u64 {
        self.batches_bytes.load(Relaxed)
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn prefetch(&self, locations: &[Location]) {
        let mut locations = locations.to_vec();
        {
            let ahead = lock(&self.ahead);
            locations.retain(|one| !ahead.has(Place::of(*one)));
        }
        // Copies are read first then.
        let is_away = self.health.not_returned().is_some();
        if locations.len() < 2 || is_away || self.is_ending() {
            return;
        }
        let places: Vec<_> = locations.iter().map(|one| Place::of(*one)).collect();
        // What fails is fetched again when it is loaded.
        let got = self.backend.get(&places);
        let mut ahead = lock(&self.ahead);
        for (location, record) in locations.into_iter().zip(got) {
            // A longer one is forged, and would take more memory than it may.
            if let Ok(Some(record)) = record
                && is_as_long(&record, location)
            {
                ahead.insert(Place::of(location), record);
            }
        }
    }
}

impl fmt::Debug for RemoteTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteTier")
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}
