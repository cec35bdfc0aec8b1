//! The engine: one account of memory, one swap space, and the threads that work for them.

use super::account::{Account, LEAST_PAGES};
use super::area::{Area, GRANULE};
use super::bell::Bell;
use super::config::{Config, Mode};
use super::error::Error;
use super::protected::Protected;
use super::readahead::Readahead;
use super::reclaim::Hand;
use super::stats::{Counters, Gauges, Stats};
use super::streams::Streams;
use super::worker::{BATCH, WORKERS};
use super::{listener, registry, signals, worker};
use crate::backoff::CompressionPolicy;
use crate::pool_memory::MappedSource;
use memfold_swap::{Slot, SwapConfig, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::fork::Owner;
use memfold_sys::futex;
use memfold_sys::reserve::Reservation;
use memfold_sys::signal::block_all;
use memfold_sys::thread;
use memfold_sys::uffd::{self, Uffd};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Slots of pages that were brought in, released together off the faults' path.
pub(super) const SPENT_SLOTS: usize = 512;

/// All that faults, reclaim and advice share.
pub(crate) struct Shared {
    pub(super) mode: Mode,
    pub(super) owner: Owner,
    pub(super) uffd: Option<OwnedFd>,
    /// Memory for pages on their way out: a batch for each worker.
    pub(super) stage: Reservation,
    pub(super) space: SwapSpace<MappedSource>,
    pub(super) account: Account,
    pub(super) compression: CompressionPolicy,
    pub(super) areas: RwLock<Vec<Arc<Area>>>,
    pub(super) hand: Mutex<Hand>,
    /// Areas that were unmapped and whose slots are still to be released.
    pub(super) graveyard: Mutex<Vec<Arc<Area>>>,
    /// Held by the listener while it serves a fault: who waited for that one may run on before it
    /// has put in all that it brings, and unmap the region.
    pub(super) listening: Mutex<()>,
    /// How many areas are unmapped and not released, those being released included. Who waits for
    /// it is woken when there is none.
    pub(super) unburied: AtomicU32,
    pub(super) spent: Mutex<Vec<Slot>>,
    pub(super) reclaim_bell: Bell,
    pub(super) readahead: Readahead,
    pub(super) streams: Streams,
    pub(super) counters: Counters,
    pub(super) mapped_bytes: AtomicU64,
    pub(super) record_bytes: AtomicU64,
    pub(super) stopping: AtomicBool,
}

/// An engine: a limit, and regions under it. All methods may be called from any thread.
pub struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Whether there is a thread that reads fault messages.
    listens: bool,
}

fn physical_pages() -> usize {
    // SAFETY: takes a number and returns one.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0).max(1 << 16)
}

/// Half of the memory that the host, or the cgroup of this process, allows, in bytes.
///
/// # Errors
/// If the host does not tell.
pub fn default_limit() -> Result<u64, Error> {
    match memfold_sys::probe::memory_allowance() {
        Ok(allowance) => Ok(allowance.bytes / 2),
        Err(error) => Err(Error::system("find out how much memory the host allows")(
            error,
        )),
    }
}

fn swap_config(config: &Config) -> SwapConfig {
    SwapConfig {
        algorithm: config.algorithm.into(),
        checksum: config.checksum,
        // Address space only: room for a pool several times as large as memory in each length of
        // zspage, and for slots of far more.
        pool_capacity_pages: (physical_pages() * 4).next_power_of_two().min(1 << 28),
        max_slots: (physical_pages() * 64).next_power_of_two().min(1 << 30),
        shards: memfold_sys::thread::allowed_cpus().len().min(64),
        ..SwapConfig::default()
    }
}

