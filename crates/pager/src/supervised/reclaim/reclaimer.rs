//! The reclaimer: keeps a group under its limit, one round over an address space after the other (`round.rs`), or, while
//! programs wait, several rounds at a time with the help of other threads (`crew.rs`).
//!
//! A clock hand takes victims in address order. A page that refaults early is marked hot and skipped
//! seven times.

use crate::backoff::NoProgress;
use crate::page::{PageRange, bytes};
use crate::page_state::MOST_SKIPS;
use crate::supervised::fault::deferred::DeferredFault;
use crate::supervised::fault::message::{Admission, Resolution};
use crate::supervised::fault::primitives::{note_served, wake};
use crate::supervised::group::Group;
#[cfg(not(simulated))]
use crate::supervised::reclaim::affinity::AffinityFollower;
use crate::supervised::reclaim::batch::plan::LOOKED_AT;
use crate::supervised::reclaim::crew::{Crew, Job};
use crate::supervised::reclaim::priority::Pressure;
use crate::supervised::reclaim::round::{BATCH, Progress, Worker, can_be_commanded};
use crate::supervised::reclaim::turns::Turns;
use crate::supervised::reclaim::watermarks::{Surge, Watermarks};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::GATE_PATIENCE;
use crate::sync::{Mutex, lock};
use crate::time::Instant;
use memfold_sys::PAGE_SIZE;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// At least one in this many rounds goes to the proportional choice, even while `sibling_ranges` are
/// not empty. More frees shared pages faster and reclaims less from other programs.
const SIBLING_ROUNDS: u32 = 8;
/// Revolutions of the hand after which every movable page was a victim.
const REVOLUTIONS: usize = 1 + MOST_SKIPS as usize;
/// Milliseconds without new mappings after which all mappings are taken to be registered. More relaxes
/// the limit later.
const MAPPINGS_QUIET: u64 = 500;
/// Pause after a search that found nothing while no fault waits, as a multiple of its duration. A larger
/// factor takes less CPU time and finds room later.
const REST_FACTOR: u32 = 16;
/// Longest wait for a wake-up. Longer frees the slots that handlers left later.
const IDLE: Duration = Duration::from_millis(50);
/// Longest wait for a round that was handed out, before the reclaimer looks again. Longer delays what comes meanwhile.
const CREW_PATIENCE: Duration = Duration::from_millis(1);
/// Pages above the watermark for each round that is handed out. More leaves the threads that help idle for longer; fewer moves
/// out more than is needed. The simulation has few pages.
const WORTH_A_ROUND: usize = if cfg!(simulated) { 1 } else { BATCH };

/// The reclaimer thread.
pub(crate) struct Reclaimer {
    group: Arc<Group>,
    worker: Worker,
    crew: Crew,
    turns: Turns,
    /// Rounds that went to `sibling_ranges` since the last proportional choice.
    sibling_rounds: u32,
    no_progress: NoProgress,
    surge: Surge,
    /// IDs of the address spaces that have no page to take, in this search for room.
    exhausted: Vec<u64>,
    /// Deferred faults of programs whose gate was missed.
    missed: Vec<DeferredFault<AddressSpace>>,
    /// When they were last tried again.
    retried: Instant,
    /// Time before which only faults that wait, and commands, start another search.
    next_search: Instant,
}

impl Reclaimer {
    /// The reclaimer of a group, with threads that help.
    pub(crate) fn new(group: Arc<Group>, crew: Crew) -> io::Result<Reclaimer> {
        Ok(Reclaimer {
            worker: Worker::new(group.clone())?,
            group,
            crew,
            turns: Turns::default(),
            sibling_rounds: 0,
            no_progress: NoProgress::default(),
            surge: Surge::default(),
            exhausted: Vec::new(),
            missed: Vec::new(),
            retried: Instant::now(),
            next_search: Instant::now(),
        })
    }

    /// Runs until the group stops.
    #[cfg(not(simulated))]
    pub(crate) fn run(&mut self) {
        if !self.group.resources.priority.begin() {
            self.crew.dismiss();
        }
        let mut affinity = AffinityFollower::new();
        while !self.group.stopping.load(Ordering::Relaxed) {
            self.wait();
            affinity.follow(&self.group);
            self.reclaim();
        }
    }

