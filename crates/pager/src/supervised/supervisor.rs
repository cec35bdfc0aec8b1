//! A supervisor: the threads that keep one group of programs under its limit, and the run's directory.

use crate::options::{Limit, Options};
use crate::pool_memory::MappedSource;
use crate::supervised::fault::listen::Handlers;
use crate::supervised::fault::remote_thread;
use crate::supervised::fork::shared_counter::SharingCount;
use crate::supervised::group::{Group, Outlets};
use crate::supervised::helper::accept::Acceptor;
use crate::supervised::helper::guests::Guests;
use crate::supervised::helper::inject::{Attacher, Library};
use crate::supervised::helper::late::{LateStarts, Switch, WaitingPrograms};
use crate::supervised::helper::patched::Patched;
use crate::supervised::kernel::Ports;
use crate::supervised::latency::LatencyCounts;
use crate::supervised::mappings::MappingUsage;
use crate::supervised::reclaim::crew::Crew;
use crate::supervised::reclaim::reclaimer::Reclaimer;
use crate::supervised::registration::governor::Governor;
use crate::supervised::space::AddressSpace;
use crate::supervised::start_error::StartError;
use crate::supervised::stats::{Now, ProgramUsage, Stats};
use crate::supervised::swap::tiers::{Background, SwapOffError, open_swap_file};
use crate::supervised::util::run_time::RunTime;
use memfold_swap::{SwapConfig, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::hello::{Rendezvous, SOCKET_PATH_MAX, STARTS_AT_ONCE};
use memfold_sys::owned_uffd::kernel_tracks_accesses;
use memfold_sys::privilege;
use memfold_sys::probe::{self, Mover, memory_allowance};
use memfold_sys::process::{own_filters, own_id, own_user, own_user_namespace};
use memfold_sys::socket;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Whether the kernel reports forks to this process.
fn reports_forks() -> bool {
    let _raised = privilege::raised();
    probe::reports_forks()
}

/// Keeps a group of programs under its limit until it is stopped or dropped.
///
/// A program joins the group if it is started with [`Supervisor::preload_path`] first in its
/// `LD_PRELOAD`; so do its children.
pub struct Supervisor {
    group: Arc<Group>,
    directory: PathBuf,
    preload: PathBuf,
    library: Arc<Library>,
    guests: Arc<Guests>,
    waiting: Arc<WaitingPrograms>,
    /// Dropped after `stopping` is set: the hang-up wakes the handlers.
    _stop_handlers: PipeWriter,
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor").finish_non_exhaustive()
    }
}

impl Supervisor {
    /// Sets up the swap space, the run's directory and the threads.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left behind.
    pub fn start(options: Options) -> Result<Supervisor, StartError> {
        let mut swap = new_swap_space(&options)?;
        let file = options.swap_file.as_ref().map(open_swap_file);
        let file = file.transpose()?.map(Arc::new);
        if let Some(file) = &file {
            swap.add_tier(Box::new(file.clone()))?;
        }
        let remote = options.remote.as_ref().map(|remote| remote.tier.clone());
        if let Some(remote) = &options.remote {
            swap.add_tier(Box::new(remote.tier.clone()))?;
            if remote.keep_copies {
                let file = file.clone().ok_or(StartError::NoFileForCopies)?;
                remote.tier.keep_copies_in(file);
                swap.prefer_remote();
            }
        }
        let (stop, stop_handlers) = io::pipe()?;
        let (directory, listeners) = listen_in_directory(&options.runtime_dir, random_name)?;
        // Both take CAP_SYS_PTRACE.
        let reports_forks = reports_forks();
        let carries = probe::mover(options.managed).map_err(StartError::NoMover)? == Mover::Remap;
        let preload = directory.join("libmemfold.so");
        let rendezvous = rendezvous(&directory.join(CONTROL), (reports_forks, carries))?;
        let patched = Patched::new(options.agent_image, &rendezvous).ok_or(StartError::Image)?;
        let place = patched.place;
        let library = Library::new(&preload, patched).ok_or(StartError::Image)?;
        let supervisor = Supervisor {
            group: Arc::new(Group::new(
                (options.limit, options.floor),
                swap,
                Outlets { file, remote },
            )),
            preload,
            directory,
            library: Arc::new(library),
            guests: Arc::default(),
            waiting: Arc::default(),
            _stop_handlers: stop_handlers,
        };
        if options.prepare_forks || !reports_forks {
            supervisor.group.resources.prepare_forks();
        }
        if carries {
            supervisor.group.resources.carry();
        }
        if options.track_accesses {
            supervisor.track_accesses(carries);
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| StartError::Directory { path, source }
        };
        std::fs::write(&supervisor.preload, supervisor.library.file())
            .map_err(failed(&supervisor.preload))?;
        // The library must be readable for programs that changed their UID.
        let readable = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(&supervisor.preload, readable)
            .map_err(failed(&supervisor.preload))?;
        let switch = Switch::new(&supervisor.preload, place);
        let switch = Arc::new(switch.map_err(failed(&supervisor.preload))?);
        supervisor.start_late(switch.clone())?;
        let background = Background::new(supervisor.group.clone(), &options);
        supervisor.start_threads((listeners, switch), background, (stop, options.proactive))?;
        Ok(supervisor)
    }

