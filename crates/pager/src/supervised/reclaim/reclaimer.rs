//! The reclaimer: keeps a group under its limit.
//!
//! Each round works on one address space, and the helper moves the next batch to the stage while this
//! thread compresses an earlier one:
//!
//! 1. settle the batch in flight;
//! 2. post the next batch: free dead places, move the next victims;
//! 3. compress the oldest staged pages, which are not in the posted batch;
//! 4. wait for the helper.
//!
//! A clock hand takes victims in address order. A page that refaults early is marked hot and skipped
//! seven times.

use crate::backoff::NoProgress;
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{MOST_SKIPS, PageState, StageIndex};
use crate::replacement::Shadow;
use crate::supervised::fault::deferred::DeferredFault;
use crate::supervised::fault::message::{Admission, Resolution};
use crate::supervised::fault::primitives::wake;
use crate::supervised::fault::service::FaultService;
use crate::supervised::fork::dedup::DedupCandidates;
use crate::supervised::group::{Group, Watermarks};
use crate::supervised::kernel::Process;
#[cfg(not(simulated))]
use crate::supervised::reclaim::affinity::AffinityFollower;
use crate::supervised::reclaim::batch::plan::LOOKED_AT;
use crate::supervised::reclaim::batch::{Batch, Settled};
use crate::supervised::space::gate::Inside;
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::{Mutex, lock};
use crate::time::Instant;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum number of pages moved and compressed in one round. More makes fewer commands and delays
/// deferred faults.
pub(crate) const BATCH: usize = 64;
/// Minimum number of pages of a program that stay staged. More keeps more pages as swap cache and fewer
/// resident.
const STAGED_AT_LEAST: u64 = 16;
/// At least one in this many rounds goes to the proportional choice, even while `sibling_ranges` are
/// not empty. More frees shared pages faster and reclaims less from other programs.
const SIBLING_ROUNDS: u32 = 8;
/// Revolutions of the hand after which every movable page was a victim.
const REVOLUTIONS: usize = 1 + MOST_SKIPS as usize;
/// Milliseconds without new mappings after which all mappings are taken to be registered. More relaxes
/// the limit later.
const MAPPINGS_QUIET: u64 = 500;
/// Number of evictable pages that a program keeps whose threads fault. More lets it run for longer
/// between faults where almost nothing is evictable, and exceeds the limit by more there.
const KEPT: usize = 64;
/// Divisor of the limit: this part of it is kept for all programs together at most.
const KEPT_DIVISOR: usize = 4;
/// Seconds after its last fault for which a program keeps pages. More leaves more to programs that
/// sleep.
const KEPT_SECONDS: u32 = 1;
/// Pause after a search that found nothing while no fault waits, as a multiple of its duration. A larger
/// factor takes less CPU time and finds room later.
const REST_FACTOR: u32 = 16;
/// Longest wait for a wake-up. Longer frees the slots that handlers left later.
const IDLE: Duration = Duration::from_millis(50);
/// Longest wait for the helper at the end of a round. Longer delays other programs behind a slow
/// helper.
const HELPER_PATIENCE: Duration = Duration::from_millis(5);
/// Longest wait for a gate. Longer delays other programs behind one whose messages take long to read.
const GATE_PATIENCE: Duration = Duration::from_millis(10);

/// The reclaimer thread.
pub(crate) struct Reclaimer {
    group: Arc<Group>,
    scratch: Scratch,
    buffer: Vec<Page>,
    oldest: Vec<(StageIndex, VirtualPage)>,
    /// Serves deferred faults and puts pages back.
    service: FaultService,
    /// Rounds that went to `sibling_ranges` since the last proportional choice.
    sibling_rounds: u32,
    no_progress: NoProgress,
    /// IDs of the address spaces that have no page to take, in this search for room.
    exhausted: Vec<u64>,
    /// Deferred faults of programs whose gate was missed.
    missed: Vec<DeferredFault<AddressSpace>>,
    /// Time before which only faults that wait start another search.
    next_search: Instant,
}

