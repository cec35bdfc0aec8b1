//! The fault handlers: one thread per CPU, each listening to the address spaces whose threads fault on
//! its CPU.
//!
//! Waking a thread on another CPU costs an IPI and possibly an idle exit, more than the rest of a
//! fault. So an address space is registered only with the handlers of the CPUs that its faults come
//! from. A handler samples the CPU of the faulting thread: often at first and after a sample from
//! another CPU, rarely while samples agree.

use crate::page::{PageRange, VirtualPage};
use crate::supervised::events::reorder::Change;
use crate::supervised::fault::message::{Fault, Served};
use crate::supervised::fault::primitives::wake;
use crate::supervised::fault::server::Server;
use crate::supervised::fork::apply::ConcurrentChanges;
use crate::supervised::fork::stash::Stash;
use crate::supervised::group::Group;
use crate::supervised::helper::sentinel::Sentinel;
use crate::supervised::space::gate::Exclusive;
use crate::supervised::space::{AddressSpace, Changes};
use crate::supervised::util::fd_pressure::{self, patiently};
use crate::supervised::util::run_time::RunTime;
use crate::sync::lock;
use memfold_sys::epoll::Epoll;
use memfold_sys::thread;
use memfold_sys::uffd::{self, Message};
use std::cell::LazyCell;
use std::io::{self, PipeReader};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Smallest and largest distance between two samples, in faults. Larger saves reads of `/proc` and
/// follows a migrated thread later.
const SAMPLE_NEAREST: u32 = 2;
const SAMPLE_FARTHEST: u32 = 512;
/// Consecutive samples from other CPUs after which a handler stops listening. More tolerates migrations
/// and wakes more handlers per fault.
const MISSES_TO_LEAVE: u32 = 4;
/// The epoll token of the stop pipe, which is no address space's ID.
const STOP: u64 = u64::MAX;
/// Longest wait for mapping changes to pause, after which events are applied in an order that may be
/// wrong. Longer blocks the faults of a program that never pauses; the kernel refuses its page changes
/// meanwhile anyway.
const QUIET_PATIENCE: Duration = Duration::from_secs(10);
/// First and longest sleep between two reads while mappings change. Each sleep is twice the previous
/// one, so that the changing thread can run on this CPU.
const QUIET_NAP: Duration = Duration::from_micros(5);
const QUIET_NAP_LONGEST: Duration = Duration::from_micros(160);
/// Longest wait for a gate. It is far above the time that a running helper is inside; longer delays the
/// other programs on this CPU when a helper was stopped inside.
const GATE_PATIENCE: Duration = Duration::from_millis(10);

/// The handlers of a group. Shared by the handler threads, the attendant and the governor; it has no
/// mutable state.
pub struct Handlers {
    group: Arc<Group>,
    cpus: Vec<usize>,
    epolls: Vec<Epoll>,
    sentinel: Arc<Sentinel>,
    /// Hangs up when the group stops, which wakes the handlers.
    _stop: PipeReader,
}

/// Faults and forked children of one read of messages, to be served outside the gate.
#[derive(Default)]
pub struct Messages {
    /// Faults, each with the TID of its thread in the program's PID namespace.
    pub faults: Vec<(Fault, u32)>,
    /// Children whose fork was applied.
    pub children: Vec<Arc<AddressSpace>>,
    /// Contents of the stage before a fork event was read.
    stash: Option<Stash>,
}

impl Handlers {
    /// The group's handlers. To stop them, set `stopping` of the group and drop the other end of
    /// `stop`.
    pub fn new(
        group: Arc<Group>,
        sentinel: Arc<Sentinel>,
        stop: PipeReader,
    ) -> io::Result<Handlers> {
        let cpus = thread::allowed_cpus();
        let epolls: Vec<Epoll> = cpus
            .iter()
            .map(|_| Epoll::new())
            .collect::<io::Result<_>>()?;
        for epoll in &epolls {
            epoll.add(stop.as_fd(), STOP)?;
        }
        Ok(Handlers {
            group,
            cpus,
            epolls,
            sentinel,
            _stop: stop,
        })
    }