/// The userfaultfd of a mode. The error is [`Error::ModeUnavailable`] only if the host lacks
/// userfaultfd or forbids it: another mode does not help where descriptors or memory have run out.
fn open(mode: Mode) -> Result<OwnedFd, Error> {
    let created = match mode {
        Mode::Thread => Uffd::create(),
        _ => Uffd::create_for_user_mode().or_else(|_| Uffd::create()),
    };
    let uffd = created.map_err(|errno| match errno.0 {
        libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EINVAL => Error::ModeUnavailable {
            mode,
            why: format!("userfaultfd: {errno}"),
        },
        _ => Error::system("open a userfaultfd")(errno.into()),
    })?;
    // SAFETY: `create` returned a descriptor that nothing else closes.
    let descriptor = unsafe { OwnedFd::from_raw_fd(uffd.0) };
    let features = uffd::FEATURE_MOVE
        | match mode {
            Mode::Thread => uffd::FEATURE_THREAD_ID | uffd::FEATURE_EXACT_ADDRESS,
            _ => uffd::FEATURE_SIGBUS,
        };
    uffd.api(features).map_err(|errno| Error::ModeUnavailable {
        mode,
        why: format!("the kernel lacks features of userfaultfd that Linux 6.8 has ({errno})"),
    })?;
    Ok(descriptor)
}

impl Engine {
    /// Makes an engine and starts its threads.
    ///
    /// # Errors
    /// If the limit is too small, or the host does not allow what the mode needs.
    pub fn new(config: &Config) -> Result<Engine, Error> {
        let least = 2 * LEAST_PAGES * PAGE_SIZE as u64;
        let smallest = [config.limit.total_bytes, config.limit.resident_bytes]
            .into_iter()
            .flatten()
            .min();
        if let Some(bytes) = smallest.filter(|bytes| *bytes < least) {
            return Err(Error::LimitTooSmall { bytes, least });
        }
        let (mode, uffd) = choose(config.mode)?;
        worker::prepare().map_err(Error::system("allocate buffers"))?;
        // One page more for the listener's doorbell.
        let stage = Reservation::new((WORKERS * BATCH + 1) * PAGE_SIZE, PAGE_SIZE)
            .and_then(|stage| stage.make_anonymous(0).map(|()| stage))
            .map_err(Error::system("reserve the stage"))?;
        if let Some(uffd) = &uffd {
            let range = (stage.start().as_ptr() as u64, stage.length() as u64);
            Uffd(uffd.as_raw_fd())
                .register(range.0, range.1)
                .map_err(|errno| Error::system("register the stage")(errno.into()))?;
        }
        let shared = Arc::new(Shared {
            mode,
            owner: Owner::this(),
            uffd,
            stage,
            space: SwapSpace::new(MappedSource::default(), swap_config(config))
                .map_err(|error| Error::Pool(Box::new(error)))?,
            account: Account::new(config.limit),
            compression: CompressionPolicy::new(config.limit),
            areas: RwLock::default(),
            hand: Mutex::default(),
            graveyard: Mutex::default(),
            listening: Mutex::default(),
            unburied: AtomicU32::new(0),
            spent: Mutex::new(Vec::with_capacity(SPENT_SLOTS)),
            reclaim_bell: Bell::default(),
            readahead: Readahead::new(config.readahead && mode != Mode::Protection),
            streams: Streams::default(),
            counters: Counters::default(),
            mapped_bytes: AtomicU64::new(0),
            record_bytes: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        });
        shared.refresh_account();
        let signal = match mode {
            Mode::Signal => Some(signals::MISSING),
            Mode::Protection => Some(signals::PROTECTED),
            Mode::Thread => None,
        };
        if let Some(signal) = signal {
            signals::install(signal).map_err(Error::system("install the signal handler"))?;
        }
        let mut engine = Engine {
            shared,
            threads: Vec::new(),
            listens: false,
        };
        engine.start("memfold-reclaim", Shared::reclaim_thread)?;
        if engine.shared.uffd.is_some() {
            engine.start("memfold-keeper", keep_descriptor)?;
        }
        if mode == Mode::Thread {
            engine.start("memfold-fault", listener::run)?;
            engine.listens = true;
        }
        if engine.shared.readahead.is_enabled() {
            engine.start("memfold-readahead", Shared::readahead_thread)?;
        }
        Ok(engine)
    }