/// A staged page's place, its owner, and the slot in which it was stored.
type StoredPage = (StageIndex, VirtualPage, Slot);

/// Page counts of one round.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    moved: usize,
    stored: usize,
    dropped: usize,
    cow_broken: usize,
    /// Pages put back, because storing them frees too little memory.
    refused: usize,
    /// The program has no page that may be taken.
    exhausted: bool,
}

impl Progress {
    /// Whether memory was freed. Broken COW does not count, because the kernel may refuse to move these
    /// pages again and again.
    fn any(self) -> bool {
        self.moved + self.stored + self.dropped > 0
    }

    fn add(&mut self, settled: Option<Settled>) {
        let settled = settled.unwrap_or_default();
        self.moved += settled.staged;
        self.dropped += settled.dropped;
        self.cow_broken += settled.cow_broken;
    }
}

impl Reclaimer {
    /// The reclaimer of a group.
    pub(crate) fn new(group: Arc<Group>) -> Reclaimer {
        Reclaimer {
            service: FaultService::with_patience(group.clone(), GATE_PATIENCE),
            group,
            scratch: Scratch::new(),
            buffer: vec![[0; PAGE_SIZE]; BATCH],
            oldest: Vec::new(),
            sibling_rounds: 0,
            no_progress: NoProgress::default(),
            exhausted: Vec::new(),
            missed: Vec::new(),
            next_search: Instant::now(),
        }
    }

    /// Runs until the group stops.
    #[cfg(not(simulated))]
    pub(crate) fn run(&mut self) {
        self.group.resources.priority.begin();
        let mut affinity = AffinityFollower::new();
        while !self.group.stopping.load(Ordering::Relaxed) {
            self.wait();
            affinity.follow(&self.group);
            self.reclaim();
        }
    }

    /// Waits for a wake-up, not for long.
    pub(crate) fn wait(&self) {
        let waits_for_gate = !self.missed.is_empty() || self.service.has_unfinished();
        let longest = if waits_for_gate { GATE_PATIENCE } else { IDLE };
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
        self.service.finish_loads();
        let missed = std::mem::take(&mut self.missed);
        self.serve(missed);
        self.reclaim_to_watermark();
        self.group.resources.free_pending();
    }