    /// Starts the threads.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        for number in 0..self.cpus.len() {
            let handlers = self.clone();
            std::thread::Builder::new()
                .name(format!("fault-{}", self.cpus[number]))
                .spawn(move || handlers.run(number))?;
        }
        Ok(())
    }

    /// Listens to an address space, first on the CPU on which its main thread ran last. A failure is logged once; the
    /// governor retries if the address space belongs to the group.
    pub fn listen(&self, space: &AddressSpace) -> io::Result<()> {
        let cpu = space
            .attached()
            .and_then(|attached| attached.inspector.last_cpu(attached.inspector.pid() as u32));
        let number = cpu.and_then(|cpu| self.number_of(cpu)).unwrap_or(0);
        let mut armed = lock(&space.listeners);
        if armed.listening.is_empty() {
            let descriptor = space.uffd_descriptor().as_fd();
            if let Err(error) = self.epolls[number].add_arrivals(descriptor, space.id) {
                space.unlistened.store(true, Ordering::Relaxed);
                if !space.warned_unlistened.swap(true, Ordering::Relaxed) {
                    log::warn!("a program's faults cannot be listened to yet, it waits: {error}");
                }
                return Err(error);
            }
            armed.listening.push((number, 0));
        }
        Ok(())
    }

    /// Re-arms the edge-triggered epoll, so that unread messages are reported again. A fork event that
    /// cannot be read (EMFILE) stays unread, and the kernel does not report when a read of several
    /// messages stopped there.
    pub fn remind(&self, space: &AddressSpace) {
        for (number, _) in &lock(&space.listeners).listening {
            // Fails only if the address space is gone.
            let _ = self.epolls[*number].remind(space.uffd_descriptor().as_fd(), space.id);
        }
    }

    /// Stops listening to a program whose helper was stopped inside the gate, until the governor's next
    /// [`Handlers::listen`], so that the other programs on this CPU do not wait for it.
    fn set_aside(&self, space: &AddressSpace) {
        self.forget(space);
        space.unlistened.store(true, Ordering::Relaxed);
    }

    /// Stops listening.
    pub fn forget(&self, space: &AddressSpace) {
        for (number, _) in lock(&space.listeners).listening.drain(..) {
            // Fails only if it is not registered.
            let _ = self.epolls[number].remove(space.uffd_descriptor().as_fd());
        }
    }

    fn number_of(&self, cpu: usize) -> Option<usize> {
        self.cpus.iter().position(|candidate| *candidate == cpu)
    }

    fn run(&self, number: usize) {
        // Failure costs latency only.
        let _ = thread::pin_to(self.cpus[number]);
        thread::set_nice(-10);
        thread::set_timer_slack(1000);
        let mut server = Server::new(self.group.clone());
        let mut ready = Vec::new();
        while !self.group.stopping.load(Ordering::Relaxed) {
            if self.epolls[number].wait(&mut ready, None).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            for token in &ready {
                if let Some(space) = self.group.space(*token) {
                    self.serve_space(number, &space, &mut server);
                }
            }
        }
    }

    /// Reads messages and serves faults until no fault needs another try.
    fn serve_space(&self, number: usize, space: &Arc<AddressSpace>, server: &mut Server) {
        let mut retries: Vec<(Fault, u32)> = Vec::new();
        let mut rounds = 0;
        loop {
            let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
                if !space.is_dead() {
                    if space.take_over_gate() {
                        continue;
                    }
                    self.set_aside(space);
                }
                for (fault, _) in retries {
                    wake(space, fault.page, 1);
                }
                return;
            };
            let messages = self.read_messages(space, &mut gate);
            drop(gate);
            for child in &messages.children {
                let _ = self.listen(child);
            }
            if messages.faults.is_empty() && retries.is_empty() {
                return;
            }
            let again = std::mem::take(&mut retries);
            let news = messages.faults.len();
            let faults = messages.faults.into_iter().chain(again);
            for (index, (fault, thread)) in faults.enumerate() {
                let began = Instant::now();
                if !space.identify_child(&self.group, Some(thread))
                    && !space.is_id_request(fault.page)
                {
                    // The child is lost and could not be killed: its fault stays unserved, except on
                    // the beacon.
                    continue;
                }
                let admission = space.admission_of(thread);
                if server.serve(space, fault, admission) == Served::Retry {
                    retries.push((fault, thread));
                } else {
                    let elapsed = began.elapsed().as_nanos() as u64;
                    self.group.resources.latency.record(elapsed);
                    if !fault.protected {
                        space
                            .sampling
                            .counted_faults
                            .fetch_add(1, Ordering::Relaxed);
                    }
                }
                if index < news {
                    self.sample(number, space, thread);
                }
            }
            rounds += 1;
            if retries.is_empty() {
                // Epoll reports messages that came meanwhile.
                return;
            }
            if rounds > 1000 {
                for (fault, _) in retries.drain(..) {
                    wake(space, fault.page, 1);
                }
            } else if rounds > 10 {
                std::thread::yield_now();
            }
        }
    }

    /// Reads messages and applies their events. The caller serves the faults after leaving the gate.
    pub fn read_messages(&self, space: &Arc<AddressSpace>, gate: &mut Exclusive<'_>) -> Messages {
        let mut messages = Messages::default();
        let mut changes = lock(&space.changes);
        let Some(quiet) = collect(space, gate, &mut messages, &mut changes) else {
            return messages;
        };
        space.begin_events(gate);
        let (mut beside, mut emptied) = (ConcurrentChanges::default(), Vec::new());
        if changes.order.has_fork() {
            space.store_staged(gate, messages.stash.take());
        }
        loop {
            let change = changes.order.next(&lock(&space.managed), quiet);
            if let Some(change) = change {
                beside.note(space, gate, change, changes.order.has_fork());
            }
            match change {
                None => break,
                Some(Change::Unmap(range)) => {
                    space.apply_unmap(gate, range);
                    emptied.push(range);
                }
                Some(Change::Remove(range)) => space.apply_remove(gate, range),
                Some(Change::Remap { from, to, stays }) => {
                    // Unless quiet, the echo may be yet to come.
                    space.apply_remap(gate, from, to, stays && quiet);
                    emptied.push(from);
                }
                Some(Change::Fork(number)) => {
                    if let Some((uffd, _under_way)) = changes.forks.remove(&number) {
                        let child = self.fork(space, gate, uffd, &mut beside);
                        messages.children.extend(child);
                    }
                }
            }
        }
        beside.finish(space);
        let table = gate.table_mut();
        emptied.into_iter().for_each(|range| table.prune(range));
        messages
    }

    fn fork(
        &self,
        space: &Arc<AddressSpace>,
        gate: &Exclusive<'_>,
        uffd: OwnedFd,
        beside: &mut ConcurrentChanges,
    ) -> Option<Arc<AddressSpace>> {
        match patiently(|| self.sentinel.new_port()) {
            Ok(port) => Some(space.apply_fork(&self.group, gate, (uffd, port), beside)),
            Err(error) => {
                log::warn!(
                    "a forked child hangs at its next fault: no channel could be created ({error}); raise `ulimit -n` and \
                     kill the child"
                );
                // Closing the userfaultfd would let the child read zeros; kept open, it makes its faults wait.
                if let Err(error) = self.group.resources.guardian.hold_for_good(uffd) {
                    log::error!(
                        "cannot keep a forked child from reading zeros after memfold ends ({error}); kill the \
                         child first"
                    );
                }
                None
            }
        }
    }

    /// Samples the CPU of a faulting thread, and updates which handlers listen.
    fn sample(&self, number: usize, space: &AddressSpace, thread: u32) {
        let mut armed = lock(&space.listeners);
        if armed.until_sample > 0 {
            armed.until_sample -= 1;
            return;
        }
        let Some(attached) = space.attached() else {
            return;
        };
        let Some(cpu) = attached.inspector.last_cpu(thread) else {
            return;
        };
        let Some(home) = self.number_of(cpu) else {
            return;
        };
        let descriptor = space.uffd_descriptor().as_fd();
        let as_expected = home == number;
        armed.distance = if as_expected {
            (armed.distance * 2).clamp(SAMPLE_NEAREST, SAMPLE_FARTHEST)
        } else {
            SAMPLE_NEAREST
        };
        armed.until_sample = armed.distance;
        if !armed
            .listening
            .iter()
            .any(|(listener, _)| *listener == home)
            && self.epolls[home].add_arrivals(descriptor, space.id).is_ok()
        {
            armed.listening.push((home, 0));
        }
        for (listener, misses) in &mut armed.listening {
            *misses = if *listener == home { 0 } else { *misses + 1 };
        }
        // Misses are consecutive, so the handler of the last hit never leaves.
        let somebody_hits = armed.listening.iter().any(|(_, misses)| *misses == 0);
        if armed.listening.len() > 1 && somebody_hits {
            armed.listening.retain(|(listener, misses)| {
                let stays = *misses < MISSES_TO_LEAVE;
                if !stays {
                    // Fails only if it is not registered.
                    let _ = self.epolls[*listener].remove(descriptor);
                }
                stays
            });
        }
    }
}