    fn start(&mut self, name: &str, run: fn(&Shared)) -> Result<(), Error> {
        let shared = self.shared.clone();
        let blocked = block_all();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&shared));
        drop(blocked);
        self.threads
            .push(thread.map_err(Error::system("start a thread"))?);
        Ok(())
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// How faults are served.
    pub fn mode(&self) -> Mode {
        self.shared.mode
    }

    /// Whether it is that of the process which this one was forked by.
    pub fn is_inherited(&self) -> bool {
        !self.shared.owner.is_here()
    }

    /// The figures now.
    pub fn stats(&self) -> Stats {
        let _blocked = block_all();
        self.shared.stats()
    }

    /// Returns when all that was unmapped has been released; at once in a forked child, where
    /// nobody does that.
    pub fn wait_for_release(&self) {
        if self.is_inherited() {
            return;
        }
        loop {
            let unburied = self.shared.unburied.load(Ordering::Acquire);
            if unburied == 0 {
                break;
            }
            self.shared.reclaim_bell.ring();
            // Any outcome is one to look again by.
            let _ = futex::wait(&self.shared.unburied, unburied, None);
        }
        let _blocked = block_all();
        self.shared.release_spent();
    }

    /// Whether the engine's signal handler is the one that is called now. Where it is not, another
    /// was installed later, and must pass faults on by [`handle_fault`](super::handle_fault).
    pub fn is_handler_installed(&self) -> bool {
        match self.shared.mode {
            Mode::Signal => signals::is_installed(signals::MISSING),
            Mode::Protection => signals::is_installed(signals::PROTECTED),
            Mode::Thread => true,
        }
    }
}

/// The mode that was requested, or else the best that the host allows, and its userfaultfd.
fn choose(mode: Option<Mode>) -> Result<(Mode, Option<OwnedFd>), Error> {
    let wanted = mode.unwrap_or(Mode::Signal);
    if wanted == Mode::Protection {
        return Ok((Mode::Protection, None));
    }
    match open(wanted) {
        Ok(uffd) => Ok((wanted, Some(uffd))),
        Err(Error::ModeUnavailable { .. }) if mode.is_none() => Ok((Mode::Protection, None)),
        Err(error) => Err(error),
    }
}

impl Shared {
    /// The userfaultfd.
    ///
    /// # Panics
    /// In a mode that has none.
    pub(super) fn uffd(&self) -> Uffd {
        let descriptor = self.uffd.as_ref().expect("areas of this mode have one");
        Uffd(descriptor.as_raw_fd())
    }

    /// Maps an area.
    pub(super) fn map(self: &Arc<Self>, length: usize) -> Result<Arc<Area>, Error> {
        if !self.owner.is_here() {
            return Err(Error::Forked);
        }
        let _blocked = block_all();
        let rounded = length
            .checked_next_multiple_of(PAGE_SIZE)
            .filter(|length| *length > 0 && *length < 1 << 46)
            .ok_or(Error::Length(length))?;
        let cannot_map = || Error::system("map a region");
        let mapping = Reservation::new(rounded, GRANULE).map_err(cannot_map())?;
        let protected = if self.mode == Mode::Protection {
            Some(Protected::new(&mapping, self.account.allowed()).map_err(cannot_map())?)
        } else {
            mapping.make_anonymous(0).map_err(cannot_map())?;
            self.uffd()
                .register(mapping.start().as_ptr() as u64, rounded as u64)
                .map_err(|errno| Error::system("register a region")(errno.into()))?;
            None
        };
        let area = Area::new(self.clone(), mapping, protected).map_err(cannot_map())?;
        let area = Arc::new(area);
        self.mapped_bytes
            .fetch_add(rounded as u64, Ordering::Relaxed);
        registry::insert(&area);
        self.areas
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(area.clone());
        Ok(area)
    }