    fn start_threads(
        &self,
        (listeners, switch): ([OwnedFd; 2], Arc<Switch>),
        mut background: Background,
        (stop, is_proactive): (PipeReader, bool),
    ) -> io::Result<()> {
        let group = &self.group;
        group.refresh_limit();
        let ports = Arc::new(Ports::default());
        let handlers = Arc::new(Handlers::new(group.clone(), ports.clone(), stop)?);
        handlers.start()?;
        remote_thread::start(group)?;
        let mut acceptor = Acceptor::new(
            group.clone(),
            handlers.clone(),
            ports,
            listeners,
            (self.guests.clone(), switch),
        )?;
        let mut governor = Governor::new(group.clone(), handlers, is_proactive)?;
        let mut reclaimer = Reclaimer::new(group.clone(), Crew::of_cpus(group.clone()))?;
        let mut sharing = SharingCount::new(group.clone());
        let spawn = |name: &str| std::thread::Builder::new().name(name.to_owned());
        spawn("acceptor").spawn(move || acceptor.run())?;
        spawn("governor").spawn(move || governor.run())?;
        spawn("reclaim").spawn(move || reclaimer.run())?;
        spawn("sharing").spawn(move || sharing.run())?;
        spawn("background").spawn(move || background.run())?;
        Ok(())
    }

    /// Turns access tracking on, if the kernel has it.
    fn track_accesses(&self, carries: bool) {
        let why_not = if carries {
            "pages are taken away by mremap here (see memfold doctor)"
        } else if kernel_tracks_accesses() {
            self.group.resources.track_accesses();
            return;
        } else {
            "this kernel does not tell which pages are accessed (Linux 7.3 does)"
        };
        log::warn!("--track-accesses has no effect: {why_not}");
    }

    /// Starts the thread that starts the helpers of programs that began without one.
    fn start_late(&self, switch: Arc<Switch>) -> io::Result<()> {
        let (group, waiting) = (self.group.clone(), self.waiting.clone());
        let mut late = LateStarts::new(group, self.attacher(), switch, waiting);
        let thread = std::thread::Builder::new().name("late".to_owned());
        thread.spawn(move || late.run()).map(|_| ())
    }

    /// Path of the library to put first in a program's `LD_PRELOAD`.
    pub fn preload_path(&self) -> &Path {
        &self.preload
    }

    /// The run's private directory, removed when the supervisor stops.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// For bringing programs under the limit that the loader brought no library into.
    pub fn attacher(&self) -> Attacher {
        Attacher::new(
            self.library.clone(),
            self.guests.clone(),
            self.group.clone(),
        )
    }

    /// Statistics so far. Cheap; callable from any thread.
    pub fn stats(&self) -> Stats {
        self.group.stats()
    }

    /// Current usage of each program. Cheap; callable from any thread.
    pub fn programs(&self) -> Vec<ProgramUsage> {
        self.group.programs()
    }

    /// The limit under which programs that took so much CPU time so far would have waited for memfold for
    /// at most [`COMFORTABLE_SHARE`](crate::COMFORTABLE_SHARE) of their time; `None` if they did under the
    /// limit in force.
    pub fn comfortable_limit(&self, cpu: Duration) -> Option<u64> {
        self.group.comfortable_limit(cpu)
    }

