//! The engine: one account of memory, one swap space, and the threads that work for them.

use super::account::Account;
use super::config::{Config, Mode};
use super::engine_state::EngineState;
use super::error::Error;
use super::event::Event;
use super::ledger::Ledger;
use super::limits::{BATCH, DEFERRED_FREES, LEAST_PAGES, WORKERS};
use super::mover::Mover;
use super::remote_queue::{RemoteFaults, THREADS};
use super::span_queue::Readahead;
use super::stats::{Counters, Stats};
use super::streams::Streams;
use super::victims::new_replacement;
use super::{listener, signals, worker};
use crate::Limit;
use crate::backoff::CompressionPolicy;
use crate::pool_memory::MappedSource;
use memfold_swap::{Algorithm, RemoteUsage, SwapConfig, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::futex;
use memfold_sys::memory::check_page_size;
use memfold_sys::owned_uffd::{self, ExposedUffd, borrow};
use memfold_sys::reserve::Reservation;
use memfold_sys::signal::block_all;
use memfold_sys::thread;
use memfold_sys::uffd::{self};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, RwLock};
use std::thread::JoinHandle;

/// An engine: a limit, and regions under it. All methods may be called from any thread.
pub struct Engine {
    state: Arc<EngineState>,
    threads: Vec<JoinHandle<()>>,
    /// The thread that reads fault messages, if one does.
    listener: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

fn physical_pages() -> usize {
    // SAFETY: takes a number and returns one.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0).max(1 << 16)
}

/// The most pages that the pool may have.
fn most_pages(limit: &Limit) -> usize {
    let limited = limit.total_bytes.map(|bytes| bytes / PAGE_SIZE as u64);
    let limited = limited.map(|pages| usize::try_from(pages).unwrap_or(usize::MAX));
    limited.unwrap_or_else(physical_pages)
}

/// The memory that the host, or the cgroup of this process, allows, in bytes.
///
/// # Errors
/// If `/proc/meminfo` or the cgroup's files cannot be read.
pub fn memory_allowance() -> Result<u64, Error> {
    match memfold_sys::probe::memory_allowance() {
        Ok(allowance) => Ok(allowance.bytes),
        Err(error) => Err(Error::system("find out how much memory the host allows")(
            error,
        )),
    }
}

fn swap_config(config: &Config) -> SwapConfig {
    SwapConfig {
        algorithm: config.algorithm,
        checksum: config.checksum,
        // Address space only: slots for 64 times the memory.
        max_slots: (physical_pages() * 64).next_power_of_two().min(1 << 30),
        shards: memfold_sys::thread::allowed_cpus().len().min(64),
        ..SwapConfig::default()
    }
}

/// The userfaultfd of a mode, and by what its pages are moved. The error is [`Error::ModeUnavailable`] only if the host lacks
/// userfaultfd or forbids it: another mode does not help where descriptors or memory have run out.
fn open(mode: Mode) -> Result<(ExposedUffd, Mover), Error> {
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
    let uffd = ExposedUffd::new(uffd).map_err(Error::system("open a userfaultfd"))?;
    let features = match mode {
        Mode::Thread => uffd::FEATURE_THREAD_ID | uffd::FEATURE_EXACT_ADDRESS,
        _ => uffd::FEATURE_SIGBUS,
    };
    match Mover::introduce(borrow(&uffd), features, mode) {
        Ok(mover) => Ok((uffd, mover)),
        Err(errno) => Err(Error::ModeUnavailable {
            mode,
            why: format!("the kernel lacks features of userfaultfd that Linux 6.8 has ({errno})"),
        }),
    }
}

fn check_limit(limit: Limit) -> Result<(), Error> {
    let least = 2 * LEAST_PAGES * PAGE_SIZE as u64;
    let limits = [limit.total_bytes, limit.resident_bytes];
    match limits.into_iter().flatten().min() {
        Some(bytes) if bytes < least => Err(Error::LimitTooSmall { bytes, least }),
        _ => Ok(()),
    }
}

/// Whether pages may go to a store on other machines.
fn check_remote(mode: Mode, limit: Limit) -> Result<(), Error> {
    let why = match (mode, limit.total_bytes) {
        (Mode::Protection, _) => "it needs userfaultfd (signal or thread mode)",
        (_, None) => "it needs a limit for everything, half of which the pool takes",
        _ => return Ok(()),
    };
    Err(Error::Remote(why.into()))
}

/// The stage, registered where pages are moved there by a userfaultfd.
fn new_stage(uffd: Option<&ExposedUffd>, mover: Option<Mover>) -> Result<Reservation, Error> {
    // One page more, whose fault stops the listener.
    let stage = Reservation::new((WORKERS * BATCH + 1) * PAGE_SIZE, PAGE_SIZE)
        .and_then(|stage| stage.make_anonymous(0).map(|()| stage))
        .map_err(Error::system("reserve the stage"))?;
    if let (Some(uffd), Some(Mover::Userfaultfd)) = (uffd, mover) {
        borrow(uffd)
            .register(stage.start().as_ptr() as u64, stage.length() as u64)
            .map_err(|errno| Error::system("register the stage")(errno.into()))?;
    }
    Ok(stage)
}

impl Engine {
    /// Makes an engine and starts its threads.
    ///
    /// # Errors
    /// If the limit is too small, or the host does not allow what the mode needs.
    pub fn new(config: &Config) -> Result<Engine, Error> {
        check_page_size().map_err(Error::system("page memory out"))?;
        check_limit(config.limit)?;
        let (mode, opened) = choose(config.mode)?;
        let (uffd, mover) = opened.unzip();
        if config.remote.is_some() {
            check_remote(mode, config.limit)?;
        }
        let loads_zstd = config.algorithm == Algorithm::Zstd || config.remote.is_some();
        let blocked = block_all();
        worker::prepare(loads_zstd).map_err(Error::system("allocate buffers"))?;
        drop(blocked);
        let stage = new_stage(uffd.as_ref(), mover)?;
        let configs = swap_config(config).for_pool_of(most_pages(&config.limit));
        let mut space = SwapSpace::new_that_fits(MappedSource::default, configs)
            .map_err(|error| Error::Pool(Box::new(error)))?;
        if let Some(remote) = &config.remote {
            space
                .add_tier(Box::new(remote.tier.clone()))
                .map_err(|error| Error::Pool(Box::new(error)))?;
        }
        let state = Arc::new(EngineState {
            mode,
            ledger: Arc::new(Ledger::new()),
            uffd,
            mover,
            stage,
            space,
            account: Account::new(config.limit),
            compression: CompressionPolicy::new(config.limit),
            areas: RwLock::default(),
            hand: Mutex::default(),
            replacement: Mutex::new(new_replacement()),
            evictions: AtomicU32::new(0),
            pending_release: Mutex::default(),
            listening: Mutex::default(),
            unreleased: AtomicU32::new(0),
            deferred_frees: Mutex::new(Vec::with_capacity(DEFERRED_FREES)),
            reclaim_event: Event::default(),
            readahead: Readahead::new(config.readahead && mode != Mode::Protection),
            streams: Streams::default(),
            remote: config.remote.clone().map(RemoteFaults::new),
            counters: Counters::default(),
            mapped_bytes: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            keeps: Barrier::new(2),
        });
        state.refresh_account();
        state.compression.note_outlet(state.remote.is_some());
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
            listener: None,
        };
        engine.start_threads()?;
        Ok(engine)
    }

