//! Forks that the program's library prepares, where the kernel reports none.
//!
//! A fork event takes `CAP_SYS_PTRACE`. Without it a child's mappings are not registered, and pages that are out
//! would read as zeros there. So what is managed is *withheld* from forked children (`MADV_DONTFORK`, by the
//! helper, before it is managed), and a thread that forks through the C library asks for leave first:
//!
//! 1. It reads the beacon, which is registered and missing. The thread that serves the fault enters the gate
//!    exclusively, applies all events, stores what is staged, and lists the VMAs that are withheld.
//! 2. It fills the beacon with the answer. From then on no page state changes: the gate stays closed.
//! 3. The thread gives these VMAs to its child. If a mapping changed meanwhile, they are listed anew: so all that is
//!    registered is the child's, wherever it is moved from now on. Then the thread clones and withholds them
//!    again. The child starts a helper and says hello with the token of this fork, with a userfaultfd of its own.
//! 4. The child gets the parent's page states, as by an event. Changes by other threads that came in between are
//!    recorded for it and decided by its mappings, as those beside an event are (`reconcile.rs`).
//!
//! The child stands still until then. One whose token is not known (any more) is not admitted, and ends.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::supervised::events::read::{Messages, Reader};
use crate::supervised::events::reorder::Change;
use crate::supervised::fault::primitives::wake;
use crate::supervised::fork::expected_children::{CHILD_PATIENCE, LOOK};
use crate::supervised::fork::shared_estimate::PendingFork;
use crate::supervised::fork::unapplied::UnappliedFork;
use crate::supervised::kernel::{Memory, Userfaultfd};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, GATE_PATIENCE};
use crate::sync::lock;
use crate::time::Instant;
use memfold_sys::channel::fork_step::{GIVEN, GO, LISTED, NOT_FORKED};
use memfold_sys::channel::{ASK_FILTERS, ASK_FORK, DENIED, GRANTED, UNASKED};
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Forks in a row that kept the gate for longer than `SLOW` after which a program gets no leave any more: each makes a
/// handler wait.
const MOST_EXPIRED: u32 = 8;
const SLOW: Duration = Duration::from_secs(if cfg!(simulated) { 10_000 } else { 2 });
/// How often events are read anew because mappings changed meanwhile, before the thread must ask again.
const ROUNDS: u32 = 50;

/// What came of a request.
enum Outcome {
    /// This answer has yet to be given.
    Answer(u64),
    /// The thread was answered, and there is no child.
    Over,
    /// The thread was answered, and there is a child.
    Forked,
    /// Mappings change all the time, or the gate was not to be had.
    AskAgain,
}

/// What came of listing what is withheld.
enum Listed {
    Yes(PendingFork),
    /// Mappings change all the time.
    NotYet,
    /// A page cannot be stored, or there is too much.
    Never,
}

impl Reader {
    /// Answers a forking thread that reads the beacon. The messages that were read meanwhile are to be
    /// served by the caller.
    pub(crate) fn prepare_fork(&self, space: &Arc<AddressSpace>, beacon: VirtualPage) -> Messages {
        let mut messages = Messages::default();
        let outcome = match space.channel.fork_asked() {
            ASK_FORK if space.prepared.expired.load(Ordering::Relaxed) < MOST_EXPIRED => {
                match space.exclusive_within(GATE_PATIENCE) {
                    Ok(mut gate) => self.grant_fork(space, &mut gate, beacon, &mut messages),
                    Err(_) => Outcome::AskAgain,
                }
            }
            ASK_FILTERS if space.has_our_filters() => Outcome::Answer(GRANTED),
            ASK_FILTERS => {
                // The governor answers, when nothing of the program is out any more.
                space.prepared.releases.store(true, Ordering::Relaxed);
                Outcome::Over
            }
            ASK_FORK => Outcome::Answer(DENIED),
            // A process that reads all of the program's memory, for example a debugger.
            _ => Outcome::Answer(UNASKED),
        };
        match outcome {
            Outcome::Over | Outcome::Forked => {}
            Outcome::Answer(answer) if answer_with(space, beacon, answer).is_ok() => {}
            Outcome::Answer(_) | Outcome::AskAgain => wake(space, beacon, 1),
        }
        messages
    }