    /// The least limit on all memory that would be held, with what [`Options::floor`] keeps resident; `None` where the
    /// one in force is as large, is on resident memory alone, or where there is a swap file or a store. An estimate from
    /// what was stored until now.
    pub fn held_limit(&self) -> Option<u64> {
        self.group.held_limit()
    }

    /// A handle for long-running commands from other threads.
    pub fn control(&self) -> Control {
        Control(self.group.clone())
    }

    /// PID of the guardian process, if one was needed: a child of this process that exits right after
    /// it.
    pub fn guardian_process(&self) -> Option<i32> {
        self.group.resources.guardian.process()
    }

    /// PIDs of the programs that are managed now, as far as they are known.
    pub fn managed_processes(&self) -> Vec<i32> {
        let spaces = self.group.spaces();
        spaces
            .iter()
            .filter_map(|space| Some(space.inspector()?.pid()))
            .collect()
    }

    /// Whether pages of programs are taken away by `mremap`, as `UFFDIO_MOVE` does not work here or has bugs.
    pub fn carries(&self) -> bool {
        self.group.resources.carries()
    }

    /// PIDs of the processes that have no helper as yet, as they are small: programs that may have one later, and others.
    pub fn waiting_processes(&self) -> Vec<i32> {
        self.waiting.pids()
    }

    /// Whether descriptors were missing for a program within this time: one that has not connected since may
    /// have been sent away for it.
    pub fn was_short_of_descriptors(&self, within: Duration) -> bool {
        self.group.resources.was_short(within)
    }

    /// Stops and returns the final statistics. Kills programs that are still managed, because part of
    /// their memory is in the pool.
    pub fn stop(self) -> Stats {
        self.stats()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.group.stopping.store(true, Ordering::Relaxed);
        // A program that is traced would end with this process, and one that is let go would hang.
        let _tracing = loop {
            while self.guests.is_detaching() {
                std::thread::sleep(Duration::from_millis(1));
            }
            // A detachment traces, too, so this must not be held while one goes on.
            let tracing = self.guests.trace();
            if !self.guests.is_detaching() {
                break tracing;
            }
        };
        if let Some(remote) = &self.group.remote {
            remote.faults.stop();
        }
        for space in self.group.spaces() {
            if let Some(attached) = space.attached().filter(|_| !space.is_detached()) {
                // Fails only if the process is gone.
                let _ = attached.inspector.kill(9);
            }
        }
        // Unmanaged processes keep the path in their environment; only this user can reuse it (see
        // `Options::runtime_dir`).
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What a command did to the memory in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// In use before.
    pub before: Now,
    /// In use afterwards.
    pub after: Now,
    /// Bytes that were paged out meanwhile, some of which may be back.
    pub paged_out: u64,
}

/// Commands to a supervisor from another thread.
#[derive(Clone)]
pub struct Control(Arc<Group>);

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

impl Control {
    /// Moves all pages from the swap file, and from the store on other machines, to the pool while the
    /// programs run, and stops using them. Returns the number of pages. May take long; can be called again.
    ///
    /// # Errors
    /// If there is neither, or the pages do not fit under the limit, or cannot be read. What is not empty
    /// then stays in use.
    pub fn swap_off(&self) -> Result<u64, SwapOffError> {
        self.0.swap_off()
    }

    /// All statistics now.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// What each program uses now.
    pub fn programs(&self) -> Vec<ProgramUsage> {
        self.0.programs()
    }

    /// The mappings of the program with this PID that may be paged out, those with the most pages first.
    ///
    /// # Errors
    /// If there is no such program under the limit, or it is ending, or changes its mappings all the time.
    pub fn mappings(&self, pid: i32) -> io::Result<Vec<MappingUsage>> {
        let mut spaces = self.0.spaces();
        // A program that executed another one has left, and its successor has the same PID.
        spaces.retain(|space| !space.has_left());
        let is_it = |space: &Arc<AddressSpace>| {
            space
                .inspector()
                .is_some_and(|inspector| inspector.pid() == pid)
        };
        let space = spaces.into_iter().find(is_it);
        space.ok_or(io::ErrorKind::NotFound)?.mapping_usage()
    }