    /// Waits for a wake-up, not for long.
    pub(crate) fn wait(&self) {
        let longest = if self.has_missed() {
            GATE_PATIENCE
        } else {
            IDLE
        };
        self.group.resources.wait_for_wake(longest);
    }

    fn watermarks(&self) -> Watermarks {
        self.group.refresh_limit();
        let resources = &self.group.resources;
        let marks = Watermarks::of(resources.resident_limit_bytes());
        match resources.reclaim_target() {
            Some(target) => marks.lowered_to(target),
            None => marks,
        }
    }

    /// Brings the group below its lower watermark if it is above the upper one, and frees slots that
    /// handlers left.
    pub(crate) fn reclaim(&mut self) {
        self.retry_missed();
        self.reclaim_to_watermark();
        self.group.resources.free_pending();
    }

    /// Whether faults wait for nothing but the gate of their program.
    fn has_missed(&self) -> bool {
        !self.missed.is_empty() || self.worker.service.has_unfinished()
    }

    /// Serves them, as far as their programs' gates are free.
    fn retry_missed(&mut self) {
        self.retried = Instant::now();
        self.worker.service.finish_loads();
        let missed = std::mem::take(&mut self.missed);
        self.serve(missed);
    }

    fn reclaim_to_watermark(&mut self) {
        let marks = self.watermarks();
        let is_awaited = !self.group.deferred.is_empty();
        let resident = self.group.resources.resident_bytes();
        let is_above = resident > marks.start;
        self.surge.note(resident, &marks, Instant::now());
        if self.group.resources.take_search_wanted() {
            self.next_search = Instant::now();
        }
        let is_due = is_above && Instant::now() >= self.next_search;
        if !is_awaited && !is_due {
            return;
        }
        self.exhausted.clear();
        let mut idle_rounds = 0;
        let mut idle_since = Instant::now();
        loop {
            let marks = self.watermarks();
            let resident = self.group.resources.resident_bytes();
            self.group.note_peaks();
            if resident < marks.hard || self.group.deferred.is_overdue() {
                self.serve_deferred();
            }
            // Other programs may keep it busy here for as long as they run.
            if self.has_missed() && self.retried.elapsed() >= GATE_PATIENCE {
                self.retry_missed();
            }
            let pressure = self.pressure(&marks, resident);
            self.group.resources.priority.set_pressure(pressure);
            if resident <= marks.stop || self.group.stopping.load(Ordering::Relaxed) {
                break;
            }
            #[cfg(not(simulated))]
            {
                // Faults that miss a gate are not deferred any more.
                let until = self.has_missed().then(|| Instant::now() + GATE_PATIENCE);
                self.group.hold_pool_limit(&mut self.worker.scratch, until);
            }
            let excess = resident - marks.stop;
            let is_waited_for = resident > marks.hard || !self.group.deferred.is_empty();
            let made = match self.choose() {
                Some(space) => self.rounds(&space, excess, is_waited_for && idle_rounds == 0),
                // What is left has a round, for which the search waits.
                None if self.crew.busy() > 0 => {
                    let began = Instant::now();
                    self.crew.wait(CREW_PATIENCE);
                    idle_since += began.elapsed();
                    self.crew.collect()
                }
                None => {
                    self.give_up(false, idle_since.elapsed());
                    break;
                }
            };
            let futile = self.note_stored(&made);
            if made.iter().any(|(_, made)| made.any()) && !futile {
                self.exhausted.clear();
                idle_rounds = 0;
                idle_since = Instant::now();
                continue;
            }
            idle_rounds += made.len();
            let exhausted = made.iter().filter(|(_, made)| made.exhausted);
            self.exhausted.extend(exhausted.map(|(id, _)| *id));
            let rounds = REVOLUTIONS * (resident as usize / PAGE_SIZE) / LOOKED_AT;
            // A program needs up to three rounds before the first shared page is moved.
            let turns = 3 * self.group.space_count();
            let is_long = idle_rounds > 20 + rounds + turns && self.crew.busy() == 0;
            if futile || is_long {
                self.give_up(futile, idle_since.elapsed());
                break;
            }
        }
    }