    fn start_threads(&mut self) -> Result<(), Error> {
        self.start("memfold-reclaim", EngineState::reclaim_thread)?;
        if self.state.uffd.is_some() {
            self.start("memfold-keeper", keep_descriptor)?;
            self.state.keeps.wait();
        }
        if self.state.mode == Mode::Thread {
            self.start("memfold-fault", listener::run)?;
            self.listener = self.threads.pop();
        }
        if self.state.remote.is_some() {
            for _ in 0..THREADS {
                self.start("memfold-remote", EngineState::remote_thread)?;
            }
            self.start("memfold-send", EngineState::send_thread)?;
        }
        if self.state.readahead.is_enabled() {
            self.start("memfold-readahead", EngineState::readahead_thread)?;
        }
        Ok(())
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

    /// Statistics of the store on other machines, if there is one.
    pub fn remote_usage(&self) -> Option<RemoteUsage> {
        let _blocked = block_all();
        self.state.remote_usage()
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

/// The mode that was requested, or else the best that the host allows, its userfaultfd, and by what pages are moved.
fn choose(mode: Option<Mode>) -> Result<(Mode, Option<(ExposedUffd, Mover)>), Error> {
    let wanted = mode.unwrap_or(Mode::Signal);
    if wanted == Mode::Protection {
        return Ok((Mode::Protection, None));
    }
    match open(wanted) {
        Ok(opened) => Ok((wanted, Some(opened))),
        Err(Error::ModeUnavailable { .. }) if mode.is_none() => Ok((Mode::Protection, None)),
        Err(error) => Err(error),
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
    // The program may close the descriptor from now on.
    state.keeps.wait();
    while !state.stopping.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.is_inherited() {
            // The threads are the parent's, and their locks as the fork found them.
            for thread in self.threads.drain(..).chain(self.listener.take()) {
                std::mem::forget(thread);
            }
            std::mem::forget(self.state.clone());
            return;
        }
        self.state.stopping.store(true, Ordering::SeqCst);
        self.state.reclaim_event.set();
        self.state.readahead.event.set();
        if let Some(remote) = &self.state.remote {
            remote.stop();
        }
        // It waits for good, with the state, where the program has closed the descriptor.
        if let Some(thread) = self.listener.take()
            && self.state.uffd.as_ref().is_some_and(ExposedUffd::is_open)
        {
            listener::stop(&self.state);
            self.threads.push(thread);
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

#[cfg(test)]
impl Engine {
    /// A small one; `None` on a host without userfaultfd.
    pub(super) fn for_tests(mode: Mode, remote: Option<super::Remote>) -> Option<Engine> {
        let engine = Engine::new(&Config {
            limit: crate::Limit {
                total_bytes: Some(24 << 20),
                resident_bytes: None,
            },
            algorithm: memfold_swap::Algorithm::Lz4,
            checksum: true,
            mode: Some(mode),
            readahead: false,
            remote,
        });
        match engine {
            Err(error @ Error::ModeUnavailable { .. }) => {
                memfold_testing::skip(&error.to_string());
                None
            }
            engine => Some(engine.unwrap()),
        }
    }
}
