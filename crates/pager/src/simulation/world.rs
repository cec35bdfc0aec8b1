//! memfold's threads in one execution, and what programs need of them.

use crate::bugs::Bug;
use crate::options::{Floor, Limit};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::pool_memory::MappedSource;
use crate::simulation::history::History;
use crate::simulation::model::helper::Helper;
use crate::simulation::model::memory::Memory;
use crate::simulation::model::{Inspector, Port, Ports, SharedChannel, Userfaultfd};
use crate::simulation::sync::lock_model;
use crate::simulation::time;
use crate::supervised::events::read::{Messages, Reader};
use crate::supervised::fault::handler::{Listener, serve_space};
use crate::supervised::fault::message::Resolution;
use crate::supervised::fault::primitives::wake;
use crate::supervised::fault::service::FaultService;
use crate::supervised::fork::expected_children::{Admission, LOOK};
use crate::supervised::group::{Group, Outlets};
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::reclaim::crew::Crew;
use crate::supervised::reclaim::reclaimer::Reclaimer;
use crate::supervised::registration::register::register;
use crate::supervised::registration::vma_scan::VmaScan;
use crate::supervised::space::fork_state::ForkState;
use crate::supervised::space::gate::Inside;
use crate::supervised::space::{AddressSpace, Arena, Attached};
use crate::sync::lock;
use memfold_swap::{ScanPolicy, Scratch, SwapConfig, SwapSpace};
use memfold_sys::PAGE_SIZE;
use shuttle::thread::{self, JoinHandle, Thread};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The page in which a forked child reads its ID.
pub(crate) const BEACON: VirtualPage = VirtualPage(0x80);
/// The first page of the stage.
const STAGE: VirtualPage = VirtualPage(0x100);
/// The PID of the program that forked from none.
const FIRST_PROCESS: i32 = 1;
/// Longest wait of the governor for a gate, as on a host.
const GOVERNOR_PATIENCE: Duration = Duration::from_millis(5);
/// One seed in `CREW_PERIOD` has a thread that helps the reclaimer.
const CREW_PERIOD: u64 = 4;

/// memfold and its programs in one execution.
pub(crate) struct World {
    group: Arc<Group>,
    reader: Reader,
    stage: u64,
    seed: u64,
    /// The core may meet errors: threads touch each other's pages, programs are killed, requests fail.
    may_err: bool,
    threads: AtomicU32,
    handlers: OnceLock<Vec<Thread>>,
    /// Programs that run.
    alive: AtomicU32,
    /// Channels of helpers: their programs end them.
    channels: Mutex<Vec<(Arc<Memory>, Arc<SharedChannel>)>>,
    /// Threads of helpers and forked children.
    threads_started: Mutex<Vec<JoinHandle<()>>>,
}

impl World {
    /// A world for the programs of a history.
    pub(crate) fn new(history: &History) -> World {
        let config = SwapConfig {
            pool_capacity_pages: 4096,
            max_slots: 1 << 14,
            shards: 1,
            ..SwapConfig::default()
        };
        let swap = SwapSpace::new(MappedSource::default(), config).expect("a swap space");
        let limit = Limit {
            total_bytes: None,
            resident_bytes: Some(history.limit * PAGE_SIZE as u64),
        };
        let group = Arc::new(Group::new(
            (limit, Floor::default()),
            swap,
            Outlets::default(),
        ));
        if history.prepared {
            group.resources.prepare_forks();
        }
        if history.carries {
            group.resources.carry();
        }
        if history.tracked {
            group.resources.track_accesses();
        }
        World {
            reader: Reader::new(group.clone(), Arc::new(Ports)),
            group,
            stage: history.stage,
            seed: history.seed,
            may_err: history.may_err(),
            threads: AtomicU32::new(0),
            handlers: OnceLock::new(),
            alive: AtomicU32::new(0),
            channels: Mutex::default(),
            threads_started: Mutex::default(),
        }
    }

    /// A TID that no other thread has.
    pub(crate) fn next_thread(&self) -> u32 {
        self.threads.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A PID for a forked child.
    pub(crate) fn next_process(&self) -> i32 {
        self.alive.fetch_add(1, Ordering::Relaxed);
        self.next_thread() as i32
    }

    /// [`World::space_of`], once memfold knows it.
    pub(crate) fn await_space(&self, memory: &Arc<Memory>) -> Arc<AddressSpace> {
        loop {
            if let Some(space) = self.space_of(memory) {
                return space;
            }
            time::yield_now();
        }
    }

    /// The address space of a program.
    pub(crate) fn space_of(&self, memory: &Arc<Memory>) -> Option<Arc<AddressSpace>> {
        let spaces = self.group.spaces().into_iter();
        { spaces }.find(|space| Arc::ptr_eq(&space.uffd().0, memory))
    }

    /// Whether a fault waits for room.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.group.deferred.is_empty()
    }

