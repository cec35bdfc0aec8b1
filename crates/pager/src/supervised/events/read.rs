//! Reading the messages of a userfaultfd, and applying the events among them.
//!
//! The gate is held exclusively throughout: see `events/apply.rs`.

use crate::bugs::Bug;
use crate::supervised::events::reorder::Change;
use crate::supervised::fault::message::Fault;
use crate::supervised::fork::apply::ConcurrentChanges;
use crate::supervised::fork::unapplied::UnappliedFork;
use crate::supervised::group::Group;
use crate::supervised::kernel::{MESSAGES, Memory, Message, Ports, Userfaultfd};
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::space::gate::Exclusive;
use crate::supervised::space::{AddressSpace, Changes};
use crate::supervised::util::fd_pressure::{self, patiently};
use crate::supervised::util::run_time::RunTime;
use crate::sync::lock;
use std::cell::LazyCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for mapping changes to pause, after which events are applied in an order that may be
/// wrong. Longer blocks the faults of a program that never pauses; the kernel refuses its page changes
/// meanwhile anyway.
const QUIET_PATIENCE: Duration = Duration::from_secs(10);
/// First and longest sleep between two looks at whether mappings still change. Each sleep is twice the
/// previous one, so that the changing thread can run on this CPU. A program that changes mappings all the
/// time pauses for moments only, and not before its events are read: so several looks follow each read.
/// More of them wait longer for a program that does not pause, and leave its next event unread for longer.
const QUIET_NAP: Duration = Duration::from_micros(5);
const QUIET_NAP_LONGEST: Duration = Duration::from_micros(80);

/// Faults and forked children of one read of messages, to be served outside the gate.
#[derive(Default)]
pub(crate) struct Messages {
    /// Faults, each with the TID of its thread in the program's PID namespace.
    pub faults: Vec<(Fault, u32)>,
    /// Children whose fork was applied.
    pub children: Vec<Arc<AddressSpace>>,
}

impl Messages {
    /// Adds those of a later read.
    pub(crate) fn append(&mut self, later: Messages) {
        self.faults.extend(later.faults);
        self.children.extend(later.children);
    }
}

/// Reads the messages of a group's programs. Any thread uses it; it has no mutable state.
pub(crate) struct Reader {
    group: Arc<Group>,
    ports: Arc<Ports>,
}

impl Reader {
    /// A reader for the programs of a group. Channels of forked children are made by `ports`.
    pub(crate) fn new(group: Arc<Group>, ports: Arc<Ports>) -> Reader {
        Reader { group, ports }
    }

    /// The group.
    pub(crate) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Reads messages and applies their events. The caller serves the faults after leaving the gate.
    pub(crate) fn read_messages(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
    ) -> Messages {
        let mut messages = Messages::default();
        let mut changes = lock(&space.changes);
        let Some(quiet) = collect(space, gate, &mut messages, &mut changes) else {
            if Bug::CarriedForgotten.is_back() {
                changes.carried = None;
            }
            return messages;
        };
        let carried = changes.carried.take();
        let is_own_alone = carried.is_some() && quiet && !changes.order.is_waiting();
        if !is_own_alone {
            // Else the helper goes on with its batch: nothing has changed that it was planned from.
            space.begin_events(gate);
        }
        let (mut beside, mut emptied) = (ConcurrentChanges::default(), Vec::new());
        let forks: Vec<u64> = changes.order.forks().collect();
        if !forks.is_empty() {
            space.store_staged(gate);
        }
        let known = messages.children.len();
        for number in forks {
            // Before any change of this read is applied: the child's mappings tell which of them it contains.
            if let Some(fork) = changes.forks.remove(&number) {
                let (uffd, _until_applied) = fork.into_parts();
                let child = self.fork(space, gate, uffd, (number, &mut beside));
                messages.children.extend(child);
            }
        }
        let (mut ordered, mut has_moved) = (0, false);
        loop {
            let change = changes.order.next(&lock(&space.managed), quiet);
            if let Some(change) = change {
                beside.note(change);
            }
            if change.is_some_and(Change::needs_order) {
                space.prepared.changes.fetch_add(1, Ordering::Relaxed);
                ordered += 1;
            }
            match change {
                None => break,
                Some(Change::Unmap(range)) => {
                    space.apply_unmap(gate, range);
                    space.prepared.note_unmap(range);
                    emptied.push(range);
                }
                Some(Change::Remove(range)) => space.apply_remove(gate, range),
                Some(Change::Remap { from, to, stays }) => {
                    has_moved = true;
                    // Unless quiet, the echo may be yet to come.
                    let stays = stays && quiet;
                    space.apply_remap(gate, from, to, stays);
                    space.prepared.note_move(from, to, stays);
                    emptied.push(from);
                }
                Some(Change::Fork(_)) => {}
            }
        }
        beside.finish();
        if ordered > 1 {
            space.prepared.note_concurrent();
        }
        if let Some(carried) = carried {
            let were_wrong = space.resolve_overrun(gate, carried);
            let is_overrun = were_wrong.unwrap_or(has_moved);
            for child in messages.children.iter().skip(known) {
                // It has the page states of before.
                child.fork.lost.fetch_or(is_overrun, Ordering::Relaxed);
            }
        }
        let table = gate.table_mut();
        emptied.into_iter().for_each(|range| table.prune(range));
        messages
    }