    /// Serves deferred faults although no room could be made. If `futile` (pages are incompressible),
    /// or if no page could be moved for long, raises the limit for a while.
    fn give_up(&mut self, futile: bool, searched: Duration) {
        let resources = &self.group.resources;
        let is_below_limit = resources.reclaim_target().is_some()
            && resources.resident_bytes() <= resources.resident_limit_bytes();
        let is_awaited = is_below_limit && resources.is_reclaim_awaited();
        let factor = if is_awaited { 1 } else { REST_FACTOR };
        self.next_search = Instant::now() + searched * factor;
        self.group.note_over_limit();
        if (self.is_stuck(searched) || futile) && !is_below_limit {
            self.group.relax_limit();
        }
        self.serve_deferred();
    }

    /// Whether no page can be moved and that is not transient. It is transient while new mappings are
    /// found, a program is stopped, or its messages are being read.
    fn is_stuck(&mut self, searched: Duration) -> bool {
        let now = self.group.resources.milliseconds();
        let found = self.group.found_mappings.load(Ordering::Relaxed);
        let is_stopped = |space: &Arc<AddressSpace>| space.is_stopped() || space.was_gate_missed();
        self.no_progress.note(searched.as_millis() as u64, now)
            && now.saturating_sub(found) > MAPPINGS_QUIET
            && !self.group.spaces().iter().any(is_stopped)
    }

    /// Whether programs lack room, or may soon. Pages that forks share may be copied at any time, without a
    /// userfaultfd fault.
    fn pressure(&mut self, marks: &Watermarks, resident: u64) -> Pressure {
        if self.surge.note(resident, marks, Instant::now()) {
            Pressure::Exceeded
        } else if resident > marks.pressing
            || !self.group.deferred.is_empty()
            || resident + bytes(self.group.resources.shared.pages()) > marks.hard
        {
            Pressure::Short
        } else {
            Pressure::None
        }
    }

    /// Serves the deferred faults.
    fn serve_deferred(&mut self) {
        let deferred = self.group.deferred.take();
        self.serve(deferred);
    }

    /// Serves deferred faults. They stay deferred if other programs would have to wait for the gate.
    fn serve(&mut self, faults: Vec<DeferredFault<AddressSpace>>) {
        for deferred in faults {
            let (space, fault) = (&deferred.space, deferred.fault);
            match self.worker.service.serve(space, fault, Admission::Now) {
                Resolution::GateMissed => {
                    let is_listed = |other: &DeferredFault<_>| deferred.is_same(other);
                    if !self.missed.iter().any(is_listed) {
                        self.missed.push(deferred);
                    }
                    continue;
                }
                // The thread that may wait for another machine records it.
                Resolution::Queued => continue,
                // It faults again, and counts once it is served.
                Resolution::Retry => wake(space, fault.page, 1),
                Resolution::Done => note_served(space, &fault, deferred.since.elapsed()),
            }
            // Of whatever kind it is, it waited for other pages to go out.
            let resources = &self.group.resources;
            resources.note_wait(false, deferred.since.elapsed());
        }
    }

    /// A round over an address space, and what those made that were handed out before, by the IDs of the address spaces.
    fn rounds(
        &mut self,
        space: &Arc<AddressSpace>,
        excess_bytes: u64,
        with_help: bool,
    ) -> Vec<(u64, Progress)> {
        if with_help {
            self.hand_out(space, excess_bytes);
        }
        let own = self.worker.round(space, excess_bytes);
        if !own.any() && space.is_silent() {
            // Its turns would each be waited for.
            self.turns.retain(|id| id != space.id);
        }
        let mut made = self.crew.collect();
        made.push((space.id, own));
        made
    }

    /// Notes what was stored. Returns whether that frees too little memory.
    fn note_stored(&self, made: &[(u64, Progress)]) -> bool {
        let sum = |of: fn(&Progress) -> usize| made.iter().map(|(_, made)| of(made)).sum();
        let (stored, refused) = (sum(|made| made.stored), sum(|made| made.refused));
        self.group.compression.note(stored, refused)
    }