/// Reads messages until there are none and, if mappings changed, until no change is in progress. `None`
/// if there is nothing to apply; otherwise whether it is quiet, that is, the events of all completed
/// changes were read.
fn collect(
    space: &AddressSpace,
    gate: &Exclusive<'_>,
    messages: &mut Messages,
    changes: &mut Changes,
) -> Option<bool> {
    let waited = LazyCell::new(RunTime::begin);
    // Events of an earlier read may still be pending.
    let (mut needs_order, mut any) = (changes.order.is_waiting(), false);
    let mut nap = QUIET_NAP;
    loop {
        let mut buffer = [Message::default(); 8];
        if messages.stash.is_none() && space.channel.is_forking() && space.is_changing() {
            // Once the event is read, the parent runs and may be gone at any moment.
            messages.stash = Some(space.stash(gate));
        }
        let read = match space.uffd().read_now(&mut buffer) {
            Ok(read) => read,
            Err(_) if space.is_gone() => {
                space.life.detach();
                return any.then_some(false);
            }
            Err(errno) => {
                // For example EMFILE for a child's userfaultfd. The event stays unread, events that
                // were read stay pending, and the kernel refuses page changes until both are handled.
                if !std::mem::replace(&mut changes.unreadable, true) {
                    log::warn!("a program's events cannot be read ({errno}); it waits");
                }
                std::thread::sleep(fd_pressure::PAUSE);
                return None;
            }
        };
        changes.unreadable = false;
        for message in &buffer[..read] {
            let Some(change) = change_of(message, space, changes) else {
                messages
                    .faults
                    .push((Fault::of_message(message, space), message.fault_thread()));
                continue;
            };
            any = true;
            needs_order |= change.needs_order();
            changes.order.push(change);
        }
        let is_all = read < buffer.len();
        if is_all && !needs_order {
            return any.then_some(true);
        }
        if is_all && !space.is_changing() {
            return Some(true);
        }
        if waited.so_far() > QUIET_PATIENCE {
            log::warn!(
                "a program has changed its mappings for {} s without a pause; \
                 their order is a guess from now on",
                QUIET_PATIENCE.as_secs()
            );
            return Some(false);
        }
        if !is_all {
            continue;
        }
        // The thread whose event was read must run to complete its change, possibly on this CPU.
        std::thread::sleep(nap);
        nap = (2 * nap).min(QUIET_NAP_LONGEST);
    }
}

/// The change that an event reports; `None` for a fault.
fn change_of(message: &Message, space: &AddressSpace, changes: &mut Changes) -> Option<Change> {
    let range = || {
        let (start, end) = message.range();
        PageRange::of_addresses(start, end)
    };
    match message.event {
        uffd::EVENT_UNMAP => Some(Change::Unmap(range())),
        uffd::EVENT_REMOVE => Some(Change::Remove(range())),
        uffd::EVENT_REMAP => {
            let (from, to, length) = message.remap();
            let from = PageRange::of_addresses(from, from + length);
            Some(Change::Remap {
                from,
                to: VirtualPage::containing(to),
                stays: true,
            })
        }
        uffd::EVENT_FORK => {
            let number = changes.next_fork;
            changes.next_fork += 1;
            let under_way = space.resources.shared.begin_fork();
            let uffd = message.take_fork_descriptor();
            changes.forks.insert(number, (uffd, under_way));
            Some(Change::Fork(number))
        }
        _ => None,
    }
}