    fn reclaim_to_watermark(&mut self) {
        let marks = self.watermarks();
        let is_awaited = !self.group.deferred.is_empty();
        let is_above = self.group.resources.resident_bytes() > marks.start;
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
            if self.is_under_pressure(&marks, resident) {
                self.group.resources.priority.note_pressure();
            } else {
                self.group.resources.priority.note_room();
            }
            if resident <= marks.stop || self.group.stopping.load(Ordering::Relaxed) {
                break;
            }
            let Some(space) = self.choose() else {
                self.give_up(false, idle_since.elapsed());
                break;
            };
            let progress = self.round(&space, resident - marks.stop);
            let futile = self
                .group
                .compression
                .note(progress.stored, progress.refused);
            if progress.any() && !futile {
                self.exhausted.clear();
                idle_rounds = 0;
                idle_since = Instant::now();
                continue;
            }
            idle_rounds += 1;
            if progress.exhausted {
                self.exhausted.push(space.id);
            }
            let rounds = REVOLUTIONS * (resident as usize / PAGE_SIZE) / LOOKED_AT;
            // A program needs up to three rounds before the first shared page is moved.
            let turns = 3 * self.group.space_count();
            if futile || idle_rounds > 20 + rounds + turns {
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

    /// Whether programs may soon lack room. Pages that forks share may be copied at any time, without a
    /// userfaultfd fault.
    fn is_under_pressure(&self, marks: &Watermarks, resident: u64) -> bool {
        resident > marks.pressing
            || !self.group.deferred.is_empty()
            || resident + bytes(self.group.resources.shared.pages()) > marks.hard
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
            match self.service.serve(space, fault, Admission::Now) {
                Resolution::GateMissed => {
                    let is_listed = |other: &DeferredFault<_>| deferred.is_same(other);
                    if !self.missed.iter().any(is_listed) {
                        self.missed.push(deferred);
                    }
                    continue;
                }
                Resolution::Retry => wake(space, fault.page, 1),
                Resolution::Done | Resolution::Queued => {}
            }
            let resources = &self.group.resources;
            // Of whatever kind it is, it waited for other pages to go out.
            resources.note_wait(false, deferred.since.elapsed());
        }
    }

    /// Chooses the address space of the next round, in proportion to evictable size.
    fn choose(&mut self) -> Option<Arc<AddressSpace>> {
        let mut spaces = self.group.spaces();
        spaces.retain(|space| !self.exhausted.contains(&space.id));
        // Pages whose COW was broken come first: their copies use more memory until they are paged out.
        let next = most_of(&spaces, |space| &space.clock.cow_broken).or_else(|| {
            // Next are pages whose copies in relatives were paged out, which saves no memory before
            // the originals are paged out, too.
            self.sibling_rounds = (self.sibling_rounds + 1) % SIBLING_ROUNDS;
            let siblings_first = self.sibling_rounds != 0;
            most_of(&spaces, |space| &space.clock.sibling_ranges).filter(|_| siblings_first)
        });
        if next.is_some() {
            return next;
        }
        let mut total = 0;
        let mut best: Option<(i64, Arc<AddressSpace>)> = None;
        // Programs with silent helpers are chosen only if there are no others.
        let (silent, others): (Vec<_>, Vec<_>) = spaces
            .into_iter()
            .filter(|space| can_be_commanded(space))
            .partition(|space| space.is_silent());
        for space in if others.is_empty() { silent } else { others } {
            let unevictable = space.unevictable.pages() as i64;
            let weight = (space.resident_pages() - unevictable).max(1);
            total += weight;
            let credit = space.clock.credit.fetch_add(weight, Ordering::Relaxed) + weight;
            if best.as_ref().is_none_or(|(most, _)| credit > *most) {
                best = Some((credit, space));
            }
        }
        let (_, space) = best?;
        space.clock.credit.fetch_sub(total, Ordering::Relaxed);
        Some(space)
    }

    fn round(&mut self, space: &Arc<AddressSpace>, excess_bytes: u64) -> Progress {
        let mut progress = Progress::default();
        let target = self.command(space, excess_bytes, &mut progress);
        if space.was_gate_missed() {
            return progress;
        }
        #[cfg(not(simulated))]
        self.group.hold_pool_limit(&mut self.scratch);
        let surplus = lock(&space.stage).live().saturating_sub(target);
        (progress.stored, progress.refused) = self.store_staged(space, surplus.min(BATCH));
        let (busy, posted) = {
            let port = lock(&space.helper_port);
            (port.is_busy(), port.posted())
        };
        if busy && !space.channel.wait_done(posted, HELPER_PATIENCE) {
            space.check_stopped();
        } else if busy && let Ok(gate) = space.shared_within(GATE_PATIENCE) {
            progress.add(Batch::settle(space, &gate));
        }
        progress
    }

    /// Settles the batch in flight and posts the next one. Returns the number of pages to keep staged.
    fn command(
        &self,
        space: &Arc<AddressSpace>,
        excess_bytes: u64,
        progress: &mut Progress,
    ) -> usize {
        let target = stage_target(space);
        let excess = (excess_bytes as usize).div_ceil(PAGE_SIZE);
        let is_found = space.look_for_unevictable();
        let Ok(gate) = space.shared_within(GATE_PATIENCE) else {
            space.note_gate_missed();
            return target;
        };
        if is_found {
            space.count_unevictable(&gate);
        }
        progress.add(Batch::settle(space, &gate));
        {
            let mut port = lock(&space.helper_port);
            progress.add(Some(std::mem::take(&mut port.carried)));
            if port.is_busy() {
                return target;
            }
        }
        let staged = lock(&space.stage).live();
        let wanted = (excess + target).saturating_sub(staged).min(BATCH);
        let kept = self.kept_pages(space);
        let now = self.group.resources.seconds();
        let (batch, exhausted) = Batch::plan(space, &gate, (wanted, kept), now);
        progress.exhausted = exhausted && batch.is_empty() && staged == 0;
        let no_victims = wanted > 0 && batch.moves.is_empty();
        if !batch.is_empty() {
            space.unprotect_for_cow_break(&batch.moves);
            if space.resources.carries() {
                // The helper waits for its event to be read.
                space.guard_helper();
            }
            batch.post(space, &gate);
        }
        if no_victims {
            // There may be new mappings to register. Storing all staged pages frees the ring of places.
            space.sampling.rescan.store(true, Ordering::Relaxed);
            return 0;
        }
        target
    }

    /// Number of evictable pages that the hand leaves a program that runs: else reclaim could take each
    /// page before its thread has used it, or before the other pages of an instruction are in.
    fn kept_pages(&self, space: &AddressSpace) -> usize {
        let resources = &self.group.resources;
        let faulted = space.clock.faulted.load(Ordering::Relaxed);
        if resources.seconds().saturating_sub(faulted) > KEPT_SECONDS {
            return 0;
        }
        let limit = resources.resident_limit_bytes() as usize / PAGE_SIZE;
        KEPT.min(limit / KEPT_DIVISOR / self.group.space_count().max(1))
    }

    /// Stores up to `count` of the oldest staged pages. Returns the numbers of stored and of put-back
    /// pages.
    fn store_staged(&mut self, space: &AddressSpace, count: usize) -> (usize, usize) {
        let Some(attached) = space.attached() else {
            return (0, 0);
        };
        lock(&space.stage).oldest(count, &mut self.oldest);
        if self.oldest.is_empty() {
            return (0, 0);
        }
        let pages = self.oldest.iter().map(|(_, page)| *page);
        let mut candidates = DedupCandidates::find(space, pages);
        let group = self.group.clone();
        let yielding = group.resources.priority.yield_to_programs();
        group.resources.free_pending();
        let stored = self.read_and_store(space, attached, &mut candidates);
        drop(yielding);
        candidates.release(&self.group);
        let (stored, refused) = self.split_incompressible(space, stored);
        for (place, page) in &refused {
            self.service.putback(space, *page, *place);
        }
        (self.commit(space, &stored), refused.len())
    }

    /// Separates pages that compress too little, and releases their slots. Pages of programs that
    /// forked are always kept: their COW was broken for page-out, and they are stored once for all
    /// relatives.
    fn split_incompressible(
        &self,
        space: &AddressSpace,
        stored: Vec<StoredPage>,
    ) -> (Vec<StoredPage>, Vec<(StageIndex, VirtualPage)>) {
        let (swap, compression) = (&self.group.resources.swap, &self.group.compression);
        let pays = |(_, _, slot): &StoredPage| compression.pays(|| swap.stored_bytes(*slot));
        if space.fork.forked.load(Ordering::Relaxed) || stored.iter().all(pays) {
            return (stored, Vec::new());
        }
        let (stored, refused): (Vec<_>, Vec<_>) = stored.into_iter().partition(pays);
        let slots: Vec<Slot> = refused.iter().map(|(_, _, slot)| *slot).collect();
        swap.release_bulk(&slots);
        let places = refused.iter().map(|(place, page, _)| (*place, *page));
        (stored, places.collect())
    }

    /// Reads and stores the pages in `oldest`, up to the first failure.
    fn read_and_store(
        &mut self,
        space: &AddressSpace,
        attached: &Attached,
        candidates: &mut DedupCandidates,
    ) -> Vec<StoredPage> {
        let place_of = |(place, _): &(StageIndex, VirtualPage)| space.stage_address(*place);
        let places: Vec<u64> = self.oldest.iter().map(place_of).collect();
        let buffer = &mut self.buffer[..places.len()];
        // A page that was returned meanwhile may be missing from the stage; reading stops there.
        let read = attached
            .inspector
            .copy_out(&places, buffer.as_flattened_mut())
            .unwrap_or(0);
        let mut stored = Vec::with_capacity(read);
        for (index, (place, page)) in self.oldest[..read].iter().enumerate() {
            let contents = &self.buffer[index];
            if let Some(slot) = candidates.take(index, contents, &self.group, &mut self.scratch) {
                stored.push((*place, *page, slot));
                continue;
            }
            match space.store(contents, &mut self.scratch) {
                Ok(slot) => stored.push((*place, *page, slot)),
                Err(_) => {
                    // The page stays in the stage; the swap space counts the cause.
                    self.group.resources.errors.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        stored
    }

    /// Changes stored pages from `Staged` to `Swapped`. A page that was touched or moved meanwhile
    /// keeps its state, and all of them if the gate is not available.
    fn commit(&self, space: &AddressSpace, stored: &[StoredPage]) -> usize {
        let mut unwanted = Vec::new();
        let mut count = 0;
        if let Ok(gate) = space.shared_within(GATE_PATIENCE) {
            for (place, page, slot) in stored {
                let entry = gate.table().entry(*page);
                let sample = lock(&space.stage).sample(*place);
                let shadow = Shadow::new(space.resources.refaults.age(), sample);
                if entry.replace(PageState::Staged(*place), PageState::Swapped(*slot, shadow)) {
                    let now = space.resources.refaults.note_out(*slot);
                    if let Some(list) = sample {
                        lock(&space.clock.replacement).evicted(now, list);
                    }
                    lock(&space.stage).retire(*place);
                    count += 1;
                } else {
                    unwanted.push(*slot);
                }
            }
        } else {
            space.note_gate_missed();
            unwanted.extend(stored.iter().map(|(_, _, slot)| *slot));
        }
        self.group
            .resources
            .counters
            .pages_out
            .fetch_add(count as u64, Ordering::Relaxed);
        self.group.resources.swap.release_bulk(&unwanted);
        count
    }
}

/// Number of pages of a program to keep staged as swap cache, where a touch finds them: a small part of
/// the limit for all programs together.
fn stage_target(space: &AddressSpace) -> usize {
    let group = &space.resources;
    let limit = group.resident_limit_bytes() / PAGE_SIZE as u64;
    let of_all = (limit / 256).clamp(BATCH as u64, 1024);
    let own = space.resident_pages().max(0) as u64;
    let resident = group.charged_pages().max(1);
    (of_all * own / resident).max(STAGED_AT_LEAST) as usize
}

/// Whether a batch can be posted to the program's helper, and may be.
fn can_be_commanded(space: &AddressSpace) -> bool {
    space.attached().is_some()
        && !space.is_dead()
        && !space.is_detached()
        && !space.is_held()
        && !space.is_stopped()
        && !space.is_spared()
        && !space.was_gate_missed()
        && space.is_sealed()
}

/// The address space with the most pages in `list`, among those that can take a batch now.
fn most_of(
    spaces: &[Arc<AddressSpace>],
    list: impl Fn(&AddressSpace) -> &Mutex<Vec<PageRange>>,
) -> Option<Arc<AddressSpace>> {
    let pages = |space: &AddressSpace| -> u64 {
        let ranges = lock(list(space));
        ranges.iter().map(|range| range.pages()).sum()
    };
    let listed = spaces.iter().map(|space| (pages(space), space));
    let (_, most) = listed
        .filter(|(pages, space)| {
            *pages > 0 && can_be_commanded(space) && !lock(&space.helper_port).is_busy()
        })
        .max_by_key(|(pages, _)| *pages)?;
    Some(most.clone())
}