    fn fork(
        &self,
        space: &Arc<AddressSpace>,
        gate: &Exclusive<'_>,
        uffd: Userfaultfd,
        beside: (u64, &mut ConcurrentChanges),
    ) -> Option<Arc<AddressSpace>> {
        match patiently(|| self.ports.new_port()) {
            Ok((port, file)) => {
                let port = HelperPort::new(port, file);
                Some(space.apply_fork(&self.group, gate, (uffd, port), beside))
            }
            Err(error) => {
                log::warn!(
                    "a forked child hangs at its next fault: no channel could be created ({error}); raise {}, and kill the \
                     child",
                    fd_pressure::limit_of(&error)
                );
                self.keep_waiting(uffd);
                None
            }
        }
    }

    /// Makes the faults of a child wait: closing the userfaultfd would let it read zeros.
    #[cfg(not(simulated))]
    fn keep_waiting(&self, uffd: Userfaultfd) {
        if let Err(error) = self.group.resources.guardian.hold_for_good(uffd.into()) {
            log::error!(
                "cannot keep a forked child from reading zeros after memfold ends ({error}); kill the child \
                 first"
            );
        }
    }

    /// In the model there is room for a channel soon.
    #[cfg(simulated)]
    fn keep_waiting(&self, uffd: Userfaultfd) {
        unreachable!("no channel for {uffd:?}");
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
    needs_order |= changes.carried.is_some();
    let mut is_stored = Bug::StageReadAfterFork.is_back();
    let mut buffer = Vec::with_capacity(MESSAGES);
    loop {
        if let Some(unread) = space.settle_before_read(gate, || changes.order.removals()) {
            (changes.carried, needs_order) = (Some(unread), true);
        }
        if !is_stored && space.channel.is_forking() && space.is_changing() {
            // Once the event is read, the parent runs and may be gone at any moment.
            space.store_staged(gate);
            is_stored = true;
        }
        let read = match space.uffd().read(&mut buffer) {
            Ok(read) => read,
            Err(_) if space.is_gone() => {
                space.life.detach();
                // A fork that was prepared waits although nothing was read.
                return (any || changes.order.is_waiting()).then_some(false);
            }
            Err(errno) => {
                // For example EMFILE for a child's userfaultfd. The event stays unread, events that
                // were read stay pending, and the kernel refuses page changes until both are handled.
                if !std::mem::replace(&mut changes.unreadable, true) {
                    log::warn!(
                        "cannot read the changes of a program's mappings ({errno}): it waits until that is possible; \
                         raise ulimit -n if this comes again"
                    );
                }
                crate::time::sleep(fd_pressure::PAUSE);
                return None;
            }
        };
        changes.unreadable = false;
        for message in buffer.drain(..) {
            if let Message::Remap { from, to } = message
                && let Some(own) = space.take_carried(gate, (from, to), || changes.order.removals())
            {
                // Others may have changed mappings just before, and their events come later.
                (changes.carried, needs_order) = (Some(own), true);
                continue;
            }
            let Some(change) = sort(message, space, messages, changes) else {
                continue;
            };
            any = true;
            needs_order |= change.needs_order();
            changes.order.push(change);
        }
        let is_all = read < MESSAGES;
        if is_all && (!needs_order || Bug::EventsNotAwaited.is_back()) {
            return any.then_some(true);
        }
        if is_all && !space.is_changing() {
            return Some(true);
        }
        if waited.so_far() > QUIET_PATIENCE {
            log::warn!(
                "a program has changed its mappings for {} s without a pause: their order is a guess, and it may read \
                 wrong data from now on (docs/limits.md)",
                QUIET_PATIENCE.as_secs()
            );
            return Some(false);
        }
        if !is_all {
            continue;
        }
        if becomes_quiet(space) {
            return Some(true);
        }
    }
}

/// Waits for a moment without a change in progress, after all events were read. The thread whose event was
/// read must run to complete its change, possibly on this CPU. A change that begins meanwhile is in
/// progress until its event is read, so this does not wait for long.
fn becomes_quiet(space: &AddressSpace) -> bool {
    let mut nap = QUIET_NAP;
    while nap <= QUIET_NAP_LONGEST {
        crate::time::sleep(nap);
        if !space.is_changing() {
            return true;
        }
        nap *= 2;
    }
    false
}

/// Notes a fault among the messages; returns the change that an event reports.
fn sort(
    message: Message,
    space: &AddressSpace,
    messages: &mut Messages,
    changes: &mut Changes,
) -> Option<Change> {
    match message {
        Message::Fault {
            page,
            write,
            protected,
            thread,
        } => {
            let unregistered = space.unregistered.load(Ordering::Relaxed);
            let fault = Fault {
                page,
                write,
                protected,
                unregistered,
            };
            messages.faults.push((fault, thread));
            None
        }
        Message::Unmap(range) => Some(Change::Unmap(range)),
        Message::Remove(range) => Some(Change::Remove(range)),
        Message::Remap { from, to } => Some(Change::Remap {
            from,
            to,
            stays: true,
        }),
        Message::Fork(uffd) => {
            let number = changes.next_fork;
            changes.next_fork += 1;
            let under_way = space.resources.shared.begin_fork();
            let fork = UnappliedFork::new(&space.resources, uffd, under_way);
            changes.forks.insert(number, fork);
            Some(Change::Fork(number))
        }
    }
}
