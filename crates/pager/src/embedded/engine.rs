//! The engine: one account of memory, one swap space, and the threads that work for them.

use super::account::Account;
use super::area::Area;
use super::blocks::Blocks;
use super::config::{Config, Mode};
use super::error::Error;
use super::event::{Event, lock};
use super::ledger::Ledger;
use super::limits::{BATCH, DEFERRED_FREES, GRANULE, LEAST_PAGES, WORKERS};
use super::readahead::Readahead;
use super::reclaim::Hand;
use super::stats::{Counters, Gauges, Stats};
use super::streams::Streams;
use super::{listener, registry, signals, worker};
use crate::backoff::CompressionPolicy;
use crate::pool_memory::MappedSource;
use memfold_swap::{Slot, SwapConfig, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::futex;
use memfold_sys::owned_uffd::{self, borrow};
use memfold_sys::reserve::Reservation;
use memfold_sys::signal::block_all;
use memfold_sys::thread;
use memfold_sys::uffd::{self, Uffd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;

/// The state of an engine that faults, reclaim and advice share.
pub(crate) struct EngineState {
    pub(super) mode: Mode,
    pub(super) ledger: Arc<Ledger>,
    pub(super) uffd: Option<OwnedFd>,
    /// Memory that victims are moved to before they are compressed: a batch for each worker.
    pub(super) stage: Reservation,
    pub(super) space: SwapSpace<MappedSource>,
    pub(super) account: Account,
    pub(super) compression: CompressionPolicy,
    pub(super) areas: RwLock<Vec<Arc<Area>>>,
    pub(super) hand: Mutex<Hand>,
    /// Unmapped areas whose slots are not released yet.
    pub(super) pending_release: Mutex<Vec<Arc<Area>>>,
    /// Held by the listener while it serves a fault. The faulting thread may run on, and unmap the
    /// region, before the listener has copied all pages of the window.
    pub(super) listening: Mutex<()>,
    /// A futex: the number of areas that are unmapped and not released, those being released included.
    /// Waiters are woken when it becomes 0.
    pub(super) unreleased: AtomicU32,
    /// Slots of swapped-in pages, to be released in bulk off the fault path.
    pub(super) deferred_frees: Mutex<Vec<Slot>>,
    pub(super) reclaim_event: Event,
    pub(super) readahead: Readahead,
    pub(super) streams: Streams,
    pub(super) counters: Counters,
    pub(super) mapped_bytes: AtomicU64,
    pub(super) stopping: AtomicBool,
}

/// An engine: a limit, and regions under it. All methods may be called from any thread.
pub struct Engine {
    state: Arc<EngineState>,
    threads: Vec<JoinHandle<()>>,
    /// Whether a thread reads fault messages.
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
/// If `/proc/meminfo` or the cgroup's files cannot be read.
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
        // Address space only: four times physical memory for zspages of each length, and 64 times for
        // slots.
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
        Mode::Thread => owned_uffd::create(),
        _ => owned_uffd::create_for_user_mode().or_else(|_| owned_uffd::create()),
    };
    let uffd = created.map_err(|errno| match errno.0 {
        libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EINVAL => Error::ModeUnavailable {
            mode,
            why: format!("userfaultfd: {errno}"),
        },
        _ => Error::system("open a userfaultfd")(errno.into()),
    })?;
    let features = uffd::FEATURE_MOVE
        | match mode {
            Mode::Thread => uffd::FEATURE_THREAD_ID | uffd::FEATURE_EXACT_ADDRESS,
            _ => uffd::FEATURE_SIGBUS,
        };
    borrow(&uffd)
        .api(features)
        .map_err(|errno| Error::ModeUnavailable {
            mode,
            why: format!("the kernel lacks features of userfaultfd that Linux 6.8 has ({errno})"),
        })?;
    Ok(uffd)
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
        // One page more, whose fault stops the listener.
        let stage = Reservation::new((WORKERS * BATCH + 1) * PAGE_SIZE, PAGE_SIZE)
            .and_then(|stage| stage.make_anonymous(0).map(|()| stage))
            .map_err(Error::system("reserve the stage"))?;
        if let Some(uffd) = &uffd {
            let range = (stage.start().as_ptr() as u64, stage.length() as u64);
            borrow(uffd)
                .register(range.0, range.1)
                .map_err(|errno| Error::system("register the stage")(errno.into()))?;
        }
        let state = Arc::new(EngineState {
            mode,
            ledger: Arc::new(Ledger::new()),
            uffd,
            stage,
            space: SwapSpace::new(MappedSource::default(), swap_config(config))
                .map_err(|error| Error::Pool(Box::new(error)))?,
            account: Account::new(config.limit),
            compression: CompressionPolicy::new(config.limit),
            areas: RwLock::default(),
            hand: Mutex::default(),
            pending_release: Mutex::default(),
            listening: Mutex::default(),
            unreleased: AtomicU32::new(0),
            deferred_frees: Mutex::new(Vec::with_capacity(DEFERRED_FREES)),
            reclaim_event: Event::default(),
            readahead: Readahead::new(config.readahead && mode != Mode::Protection),
            streams: Streams::default(),
            counters: Counters::default(),
            mapped_bytes: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        });
        state.refresh_account();
        let signal = match mode {
            Mode::Signal => Some(signals::MISSING),
            Mode::Protection => Some(signals::PROTECTED),
            Mode::Thread => None,
        };
        if let Some(signal) = signal {
            signals::install(signal).map_err(Error::system("install the signal handler"))?;
        }
        let mut engine = Engine {
            state,
            threads: Vec::new(),
            listens: false,
        };
        engine.start("memfold-reclaim", EngineState::reclaim_thread)?;
        if engine.state.uffd.is_some() {
            engine.start("memfold-keeper", keep_descriptor)?;
        }
        if mode == Mode::Thread {
            engine.start("memfold-fault", listener::run)?;
            engine.listens = true;
        }
        if engine.state.readahead.is_enabled() {
            engine.start("memfold-readahead", EngineState::readahead_thread)?;
        }
        Ok(engine)
    }

    fn start(&mut self, name: &str, run: fn(&EngineState)) -> Result<(), Error> {
        let state = self.state.clone();
        let blocked = block_all();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&state));
        drop(blocked);
        self.threads
            .push(thread.map_err(Error::system("start a thread"))?);
        Ok(())
    }

    pub(super) fn state(&self) -> &Arc<EngineState> {
        &self.state
    }

    /// How faults are served.
    pub fn mode(&self) -> Mode {
        self.state.mode
    }

    /// Whether this process is a forked child of the engine's.
    pub fn is_inherited(&self) -> bool {
        !self.state.ledger.owner.is_here()
    }

    /// Statistics, since the engine was made.
    pub fn stats(&self) -> Stats {
        let _blocked = block_all();
        self.state.stats()
    }

    /// Returns when the slots of all unmapped areas are released; at once in a forked child, which has
    /// no reclaim thread.
    pub fn wait_for_release(&self) {
        if self.is_inherited() {
            return;
        }
        loop {
            let unreleased = self.state.unreleased.load(Ordering::Acquire);
            if unreleased == 0 {
                break;
            }
            self.state.reclaim_event.set();
            // The number is read again whatever the outcome.
            let _ = futex::wait(&self.state.unreleased, unreleased, None);
        }
        let _blocked = block_all();
        self.state.release_deferred();
    }

    /// Whether the kernel calls the engine's signal handler. If not, another handler was installed later,
    /// and must pass faults on by [`handle_fault`](super::handle_fault).
    pub fn is_handler_installed(&self) -> bool {
        match self.state.mode {
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

impl EngineState {
    /// The userfaultfd.
    ///
    /// # Panics
    /// In a mode that has none.
    pub(super) fn uffd(&self) -> Uffd {
        borrow(self.uffd.as_ref().expect("areas of this mode have one"))
    }

    /// Maps an area of `length` bytes, rounded up to pages.
    pub(super) fn map(self: &Arc<Self>, length: usize) -> Result<Arc<Area>, Error> {
        if !self.ledger.owner.is_here() {
            return Err(Error::Forked);
        }
        let _blocked = block_all();
        let rounded = length
            .checked_next_multiple_of(PAGE_SIZE)
            .filter(|length| *length > 0 && *length < 1 << 46)
            .ok_or(Error::Length(length))?;
        let cannot_map = || Error::system("map a region");
        let mapping = Reservation::new(rounded, GRANULE).map_err(cannot_map())?;
        let blocks = if self.mode == Mode::Protection {
            Some(Blocks::new(&mapping, self.account.allowed_pages()).map_err(cannot_map())?)
        } else {
            mapping.make_anonymous(0).map_err(cannot_map())?;
            self.uffd()
                .register(mapping.start().as_ptr() as u64, rounded as u64)
                .map_err(|errno| Error::system("register a region")(errno.into()))?;
            None
        };
        let area =
            Area::new(self.clone(), self.ledger.clone(), mapping, blocks).map_err(cannot_map())?;
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

    /// Unmaps an area, which frees its resident pages at once, and leaves its slots to the reclaim
    /// thread.
    pub(super) fn unmap(&self, area: &Arc<Area>) {
        if !self.ledger.owner.is_here() {
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
        // The area is no longer in `areas`: once the lock was free, the listener is done with it.
        drop(lock(&self.listening));
        self.account.release(area.unmap());
        let length = (area.pages * PAGE_SIZE) as u64;
        self.mapped_bytes.fetch_sub(length, Ordering::Relaxed);
        self.unreleased.fetch_add(1, Ordering::Relaxed);
        lock(&self.pending_release).push(area.clone());
        self.reclaim_event.set();
    }

    /// The engine's area that an address belongs to.
    pub(super) fn area_at(&self, address: usize) -> Option<Arc<Area>> {
        let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
        let mut areas = areas.iter();
        areas.find(|area| area.page_at(address).is_some()).cloned()
    }

    pub(super) fn refresh_account(&self) {
        let records = self.ledger.state_bytes();
        let other = self.space.pool_bytes() + self.space.metadata_bytes() + records;
        self.account.refresh(other);
    }

    /// Notes how many pages reclaim moved out, and how many it put back because they do not compress.
    pub(super) fn note_gain(&self, out: usize, refused: usize) {
        if self.compression.note(out, refused) {
            self.relax_limit();
        }
    }

    /// Lets the program exceed the limit for a while: nothing more can be moved out, or nothing is gained
    /// by it.
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
            metadata_bytes: usage.metadata_bytes + self.ledger.state_bytes(),
            mapped_bytes: self.mapped_bytes.load(Ordering::Relaxed),
            pinned_bytes: self.account.pinned_pages() * page,
            stored_pages: usage.stored_pages,
            same_filled_pages: usage.same_filled_pages,
            stored_bytes: usage.stored_bytes,
            over_limit_pages: self.account.excess_pages(),
        }
    }
}

/// Keeps the userfaultfd open until the engine stops, in a descriptor table of its own: programs close
/// descriptors that they do not know (`closefrom`). When the last descriptor is closed, the kernel
/// unregisters the regions, and missing pages read as zeros. With this one, a fault aborts the program
/// instead.
fn keep_descriptor(state: &EngineState) {
    if let Some(uffd) = &state.uffd {
        // If unshare is refused, only programs that close foreign descriptors are affected.
        let _ = thread::keep_only(uffd.as_fd());
    }
    while !state.stopping.load(Ordering::SeqCst) {
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
            std::mem::forget(self.state.clone());
            return;
        }
        self.state.stopping.store(true, Ordering::SeqCst);
        self.state.reclaim_event.set();
        self.state.readahead.event.set();
        if self.listens {
            listener::stop(&self.state);
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