    /// The channel to the helper of a program.
    pub(crate) fn channel_of(&self, memory: &Arc<Memory>) -> Option<Arc<SharedChannel>> {
        let space = self.space_of(memory)?;
        space.attached().is_some().then(|| space.channel.clone())
    }

    /// Starts a program that forked from none.
    pub(crate) fn start(&self, memory: &Arc<Memory>) {
        self.alive.fetch_add(1, Ordering::Relaxed);
        memory.map_own(PageRange::around(BEACON, 1));
        self.introduce(memory);
    }

    /// A program starts its helper that inherits nothing by way of memfold.
    pub(crate) fn introduce(&self, memory: &Arc<Memory>) {
        let (resources, id) = (self.group.resources.clone(), self.group.next_id());
        let port = HelperPort::new(Port::default(), ());
        let space = AddressSpace::new(
            resources,
            id,
            (Userfaultfd(memory.clone()), port),
            ForkState::default(),
        );
        let space = Arc::new(space);
        self.listen(&space);
        self.group.add_space(space.clone());
        self.attach(&space, memory);
        self.prepare(&space);
    }

    /// Whether forks are prepared.
    pub(crate) fn prepares_forks(&self) -> bool {
        self.group.resources.prepares_forks()
    }

    /// Registers the beacon; a program of which that fails would not be admitted.
    fn prepare(&self, space: &AddressSpace) {
        while self.prepares_forks() && space.prepare_forks(BEACON).is_err() && !space.is_gone() {
            time::yield_now();
        }
    }

    /// The child of a prepared fork says hello, and is welcomed. `false` if it is not.
    pub(crate) fn arrive(&self, token: u64, memory: &Arc<Memory>) -> bool {
        let expected = &self.group.expected_children;
        if expected.arrive(token, Userfaultfd(memory.clone())).is_err() {
            return false;
        }
        let arrived = time::Instant::now();
        let space = loop {
            match expected.admission(token, arrived.elapsed()) {
                Admission::NotYet => time::sleep(LOOK),
                Admission::Forked(space) => break space,
                Admission::Never(_) => return false,
            }
        };
        self.attach(&space, memory);
        self.prepare(&space);
        space.identify_child(&self.group, None);
        space.list_adopted()
    }

    /// A forked child starts its helper.
    pub(crate) fn connect(&self, memory: &Arc<Memory>) {
        match self.space_of(memory) {
            Some(space) if space.attached().is_none() => {
                space.identify_child(&self.group, None);
                self.attach(&space, memory);
            }
            Some(_) => {}
            // Its parent had nothing registered.
            None if !memory.state().gone => self.introduce(memory),
            None => {}
        }
    }

    fn attach(&self, space: &Arc<AddressSpace>, memory: &Arc<Memory>) {
        // Beside the stage that its parent had.
        let start = STAGE.plus(u64::from(self.next_thread()) * (self.stage + 2));
        let stage = PageRange {
            start,
            end: start.plus(self.stage),
        };
        let whole = PageRange {
            start,
            end: stage.end.plus(1),
        };
        memory.map_own(whole);
        while space.open_stage(stage).is_err() {
            // Killed meanwhile, or short of memory: then a program is not admitted, but the child of a prepared fork
            // would end, so it is tried again.
            if !self.prepares_forks() || space.is_gone() {
                return;
            }
            time::yield_now();
        }
        // (It fails only if the program is gone.)
        let _ = space.leave_stage(stage);
        let attached = Attached {
            inspector: Arc::new(Inspector(memory.clone())),
            arena: Arena {
                whole,
                stage,
                beacon: BEACON,
            },
            to_follow: OnceLock::new(),
        };
        let number = self.next_thread();
        space.helper.store(number, Ordering::Relaxed);
        assert!(space.attach(attached), "one helper");
        space.life.attach();
        let seed = self.seed ^ u64::from(number);
        let channel = space.channel.clone();
        lock_model(&self.channels).push((memory.clone(), channel.clone()));
        let helper = Helper::new(
            memory.clone(),
            channel,
            number,
            (seed, self.group.resources.carries()),
        );
        self.keep(named("helper", move || helper.run()));
    }