    /// How long the faults took that were served so far.
    pub fn latency(&self) -> LatencyCounts {
        self.0.resources.latency.counts()
    }

    /// The limit in force.
    pub fn limit(&self) -> Limit {
        self.0.limit()
    }

    /// Resident bytes of all programs now.
    pub fn resident_bytes(&self) -> u64 {
        self.0.resources.resident_bytes()
    }

    /// Changes the limit while the programs run, and waits until they are below it, or until no more
    /// memory can be paged out for now.
    pub fn set_limit(&self, limit: Limit) -> Change {
        let before = self.0.stats();
        self.0.set_limit(limit);
        self.wait_until_none_remains(&before, |stats| {
            let now = &stats.now;
            let total = now.resident_bytes + now.pool_bytes + now.metadata_bytes;
            let above =
                |size: u64, limit: Option<u64>| size.saturating_sub(limit.unwrap_or(u64::MAX));
            above(total, limit.total_bytes).max(above(now.resident_bytes, limit.resident_bytes))
        })
    }

    /// Pages out so many bytes of resident memory, or as much as is resident, whatever the limit is. Programs
    /// do not wait for that, and may bring back what they need. May take long; several at a time reclaim down to the
    /// lowest target, and what is paged out counts for each.
    pub fn reclaim(&self, bytes: Option<u64>) -> Change {
        let before = self.0.stats();
        let resident = before.now.resident_bytes;
        let asked = bytes.unwrap_or(resident).min(resident);
        let target = resident - asked;
        let _request = self.0.resources.request_reclaim(target);
        self.wait_until_none_remains(&before, |stats| {
            let above = stats.now.resident_bytes.saturating_sub(target);
            above.min(asked.saturating_sub(paged_out(&before, stats)))
        })
    }

    /// Waits until nothing remains to be done, or for as long as less and less does.
    fn wait_until_none_remains(&self, before: &Stats, remaining: impl Fn(&Stats) -> u64) -> Change {
        const STEP: Duration = Duration::from_millis(10);
        const NO_PROGRESS: Duration = Duration::from_secs(1);
        let mut least = u64::MAX;
        // In which the programs were not stopped, nor the machine.
        let mut since_progress = RunTime::begin();
        loop {
            let stats = self.0.stats();
            let remains = remaining(&stats);
            if remains < least {
                least = remains;
                since_progress = RunTime::begin();
            }
            let is_over = self.0.stopping.load(Ordering::Relaxed);
            if remains == 0 || is_over || since_progress.so_far() >= NO_PROGRESS {
                return Change {
                    before: before.now,
                    after: stats.now,
                    paged_out: paged_out(before, &stats),
                };
            }
            std::thread::sleep(STEP);
        }
    }
}

/// Bytes that were paged out between two looks.
fn paged_out(before: &Stats, after: &Stats) -> u64 {
    let pages = after
        .totals
        .pages_out
        .saturating_sub(before.totals.pages_out);
    pages * PAGE_SIZE as u64
}

/// Reserves what a pool of all of the host's memory may need, or less, down to what the limit needs, where address
/// space is limited (`ulimit -v`, `vm.overcommit_memory=2`).
fn new_swap_space(options: &Options) -> Result<SwapSpace<MappedSource>, StartError> {
    let needed = needed_pages(options);
    let plentiful = SwapConfig {
        algorithm: options.algorithm,
        checksum: options.checksum,
        // The limit may be raised.
        pool_capacity_pages: SwapConfig::capacity_for(needed.max(allowed_pages())),
        ..SwapConfig::default()
    };
    let configs = std::iter::once(plentiful.clone()).chain(plentiful.for_pool_of(needed));
    SwapSpace::new_that_fits(MappedSource::default, configs).map_err(|error| {
        if error.is_for_want_of_addresses() {
            StartError::AddressSpace((needed.next_power_of_two() * PAGE_SIZE) >> 20)
        } else {
            error.into()
        }
    })
}

/// The most pages that the pool must hold: pages beyond the limit stay in the programs.
fn needed_pages(options: &Options) -> usize {
    let in_pages = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_SIZE;
    options
        .limit
        .total_bytes
        .map_or_else(allowed_pages, in_pages)
}

/// Pages of the memory that the host, or the cgroup of this process, allows.
fn allowed_pages() -> usize {
    let bytes = memory_allowance().map_or(1 << 30, |allowance| allowance.bytes);
    usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_SIZE
}

/// File name of the socket in a run's directory to which helpers connect.
pub const CONTROL: &str = "control";
/// Number of random names to try. More resists a user who occupies names for longer.
const TRIES: usize = 16;

/// Creates the run's directory, and listens on the control socket in it and on its abstract name.
///
/// Any user can bind an abstract name, so an occupied one is retried with another random name, like an
/// occupied directory.
fn listen_in_directory(
    parent: &Path,
    mut name: impl FnMut() -> io::Result<String>,
) -> Result<(PathBuf, [OwnedFd; 2]), StartError> {
    let mut tries = 0..TRIES;
    loop {
        let directory = parent.join(name()?);
        let control = directory.join(CONTROL);
        let listening = make_directory(&directory).and_then(|()| {
            let failed = |source| (control.clone(), source);
            let by_path = socket::listen(&control).map_err(failed)?;
            Ok([by_path, socket::listen_abstract(&control).map_err(failed)?])
        });
        let (path, source) = match listening {
            Ok(listeners) => return Ok((directory, listeners)),
            Err(failed) => failed,
        };
        let is_taken = matches!(
            source.kind(),
            io::ErrorKind::AlreadyExists | io::ErrorKind::AddrInUse
        );
        if source.kind() != io::ErrorKind::AlreadyExists {
            // This run created the directory.
            let _ = std::fs::remove_dir_all(&directory);
        }
        if !is_taken || tries.next().is_none() {
            return Err(StartError::Directory { path, source });
        }
    }
}

fn make_directory(directory: &Path) -> Result<(), (PathBuf, io::Error)> {
    let failed = |source| (directory.to_owned(), source);
    // Programs that drop privileges must still be able to open the library.
    let mode = 0o711;
    std::fs::DirBuilder::new()
        .mode(mode)
        .create(directory)
        .map_err(failed)?;
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode)).map_err(failed)
}