    /// Lets the thread fork, and waits for its child.
    fn grant_fork(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
        beacon: VirtualPage,
        messages: &mut Messages,
    ) -> Outcome {
        let expected = &self.group().expected_children;
        let mut fork = Granted {
            token: expected.expect(),
            began: Instant::now(),
            busy_at_go: None,
            beside_others: Duration::ZERO,
            listed_after: None,
            kept_by_mistake: None,
            listed: Vec::new(),
            marked: RangeSet::default(),
            messages,
        };
        let outcome = self.fork_in_time(space, gate, beacon, &mut fork);
        let is_child = matches!(outcome, Outcome::Forked);
        if !is_child {
            expected.forget(fork.token);
        }
        // However it ended, it kept the gate.
        let expired = &space.prepared.expired;
        if fork.is_slow() {
            expired.fetch_add(1, Ordering::Relaxed);
        } else if is_child {
            expired.store(0, Ordering::Relaxed);
        }
        outcome
    }

    fn fork_in_time(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
        beacon: VirtualPage,
        fork: &mut Granted<'_>,
    ) -> Outcome {
        let under_way = match self.list(space, gate, fork) {
            Listed::Yes(under_way) => under_way,
            Listed::NotYet => return Outcome::AskAgain,
            Listed::Never => return Outcome::Answer(DENIED),
        };
        if space.is_fork_thread_out(gate) {
            // It touches them and asks again.
            return Outcome::Answer(UNASKED);
        }
        if !self.answer_beside_changes(space, gate, beacon, fork) {
            return Outcome::AskAgain;
        }
        let here = self.await_child(space, gate, fork);
        fork.beside_others = fork.busy_at_go.map_or(Duration::ZERO, |before| {
            self.group().expected_children.busy().saturating_sub(before)
        });
        let Some(uffd) = here else {
            // What was listed last may be outdated, and the thread withholds it.
            let mut doubtful = lock(&space.prepared.doubtful);
            for (start, end) in &fork.listed {
                doubtful.add(PageRange::of_addresses(*start, *end));
            }
            return Outcome::Over;
        };
        {
            let mut changes = lock(&space.changes);
            let number = changes.next_fork;
            changes.next_fork += 1;
            let fork = UnappliedFork::new(&space.resources, uffd, under_way);
            changes.forks.insert(number, fork);
            changes.order.push(Change::Fork(number));
        }
        let mut forked = self.read_messages(space, gate);
        let child = forked.children.pop();
        fork.messages.append(forked);
        let Some(child) = child else {
            return Outcome::Over;
        };
        *lock(&child.prepared.marked) = std::mem::take(&mut fork.marked);
        // Else a program would escape by its children, each of which forks once.
        let expired = space.prepared.expired.load(Ordering::Relaxed) + u32::from(fork.is_slow());
        child.prepared.expired.store(expired, Ordering::Relaxed);
        if self
            .group()
            .expected_children
            .set_forked(fork.token, child.clone())
        {
            fork.messages.children.push(child);
            return Outcome::Forked;
        }
        // The admitting thread has given up: it will not be admitted.
        self.group().dismiss(&child);
        Outcome::Over
    }

    /// Tells the thread that it may fork. The kernel refuses while mappings change, and a thread that changes them all
    /// the time is on its next change before anything is listed anew: so its event is read, and the answer is given
    /// again at once. What is listed may be outdated by then; `await_child` looks. `false` if it could not be given.
    fn answer_beside_changes(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
        beacon: VirtualPage,
        fork: &mut Granted<'_>,
    ) -> bool {
        for _ in 0..ROUNDS {
            if answer_with(space, beacon, GRANTED).is_ok() {
                return true;
            }
            fork.messages.append(self.read_messages(space, gate));
            if space.is_dead_or_gone() || fork.is_overdue() {
                break;
            }
        }
        false
    }

    /// Applies all events, stores what is staged, and lists the withheld VMAs.
    fn list(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
        fork: &mut Granted<'_>,
    ) -> Listed {
        for _ in 0..ROUNDS {
            fork.messages.append(self.read_messages(space, gate));
            if space.is_dead_or_gone() || fork.is_overdue() {
                break;
            }
            if space.is_changing() {
                continue;
            }
            // Once a list was made, the helper withholds nothing more: it sees the fork. It may not say so before the gate
            // is open, where it waits with a batch.
            let may_withhold = fork.listed_after.is_none();
            if may_withhold && space.channel.is_withholding() && !space.is_detached() {
                // The helper may have looked before the fork was announced, and withhold what is given now.
                crate::time::sleep(LOOK);
                continue;
            }
            space.begin_events(gate);
            space.store_staged(gate);
            space.find_stray();
            if space.sampling.is_unreadable.load(Ordering::Relaxed) {
                return Listed::Never;
            }
            // What is read from here on may be missing in the list.
            fork.listed_after = Some(space.prepared.changes.load(Ordering::Relaxed));
            let Ok(spans) = space.withheld_spans(&mut fork.kept_by_mistake) else {
                return Listed::Never;
            };
            if space.has_staged(gate) || !space.channel.list_withheld(fork.token, &spans) {
                return Listed::Never;
            }
            fork.listed = spans;
            space.prepared.beside_fork.store(true, Ordering::Relaxed);
            space.channel.set_fork_step(LISTED);
            return Listed::Yes(space.resources.shared.begin_fork());
        }
        Listed::NotYet
    }