    /// Waits for a thread at the end.
    pub(crate) fn keep(&self, thread: JoinHandle<()>) {
        lock_model(&self.threads_started).push(thread);
    }

    fn listen(&self, space: &AddressSpace) {
        for handler in self.handlers.get().into_iter().flatten() {
            space.uffd().0.state().queues.listen(handler.clone());
        }
    }

    /// As the governor does at each look.
    fn see_to_listeners(&self, space: &AddressSpace) {
        if !space.unlistened.load(Ordering::Relaxed) {
            space.note_listening();
            if !Bug::NotReminded.is_back() {
                space.uffd().0.state().queues.remind();
            }
        } else if space.may_retry_listening() {
            space.unlistened.store(false, Ordering::Relaxed);
            self.listen(space);
        }
    }

    /// All threads of a program end, wherever they are, and its helper.
    pub(crate) fn kill(&self, memory: &Arc<Memory>) {
        memory.let_kill();
        let channel = self.channel_of(memory);
        memory.exit();
        if let Some(channel) = channel {
            channel.close();
        }
    }

    /// A program's last thread exits, its helper with it.
    pub(crate) fn exit(&self, memory: &Arc<Memory>) {
        let channels = std::mem::take(&mut *lock_model(&self.channels));
        let is_its = |(of, _): &(Arc<Memory>, Arc<SharedChannel>)| Arc::ptr_eq(of, memory);
        let (its, others): (Vec<_>, Vec<_>) = channels.into_iter().partition(is_its);
        lock_model(&self.channels).extend(others);
        its.iter().for_each(|(_, channel)| channel.close());
        memory.exit();
        if self.alive.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.group.stopping.store(true, Ordering::Relaxed);
            self.wake_handlers();
        }
    }

    fn wake_handlers(&self) {
        self.handlers
            .get()
            .into_iter()
            .flatten()
            .for_each(Thread::unpark);
    }

    /// The handlers' threads, once.
    pub(crate) fn set_handlers(&self, threads: Vec<Thread>) {
        assert!(self.handlers.set(threads).is_ok(), "set once");
    }

    /// A helper's or a child's thread that is not waited for yet.
    pub(crate) fn started(&self) -> Option<JoinHandle<()>> {
        lock_model(&self.threads_started).pop()
    }

    fn is_stopping(&self) -> bool {
        self.group.stopping.load(Ordering::Relaxed)
    }

    /// A handler thread.
    pub(crate) fn handle(self: &Arc<Self>) {
        let mut service = FaultService::new(self.group.clone()).expect("addresses");
        let mut listener = WorldListener(self.clone());
        while !self.is_stopping() {
            let mut any = false;
            for space in self.group.spaces() {
                let is_told = space.uffd().0.state().queues.take_told();
                if is_told {
                    any = true;
                    serve_space(&space, &mut service, &self.reader, &mut listener);
                }
            }
            if !any {
                thread::park();
            }
        }
    }

    /// The governor's thread.
    pub(crate) fn govern(&self) {
        let group = self.group.clone();
        let mut service = FaultService::with_patience(group, GOVERNOR_PATIENCE).expect("addresses");
        let mut scratch = Scratch::new();
        while !self.is_stopping() {
            service.finish_loads();
            if self.seed.is_multiple_of(4) {
                // Pages that stay out for two ticks move into blocks, as by the background thread.
                let swap = &self.group.resources.swap;
                let policy = ScanPolicy {
                    recompress: Some(1),
                    write_back: None,
                };
                let report = swap.scan(policy, usize::MAX, &mut scratch);
                assert_eq!((report.failed, report.store_error), (0, None));
            }
            for space in self.group.spaces() {
                if space.is_gone() {
                    space.life.die();
                    space.leave();
                    self.group.remove_space(space.id);
                    continue;
                }
                space.note_resident_pages(space.uffd().0.resident_pages());
                space.withhold_moved();
                self.check_withheld(&space);
                space.watch_removals();
                self.see_to_listeners(&space);
                self.register(&space, &mut service);
                space.protect_shared();
            }
            self.group.refresh_limit();
            self.group.resources.wake_reclaimer();
            time::sleep(Duration::from_millis(1));
        }
    }

    /// Where forks are prepared and none is under way, what is out of the first program is withheld, once all events are
    /// applied and what was moved beside a fork is withheld again.
    fn check_withheld(&self, space: &AddressSpace) {
        let memory = &space.uffd().0;
        if !self.prepares_forks() || memory.pid != FIRST_PROCESS {
            return;
        }
        // Nothing becomes managed meanwhile.
        let Some(gate) = space.try_shared() else {
            return;
        };
        let is_under_way = !lock(&space.prepared.moved).ranges().is_empty()
            || !lock(&space.prepared.doubtful).given.ranges().is_empty()
            || lock(&space.changes).order.is_waiting()
            || space.channel.is_withholding();
        if is_under_way || space.channel.is_forking() {
            return;
        }
        let state = memory.state();
        if state.gone || state.queues.changing > 0 {
            return;
        }
        let pages = state.pages.iter();
        let given = pages.filter(|(_, mapped)| !mapped.own && !mapped.withheld);
        let given: Vec<_> = given.map(|(page, _)| *page).collect();
        drop(state);
        for page in given {
            gate.table().visit(PageRange::around(page, 1), |_, entry| {
                let is_out = matches!(entry.load(), PageState::Swapped(..));
                assert!(!is_out, "a page is out that children by a raw clone have");
                true
            });
        }
    }

    fn register(&self, space: &Arc<AddressSpace>, service: &mut FaultService) {
        let Some(attached) = space.attached() else {
            return;
        };
        let Ok(mut scan) = VmaScan::of(space, attached) else {
            return;
        };
        let mut changes = 0;
        if self.prepares_forks() {
            changes = space.prepared.watch();
            // It is tried again at each tick.
            space.withhold_unmanaged(&mut scan.unmanaged);
        }
        if scan.unmanaged.is_empty() {
            return;
        }
        let Ok(mut gate) = space.exclusive_within(GOVERNOR_PATIENCE) else {
            return;
        };
        let messages = self.reader.read_messages(space, &mut gate);
        if self.prepares_forks() {
            space.prepared.retain_withheld(&mut scan.unmanaged, changes);
        }
        register(space, &gate, attached, &scan);
        drop(gate);
        self.serve(space, messages, service);
    }

    fn serve(&self, space: &Arc<AddressSpace>, messages: Messages, service: &mut FaultService) {
        messages
            .children
            .iter()
            .for_each(|child| self.listen(child));
        for (fault, thread) in messages.faults {
            let admission = space.admission_of(thread);
            match service.serve(space, fault, admission) {
                Resolution::Done | Resolution::Queued => {}
                Resolution::Retry | Resolution::GateMissed => wake(space, fault.page, 1),
            }
        }
    }

    /// The reclaimer's thread. What waits for room when it begins to reclaim is served before it sleeps
    /// again.
    pub(crate) fn reclaim(&self) {
        let helpers = usize::from(self.seed % CREW_PERIOD == CREW_PERIOD - 1);
        let (crew, seats) = Crew::of_seats(self.group.clone(), helpers);
        for seat in seats {
            let group = self.group.clone();
            let worker = seat.worker(&group).expect("addresses");
            self.keep(named("crew", move || seat.attend(&group, worker)));
        }
        let mut reclaimer = Reclaimer::new(self.group.clone(), crew).expect("addresses");
        while !self.is_stopping() {
            reclaimer.wait();
            let (_, came) = self.group.deferred.counts();
            reclaimer.reclaim();
            let (served, _) = self.group.deferred.counts();
            assert!(
                served >= came || self.is_stopping(),
                "{} faults wait for room while the reclaimer sleeps",
                came - served
            );
        }
    }

    /// After the end of all threads: nothing is left.
    pub(crate) fn finish(self: Arc<Self>) {
        for space in self.group.spaces() {
            self.group.remove_space(space.id);
        }
        // Faults of programs that have exited since.
        drop(self.group.deferred.take());
        self.group.resources.free_pending();
        let usage = self.group.resources.swap.usage();
        assert_eq!(usage.stored_pages, 0, "pages are left in the swap space");
        let errors = self.group.resources.errors.load(Ordering::Relaxed);
        assert!(errors == 0 || self.may_err, "{errors} errors of memfold");
    }
}

struct WorldListener(Arc<World>);

impl Listener for WorldListener {
    fn listen(&mut self, child: &AddressSpace) {
        self.0.listen(child);
    }

    fn set_aside(&mut self, space: &AddressSpace) {
        // Until the governor listens to it again.
        space.uffd().0.state().queues.forget();
        space.unlistened.store(true, Ordering::Relaxed);
    }

    fn note_fault(&mut self, _: &AddressSpace, _: u32) {}
}

/// Starts a thread with a name.
pub(crate) fn named(name: &str, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn(run).expect("a thread")
}