fn random_name() -> io::Result<String> {
    let mut bytes = [0; 6];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What the library must know of this process, which listens on `control`.
fn rendezvous(
    control: &Path,
    (inspects_others, carries): (bool, bool),
) -> Result<Rendezvous, StartError> {
    let path = control.as_os_str().as_bytes();
    let mut socket_path = [0; SOCKET_PATH_MAX];
    if path.len() >= SOCKET_PATH_MAX {
        return Err(StartError::PathTooLong(control.to_owned()));
    }
    socket_path[..path.len()].copy_from_slice(path);
    Ok(Rendezvous {
        socket_path,
        filters: own_filters(),
        user: own_user(),
        pid: own_id(),
        user_namespace: own_user_namespace()?,
        inspects_others: u32::from(inspects_others),
        carries: u32::from(carries),
        starts_late: STARTS_AT_ONCE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupied_names_are_skipped() {
        let parent = std::env::temp_dir().join(format!("names-of-{}", std::process::id()));
        std::fs::create_dir_all(parent.join("folder")).unwrap();
        let _other = socket::listen_abstract(&parent.join("socket").join(CONTROL)).unwrap();
        let mut names = ["folder", "socket", "free"].into_iter().map(str::to_owned);
        let (directory, listeners) =
            listen_in_directory(&parent, || Ok(names.next().unwrap())).unwrap();
        assert_eq!(directory, parent.join("free"));
        assert!(parent.join("folder").exists() && !parent.join("socket").exists());
        drop(listeners);
        let all_taken = listen_in_directory(&parent, || Ok("folder".to_owned()));
        assert!(matches!(all_taken, Err(StartError::Directory { .. })));
        std::fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_path_that_is_too_long_is_refused() {
        let ours = rendezvous(Path::new("/run/x"), (true, true)).unwrap();
        assert_eq!(&ours.socket_path[..7], b"/run/x\0");
        assert_eq!(ours.user_namespace, own_user_namespace().unwrap());
        let long = PathBuf::from("/".repeat(200));
        assert!(matches!(
            rendezvous(&long, (true, true)),
            Err(StartError::PathTooLong(_))
        ));
    }
}