    /// Waits until the child has said hello, or there is none. Lists anew where mappings changed before the thread had
    /// given what was listed: what is not given now, no child would have.
    ///
    /// The thread may be stopped, and what it writes may be anything: whatever it does, this ends in time.
    fn await_child(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
        fork: &mut Granted<'_>,
    ) -> Option<Userfaultfd> {
        let (mut is_listed, mut is_outdated) = (true, false);
        loop {
            let here = self.group().expected_children.take_here(fork.token);
            if here.is_some() {
                return here;
            }
            // A parent that is gone may have had its child just before.
            let is_over = space.is_dead_or_gone() && fork.began.elapsed() > CHILD_PATIENCE / 20;
            if is_over || fork.is_overdue() || self.group().stopping.load(Ordering::Relaxed) {
                // It does not clone when it goes on.
                space.channel.set_fork_step(NOT_FORKED);
                return None;
            }
            match space.channel.fork_step() {
                GIVEN if is_listed => {
                    fork.messages.append(self.read_messages(space, gate));
                    let now = space.prepared.changes.load(Ordering::Relaxed);
                    let has_changed = fork.listed_after != Some(now) || space.is_changing();
                    is_outdated |= has_changed && !Bug::GivenUnchecked.is_back();
                    is_outdated |= space.find_stray();
                    let step = if is_outdated {
                        match self.list(space, gate, fork) {
                            Listed::Yes(_) => LISTED,
                            // It waits for as long as this waits for it.
                            Listed::NotYet => continue,
                            Listed::Never => NOT_FORKED,
                        }
                    } else {
                        // Nothing is marked while a thread forks: its child has these marks.
                        fork.marked = lock(&space.prepared.marked).clone();
                        fork.busy_at_go = Some(self.group().expected_children.busy());
                        GO
                    };
                    (is_listed, is_outdated) = (step == LISTED, false);
                    space.channel.set_fork_step(step);
                }
                NOT_FORKED => return None,
                _ => crate::time::sleep(LOOK),
            }
        }
    }
}

/// A fork that has leave, or is about to have it.
struct Granted<'a> {
    token: u64,
    began: Instant,
    /// For how long the thread that admits helpers had been busy when the thread was told to clone, and for how long it was
    /// between that and the child's hello. That is not the program's doing.
    busy_at_go: Option<Duration>,
    beside_others: Duration,
    /// How many changes of mappings were applied when the withheld VMAs were listed; none before the first time.
    listed_after: Option<u32>,
    /// What memory is kept from children by mistake, as the first list found it.
    kept_by_mistake: Option<RangeSet>,
    /// What was listed, as addresses.
    listed: Vec<(u64, u64)>,
    /// What the child's mappings show as marked, but for what moves before it is cloned.
    marked: RangeSet,
    /// What was read meanwhile.
    messages: &'a mut Messages,
}

impl Granted<'_> {
    fn is_overdue(&self) -> bool {
        self.began.elapsed() > CHILD_PATIENCE
    }

    /// Whether the program itself took long.
    fn is_slow(&self) -> bool {
        self.began.elapsed().saturating_sub(self.beside_others) > SLOW
    }
}

/// Fills the beacon, which wakes the thread.
///
/// # Errors
/// While mappings change, and if the program is gone.
pub(crate) fn answer_with(
    space: &AddressSpace,
    beacon: VirtualPage,
    answer: u64,
) -> Result<(), Errno> {
    let mut page = [0; PAGE_SIZE];
    page[..8].copy_from_slice(&answer.to_le_bytes());
    space
        .uffd()
        .copy_in(beacon, &page, 1)
        .map_err(|partial| partial.errno)
}
