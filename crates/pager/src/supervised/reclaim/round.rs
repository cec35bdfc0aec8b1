//! One round over one address space: the helper moves the next batch to the stage while this thread compresses an
//! earlier one.
//!
//! 1. settle the batch in flight;
//! 2. post the next batch: free dead places, move the next victims;
//! 3. compress the oldest staged pages, which are not in the posted batch;
//! 4. wait for the helper.

use crate::page::VirtualPage;
use crate::page_state::{PageState, StageIndex};
use crate::replacement::Shadow;
use crate::supervised::fault::service::FaultService;
use crate::supervised::fork::dedup::DedupCandidates;
use crate::supervised::group::Group;
use crate::supervised::kernel::Process;
use crate::supervised::reclaim::batch::{Batch, Settled};
use crate::supervised::reclaim::priority::ReclaimerPriority;
use crate::supervised::space::gate::{GATE_PATIENCE, Inside};
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::lock;
use memfold_swap::{Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use memfold_sys::page_buffer::PageBuffer;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum number of pages moved and compressed in one round. More makes fewer commands and delays
/// deferred faults.
pub(crate) const BATCH: usize = 64;
/// Minimum number of pages of a program that stay staged. More keeps more pages as swap cache and fewer
/// resident.
const STAGED_AT_LEAST: u64 = 16;
/// Number of evictable pages that a program keeps whose threads fault. More lets it run for longer
/// between faults where almost nothing is evictable, and exceeds the limit by more there.
const KEPT: usize = 64;
/// Divisor of the limit: this part of it is kept for all programs together at most.
const KEPT_DIVISOR: usize = 4;
/// Seconds after its last fault for which a program keeps pages. More leaves more to programs that
/// sleep.
const KEPT_SECONDS: u32 = 1;
/// Longest wait for the helper at the end of a round. Longer delays other programs behind a slow
/// helper.
const HELPER_PATIENCE: Duration = Duration::from_millis(5);

/// What a thread works with that reclaims: the reclaimer, or one that helps it.
pub(crate) struct Worker {
    group: Arc<Group>,
    pub scratch: Scratch,
    buffer: PageBuffer,
    oldest: Vec<(StageIndex, VirtualPage)>,
    /// Serves deferred faults and puts pages back.
    pub service: FaultService,
    /// The scheduling priority of a thread that helps; the reclaimer's is the group's.
    priority: Option<Arc<ReclaimerPriority>>,
}

/// A staged page's place, its owner, and the slot in which it was stored.
type StoredPage = (StageIndex, VirtualPage, Slot);

/// Page counts of one round.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Progress {
    moved: usize,
    pub stored: usize,
    dropped: usize,
    cow_broken: usize,
    /// Pages put back, because storing them frees too little memory.
    pub refused: usize,
    /// The program has no page that may be taken.
    pub exhausted: bool,
}

impl Progress {
    /// Whether memory was freed. Broken COW does not count, because the kernel may refuse to move these
    /// pages again and again.
    pub(crate) fn any(self) -> bool {
        self.moved + self.stored + self.dropped > 0
    }

    fn add(&mut self, settled: Option<Settled>) {
        let settled = settled.unwrap_or_default();
        self.moved += settled.staged;
        self.dropped += settled.dropped;
        self.cow_broken += settled.cow_broken;
    }
}

impl Worker {
    /// The reclaimer's, made before its thread starts: it needs mappings, which may fail.
    pub(crate) fn new(group: Arc<Group>) -> io::Result<Worker> {
        Ok(Worker {
            service: FaultService::with_patience(group.clone(), GATE_PATIENCE)?,
            group,
            scratch: Scratch::new(),
            buffer: PageBuffer::new(BATCH)?,
            oldest: Vec::new(),
            priority: None,
        })
    }

    /// That of a thread that helps the reclaimer.
    pub(crate) fn that_helps(
        group: Arc<Group>,
        priority: Arc<ReclaimerPriority>,
    ) -> io::Result<Worker> {
        Ok(Worker {
            priority: Some(priority),
            ..Worker::new(group)?
        })
    }

    /// One round over an address space, of which no other thread has one meanwhile.
    pub(crate) fn round(&mut self, space: &Arc<AddressSpace>, excess_bytes: u64) -> Progress {
        let mut progress = Progress::default();
        let target = self.command(space, excess_bytes, &mut progress);
        if space.was_gate_missed() {
            return progress;
        }
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
        // The next batch takes what this one spared.
        let has_spared = space.clock.spared_all.load(Ordering::Relaxed);
        let no_victims = wanted > 0 && batch.moves.is_empty() && !has_spared;
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
        let own = self.priority.clone();
        let priority = own.as_deref().unwrap_or(&group.resources.priority);
        let yielding = priority.yield_to_programs();
        if own.is_none() {
            group.resources.free_pending();
        }
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
pub(crate) fn can_be_commanded(space: &AddressSpace) -> bool {
    space.attached().is_some()
        && !space.is_dead()
        && !space.is_detached()
        && !space.is_held()
        && !space.is_stopped()
        && !space.is_spared()
        && !space.was_gate_missed()
        && space.is_sealed()
}