    /// Hands rounds out, besides that over `own`: to the address spaces whose turn would be next, until that is one with a
    /// round or one that shares pages with others. Of those, the second of equal pages is stored as the first one's slot;
    /// the simulation, in which all are relatives, does without.
    fn hand_out(&mut self, own: &Arc<AddressSpace>, excess_bytes: u64) {
        let worth = excess_bytes as usize / PAGE_SIZE / WORTH_A_ROUND;
        let free = (self.crew.free()).min(worth.saturating_sub(self.crew.busy()));
        if free == 0 {
            return;
        }
        self.keep_turns();
        for _ in 0..free {
            if self.turns.first().is_none() {
                self.turns.plan(&self.commandable(), |_| true);
            }
            let first = self.turns.first();
            let Some(space) = first.and_then(|id| self.group.space(id)) else {
                break;
            };
            let is_alone = cfg!(simulated) || !space.fork.family.has_others(&space);
            if Arc::ptr_eq(&space, own) || self.crew.has(space.id) || !is_alone {
                break;
            }
            self.turns.take(|id| id == space.id);
            self.crew.hand_out(Job {
                space,
                excess_bytes,
            });
        }
    }

    /// Chooses the address space of the next round, in proportion to evictable size.
    fn choose(&mut self) -> Option<Arc<AddressSpace>> {
        if let Some(space) = self.choose_listed() {
            return Some(space);
        }
        self.keep_turns();
        let planned = self.turns.take(|id| !self.crew.has(id));
        let next = planned.or_else(|| {
            let candidates = self.commandable();
            self.turns.plan(&candidates, |id| !self.crew.has(id));
            self.turns.take(|id| !self.crew.has(id))
        });
        next.and_then(|id| self.group.space(id))
    }

    /// Gives up the turns of address spaces that cannot have a round.
    fn keep_turns(&mut self) {
        let (group, exhausted) = (&self.group, &self.exhausted);
        self.turns.retain(|id| {
            let space = group.space(id).filter(|space| can_be_commanded(space));
            space.is_some() && !exhausted.contains(&id)
        });
    }

    /// Chooses an address space with pages that are to leave before others.
    fn choose_listed(&mut self) -> Option<Arc<AddressSpace>> {
        if !self.group.resources.take_listed() {
            return None;
        }
        let is_listed = |space: &Arc<AddressSpace>| {
            let clock = &space.clock;
            !lock(&clock.cow_broken).is_empty() || !lock(&clock.sibling_ranges).is_empty()
        };
        if !self.group.spaces().iter().any(is_listed) {
            return None;
        }
        self.group.resources.note_listed();
        let spaces = self.unexhausted();
        let free = || spaces.iter().filter(|space| !self.crew.has(space.id));
        // Pages whose COW was broken come first: their copies use more memory until they are paged out.
        most_of(free(), |space| &space.clock.cow_broken).or_else(|| {
            // Next are pages whose copies in relatives were paged out, which saves no memory before
            // the originals are paged out, too.
            self.sibling_rounds = (self.sibling_rounds + 1) % SIBLING_ROUNDS;
            let siblings_first = self.sibling_rounds != 0;
            most_of(free(), |space| &space.clock.sibling_ranges).filter(|_| siblings_first)
        })
    }

    /// The address spaces that may have pages to take.
    fn unexhausted(&self) -> Vec<Arc<AddressSpace>> {
        let mut spaces = self.group.spaces();
        spaces.retain(|space| !self.exhausted.contains(&space.id));
        spaces
    }

    /// Those that may have a round. Programs with silent helpers are among them only if there are no others.
    fn commandable(&self) -> Vec<Arc<AddressSpace>> {
        let each = self.unexhausted().into_iter();
        let (silent, others): (Vec<_>, Vec<_>) = each
            .filter(|space| can_be_commanded(space))
            .partition(|space| space.is_silent());
        if others.is_empty() { silent } else { others }
    }
}

/// The address space with the most pages in `list`, among those that can take a batch now.
fn most_of<'a>(
    spaces: impl Iterator<Item = &'a Arc<AddressSpace>>,
    list: impl Fn(&AddressSpace) -> &Mutex<Vec<PageRange>>,
) -> Option<Arc<AddressSpace>> {
    let pages = |space: &AddressSpace| -> u64 {
        let ranges = lock(list(space));
        ranges.iter().map(|range| range.pages()).sum()
    };
    let listed = spaces.map(|space| (pages(space), space));
    let (_, most) = listed
        .filter(|(pages, space)| {
            *pages > 0 && can_be_commanded(space) && !lock(&space.helper_port).is_busy()
        })
        .max_by_key(|(pages, _)| *pages)?;
    Some(most.clone())
}