    /// Unmaps an area, whose pages are room at once, and leaves its slots to the reclaim thread.
    pub(super) fn unmap(&self, area: &Arc<Area>) {
        if !self.owner.is_here() {
            return;
        }
        let _blocked = block_all();
        registry::remove(area);
        self.areas
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !Arc::ptr_eq(other, area));
        let mut hand = lock(&self.hand);
        hand.cold.retain(|(other, _)| !Arc::ptr_eq(other, area));
        drop(hand);
        // The listener finds it no more; if it did before, it is done with it afterwards.
        drop(lock(&self.listening));
        self.account.release(area.unmap());
        let length = (area.pages * PAGE_SIZE) as u64;
        self.mapped_bytes.fetch_sub(length, Ordering::Relaxed);
        self.unburied.fetch_add(1, Ordering::Relaxed);
        lock(&self.graveyard).push(area.clone());
        self.reclaim_bell.ring();
    }

    /// The engine's area that an address belongs to.
    pub(super) fn area_at(&self, address: usize) -> Option<Arc<Area>> {
        let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
        let mut areas = areas.iter();
        areas.find(|area| area.page_at(address).is_some()).cloned()
    }

    pub(super) fn refresh_account(&self) {
        let records = self.record_bytes.load(Ordering::Relaxed);
        let other = self.space.pool_bytes() + self.space.metadata_bytes() + records;
        self.account.refresh(other);
    }

    /// Notes what became of pages that reclaim tried to move out.
    pub(super) fn note_gain(&self, out: usize, refused: usize) {
        if self.compression.note(out, refused) {
            self.relax_limit();
        }
    }

    /// Nothing more can be moved out, or nothing is gained by it: the program goes on all the same.
    pub(super) fn relax_limit(&self) {
        self.account.relax_limit();
        self.refresh_account();
    }

    pub(super) fn stats(&self) -> Stats {
        Stats::new(self.mode, &self.counters, self.gauges())
    }

    fn gauges(&self) -> Gauges {
        let page = PAGE_SIZE as u64;
        let usage = self.space.usage();
        let limit = self.account.limit();
        Gauges {
            limit_bytes: limit.total_bytes.unwrap_or(0),
            resident_limit_bytes: self.account.allowed_pages() * page,
            resident_bytes: self.account.resident_pages() * page,
            peak_resident_bytes: self.account.peak_pages() * page,
            pool_bytes: usage.pool_bytes,
            metadata_bytes: usage.metadata_bytes + self.record_bytes.load(Ordering::Relaxed),
            mapped_bytes: self.mapped_bytes.load(Ordering::Relaxed),
            pinned_bytes: self.account.pinned_pages() * page,
            stored_pages: usage.stored_pages,
            same_filled_pages: usage.same_filled_pages,
            stored_bytes: usage.stored_bytes,
            over_limit_pages: self.account.excess_pages(),
        }
    }
}

/// Keeps the userfaultfd open until the engine stops. With the last of its descriptors the kernel ends
/// what it is for, and missing pages read as zeros; and programs close what they do not know
/// (`closefrom`). A fault then ends the program instead.
fn keep_descriptor(shared: &Shared) {
    if let Some(uffd) = &shared.uffd {
        // Where it is refused, all is well until somebody closes what is not theirs.
        let _ = thread::keep_only(uffd.as_fd());
    }
    while !shared.stopping.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.is_inherited() {
            // The threads are the parent's, and their locks as the fork found them.
            for thread in self.threads.drain(..) {
                std::mem::forget(thread);
            }
            std::mem::forget(self.shared.clone());
            return;
        }
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.reclaim_bell.ring();
        self.shared.readahead.bell.ring();
        if self.listens {
            listener::stop(&self.shared);
        }
        for thread in &self.threads {
            thread.thread().unpark();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}
