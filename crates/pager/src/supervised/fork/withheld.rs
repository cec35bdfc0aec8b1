//! What is withheld from forked children where forks are prepared (`prepared.rs`).
//!
//! The helper sets `MADV_DONTFORK` on a VMA before pages of it may be out, so that no child has memory that is out
//! without memfold, and `MADV_RANDOM`, which is a mark: it shows in the `smaps` of a child that was given the
//! VMA what its parent had registered, wherever it was moved.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside, Shared};
use crate::supervised::util::pace::Pace;
use crate::sync::lock;
use crate::time::Instant;
use memfold_sys::channel::WITHHELD_MOST;
use memfold_sys::process::{InheritedBy, own_filters};
use memfold_sys::{Errno, PAGE_SIZE};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Longest wait for the helper to withhold one range. It answers within microseconds, unless its program is
/// stopped. Longer delays the governor.
const PATIENCE: Duration = Duration::from_millis(10);

/// Looks of the governor at what is kept from children by mistake, for which the kernel walks all page tables, take 1/n of the
/// time. A larger value takes less CPU time, and has forks look for it for longer.
const LOOK_REST: u32 = 50;

/// How often, and how long apart, what a child inherited is tried to be registered where the kernel refuses. More keep
/// its parent's page states still for longer.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);

/// Whether a page of a range is in the swap space.
pub(crate) fn is_any_swapped(gate: &Exclusive<'_>, range: PageRange) -> bool {
    let mut any = false;
    gate.table().visit(range, |_, entry| {
        any = matches!(entry.load(), PageState::Swapped(..));
        !any
    });
    any
}

/// Pages in order, with those of a range.
fn with_pages(pages: &[VirtualPage], range: PageRange) -> Arc<[VirtualPage]> {
    let more = (range.start.0..range.end.0).map(VirtualPage);
    let mut all: Vec<_> = pages.iter().copied().chain(more).collect();
    all.sort_unstable();
    all.dedup();
    all.into()
}

/// How many seccomp filters this process has: it adds none.
static OWN_FILTERS: LazyLock<u32> = LazyLock::new(own_filters);

impl AddressSpace {
    /// Whether a fault is a request of a forking thread.
    pub(crate) fn is_fork_request(&self, page: VirtualPage) -> bool {
        let is_beacon = self
            .attached()
            .is_some_and(|attached| attached.arena.beacon == page);
        is_beacon && self.resources.prepares_forks()
    }

    /// Whether the forking thread's restartable sequence (rseq) is out: the kernel writes there when the thread goes on,
    /// which must need no fault then. It is never a victim from now on, nor protected.
    pub(crate) fn is_fork_thread_out(&self, gate: &Exclusive<'_>) -> bool {
        let pages = self.fork_thread_pages();
        {
            let mut ends = lock(&self.thread_ends);
            *ends = with_pages(&ends, pages);
        }
        for page in pages.start.0..pages.end.0 {
            // Fails where nothing is registered.
            let _ = self
                .uffd()
                .unprotect(PageRange::around(VirtualPage(page), 1));
        }
        is_any_swapped(gate, pages)
    }

    /// Where the thread that forked last says that its sequence is; it may say anything.
    fn fork_thread_pages(&self) -> PageRange {
        /// So much it can keep from being paged out.
        const MOST_BYTES: u64 = 8 * PAGE_SIZE as u64;
        let (start, length) = self.channel.fork_thread();
        let pages = length.min(MOST_BYTES).div_ceil(PAGE_SIZE as u64);
        let start = VirtualPage::containing(start);
        let range = PageRange {
            start,
            end: start.plus(pages),
        };
        range.intersection(PageTable::everything())
    }

    /// Notes the last pages of threads' stacks, and what the thread that forked last needs.
    pub(crate) fn set_thread_ends(&self, ends: &[VirtualPage]) {
        *lock(&self.thread_ends) = with_pages(ends, self.fork_thread_pages());
    }

    /// Whether the program has no seccomp filters but those that this process has: then its children may make the
    /// system calls that a helper needs.
    pub(crate) fn has_our_filters(&self) -> bool {
        let theirs = self.inspector().map(|inspector| inspector.filters());
        theirs.is_some_and(|theirs| theirs.is_ok_and(|theirs| theirs <= *OWN_FILTERS))
    }

    /// From here on the program's threads ask before they fork. Called before its helper is welcomed.
    ///
    /// # Errors
    /// If the beacon cannot be registered.
    pub(crate) fn prepare_forks(&self, beacon: VirtualPage) -> Result<(), Errno> {
        self.channel.set_prepared();
        self.uffd().register(PageRange::around(beacon, 1))
    }

    /// Whether more can be withheld and still be listed for a fork, with what mprotect splits.
    pub(crate) fn may_withhold_more(&self) -> bool {
        lock(&self.prepared.withheld).ranges().len() < WITHHELD_MOST / 2
    }

    /// Has memory that is about to be managed withheld, and leaves out what is not. Returns whether the rest is to be
    /// tried again.
    pub(crate) fn withhold_unmanaged(&self, unmanaged: &mut Vec<PageRange>) -> bool {
        let before = unmanaged.len();
        let changes = self.prepared.changes.load(Ordering::Relaxed);
        let _ = self.register_all(unmanaged);
        let (kept, mixed) = self.kept_by_program(unmanaged);
        let to_withhold: Vec<PageRange> = unmanaged
            .iter()
            .filter(|range| !kept.contains(range) && !mixed.contains(range))
            .copied()
            .collect();
        let failed = self.withhold(&to_withhold, changes);
        unmanaged.retain(|range| !failed.contains(range) && !mixed.contains(range));
        unmanaged.len() != before
    }

    /// Registers ranges, before anything else is looked at: of what moves from here on, an event must tell. What is
    /// registered, but not managed, is never paged out, so a child needs nothing for it. Leaves out what cannot be, and
    /// returns what is to be tried again.
    ///
    /// What counts as managed is registered, or was unmapped, of which the event is unread. What was mapped there since is
    /// left as it is until that is applied: a run that is about to be carried off is settled as what was there before.
    fn register_all(&self, ranges: &mut Vec<PageRange>) -> Vec<PageRange> {
        // The governor looks at each tick, and seldom has any.
        if ranges.is_empty() || Bug::WithheldUnregistered.is_back() {
            return Vec::new();
        }
        let is_wary = !Bug::ManagedRegistered.is_back();
        // No event is applied meanwhile, and nothing becomes managed.
        let gate = is_wary.then(|| self.shared_within(PATIENCE));
        if let Some(Err(_)) = gate {
            return std::mem::take(ranges);
        }
        let mut later = Vec::new();
        ranges.retain(|range| {
            if is_wary && !lock(&self.managed).covered(*range).is_empty() {
                let is_registered = self.uffd().is_registered(*range);
                if !is_registered {
                    later.push(*range);
                }
                return is_registered;
            }
            let is_registered = self.register(*range).is_ok();
            if !is_registered {
                lock(&self.refused).note(*range);
            }
            is_registered
        });
        later
    }

    /// The ranges that the program keeps from its children itself, of those that were not withheld yet, and those of which
    /// it keeps a part. What it keeps is not withheld, nor marked: a prepared fork gives what is withheld.
    fn kept_by_program(&self, ranges: &[PageRange]) -> (Vec<PageRange>, Vec<PageRange>) {
        let withheld = lock(&self.prepared.withheld).clone();
        let doubtful = lock(&self.prepared.doubtful).ranges();
        let is_new = |range: &&PageRange| {
            withheld.covered(**range).is_empty() && doubtful.covered(**range).is_empty()
        };
        let new: Vec<PageRange> = ranges.iter().filter(is_new).copied().collect();
        let Some(inspector) = self.inspector().filter(|_| !new.is_empty()) else {
            return (Vec::new(), Vec::new());
        };
        let areas = match inspector.kept_from_children() {
            Ok(areas) => areas,
            Err(error) => {
                if error.kind() == io::ErrorKind::FileTooLarge {
                    self.note_unreadable();
                }
                // Else it is gone.
                return (Vec::new(), new);
            }
        };
        let mut kept = RangeSet::default();
        for area in areas {
            kept.add(PageRange::of_addresses(area.start, area.end));
        }
        let new = new.into_iter();
        let new = new.filter(|range| !kept.covered(*range).is_empty());
        new.partition(|range| kept.covered(*range) == [*range])
    }

    /// Has the helper withhold ranges from forked children, before they are managed. Returns those that it did not, for
    /// example as a thread forks just now. They are registered, if nothing has changed there since `changes`.
    fn withhold(&self, ranges: &[PageRange], changes: u32) -> Vec<PageRange> {
        let mut failed = Vec::new();
        let began = Instant::now();
        for range in ranges {
            // The governor has others to see to.
            if began.elapsed() > PATIENCE {
                failed.push(*range);
                continue;
            }
            // Before it is asked: a fork that begins meanwhile must list it, and what was mapped there since.
            lock(&self.prepared.doubtful).asked = Some(*range);
            lock(&self.prepared.withheld).add(*range);
            let (start, bytes) = (range.start.address(), range.pages() * PAGE_SIZE as u64);
            let may_have_met_others = match self.channel.withhold(start, bytes, PATIENCE) {
                Ok(()) => {
                    // At once: a fork that begins now has the mark.
                    self.prepared.note_marked(*range, changes);
                    !self.is_unchanged(*range, changes)
                }
                Err(errno) => {
                    failed.push(*range);
                    // As a thread forks, the helper has marked nothing. Else it may yet.
                    errno != Errno::EAGAIN
                }
            };
            let mut doubtful = lock(&self.prepared.doubtful);
            doubtful.asked = None;
            if may_have_met_others {
                doubtful.add(*range);
                self.prepared.astray.store(true, Ordering::Relaxed);
            }
        }
        failed
    }

    /// Whether no mapping of a range has changed since `changes`, so that what was registered then is what was marked.
    fn is_unchanged(&self, range: PageRange, changes: u32) -> bool {
        if Bug::StrayUnnoticed.is_back() {
            return true;
        }
        // A thread that has read an event holds the gate until it is applied.
        let gate = self.shared_within(PATIENCE);
        gate.is_ok() && self.prepared.is_still_withheld(range, changes) && !self.is_changing()
    }

    /// Looks for marked memory that is not known to be withheld, if there may be any. Returns whether some was found: a
    /// fork is to give it, too.
    pub(crate) fn find_stray(&self) -> bool {
        if !self.prepared.astray.load(Ordering::Relaxed) {
            return false;
        }
        let marked = match self.inspector().map(|one| one.inherited(InheritedBy::Mark)) {
            Some(Ok(marked)) => marked,
            Some(Err(error)) if error.kind() == io::ErrorKind::FileTooLarge => {
                // Forks are denied then.
                self.note_unreadable();
                return false;
            }
            // It is gone.
            Some(Err(_)) | None => return false,
        };
        let (mut found, mut moves_unseen) = (false, false);
        let mut withheld = lock(&self.prepared.withheld);
        for area in marked {
            let range = PageRange::of_addresses(area.start, area.end);
            if withheld.covered(range).is_empty() {
                withheld.add(range);
                found = true;
            }
            moves_unseen |= !self.uffd().is_registered(range);
        }
        self.prepared.astray.store(moves_unseen, Ordering::Relaxed);
        found
    }

    /// Whether all changes of mappings so far are applied, as far as the gate can be had within that time. They stay so
    /// while the guard lives, but for those that begin.
    fn settled_within(&self, patience: Duration) -> Option<Shared<'_>> {
        let gate = self.shared_within(patience).ok()?;
        let is_settled = !lock(&self.changes).order.is_waiting() && !self.is_changing();
        is_settled.then_some(gate)
    }

    /// Of what may be kept from children by mistake, what is, and whether it is registered.
    ///
    /// # Errors
    /// If the program is gone.
    fn kept_in(&self, doubtful: &RangeSet) -> io::Result<(RangeSet, RangeSet)> {
        let (mut registered, mut others) = (RangeSet::default(), RangeSet::default());
        let Some(attached) = self.attached().filter(|_| !doubtful.ranges().is_empty()) else {
            return Ok((registered, others));
        };
        let areas = attached.inspector.kept_from_children();
        let areas = areas.inspect_err(|error| {
            if error.kind() == io::ErrorKind::FileTooLarge {
                self.note_unreadable();
            }
        })?;
        for area in areas.iter().filter(|area| !area.is_of_driver) {
            let kept = if area.is_registered {
                &mut registered
            } else {
                &mut others
            };
            for part in doubtful.covered(PageRange::of_addresses(area.start, area.end)) {
                kept.add(part);
            }
        }
        let arena = attached.arena.whole;
        registered.remove(arena);
        others.remove(arena);
        Ok((registered, others))
    }

    /// Gives to children what is kept from them by mistake. Pages of what is not registered are never out.
    fn give_doubtful(&self) {
        let prepared = &self.prepared;
        // Before the changes: a thread that has forked has withheld again what it gave, after the changes that it met.
        let is_detached = self.is_detached();
        if self.channel.is_forking() || (self.channel.is_withholding() && !is_detached) {
            return;
        }
        let Some(gate) = self.settled_within(Duration::ZERO) else {
            return;
        };
        // A fork may have begun before the gate was had.
        if self.channel.is_forking() || self.is_changing() {
            return;
        }
        prepared.beside_fork.store(false, Ordering::Relaxed);
        let doubtful = lock(&prepared.doubtful).ranges();
        // Of a program without a helper only forks can give it, and none of one that is unreadable.
        let is_unreadable = self.sampling.is_unreadable.load(Ordering::Relaxed);
        if doubtful.ranges().is_empty() || is_detached || is_unreadable || !self.may_look() {
            return;
        }
        let changes = prepared.watch();
        drop(gate);
        let began = Instant::now();
        self.give_kept_in(&doubtful, changes);
        prepared.unwatch();
        if let Some(pace) = &mut *lock(&prepared.looks) {
            pace.note(1, began.elapsed());
        }
    }

    /// Whether what is kept from children by mistake may be looked for just now.
    fn may_look(&self) -> bool {
        let mut looks = lock(&self.prepared.looks);
        looks
            .get_or_insert_with(|| Pace::new(Duration::ZERO, LOOK_REST))
            .is_due(1)
    }

    /// The same in these ranges, which are in doubt no more but for where mappings have changed since `changes`.
    fn give_kept_in(&self, doubtful: &RangeSet, changes: u32) {
        let prepared = &self.prepared;
        let Ok((registered, given)) = self.kept_in(doubtful) else {
            return;
        };
        let (began, mut failed) = (Instant::now(), RangeSet::default());
        for range in given.ranges() {
            let (start, bytes) = (range.start.address(), range.pages() * PAGE_SIZE as u64);
            let is_late = began.elapsed() > PATIENCE;
            if is_late || self.channel.give(start, bytes, PATIENCE).is_err() {
                failed.add(*range);
            }
        }
        let gate = self.settled_within(PATIENCE);
        let is_beside_fork = prepared.beside_fork.load(Ordering::Relaxed);
        let changed = prepared.changed_since(changes);
        let changed = changed.filter(|_| gate.is_some() && !is_beside_fork);
        let Some(changed) = changed else {
            // Managed memory may have been given, as its event tells.
            lock(&prepared.doubtful).given.add_all(&given);
            return;
        };
        let as_seen = |set: &RangeSet| -> RangeSet {
            let parts = set.ranges().iter();
            parts.flat_map(|range| changed.uncovered(*range)).collect()
        };
        let (settled, mut settled_given) = (as_seen(doubtful), as_seen(&given));
        let mut still = lock(&prepared.doubtful);
        for range in settled.ranges() {
            still.remove(*range);
        }
        for range in failed.ranges() {
            // The helper may give it yet.
            still.add(*range);
            still.given.add(*range);
            settled_given.remove(*range);
        }
        for range in changed.ranges() {
            let parts = given.covered(*range).into_iter();
            parts.for_each(|part| still.given.add(part));
        }
        drop(still);
        let mut withheld = lock(&prepared.withheld);
        withheld.add_all(&as_seen(&registered));
        for range in settled_given.ranges() {
            withheld.remove(*range);
        }
    }

    /// Gives what is kept from children by mistake, and withholds what was moved while it was given to a child. What
    /// cannot be done now is tried again at the next call.
    pub(crate) fn withhold_moved(&self) {
        let is_doubtful = !lock(&self.prepared.doubtful).ranges().ranges().is_empty();
        if is_doubtful || self.prepared.beside_fork.load(Ordering::Relaxed) {
            self.give_doubtful();
        }
        let regiven = lock(&self.prepared.doubtful).given.clone();
        if lock(&self.prepared.moved).ranges().is_empty() && regiven.ranges().is_empty() {
            return;
        }
        // Before the changes: what the helper gives later may be other memory.
        let is_answered = !self.channel.is_withholding();
        // What is not managed may be about to be, of which an event tells.
        let gate = self.settled_within(PATIENCE);
        let given = std::mem::take(&mut *lock(&self.prepared.moved));
        let changes = self.prepared.changes.load(Ordering::Relaxed);
        // It was registered when it moved; of what was mapped there since see `register_all`.
        let (mut moved, mut unmanaged) = (Vec::new(), Vec::new());
        let managed = lock(&self.managed);
        for range in given.ranges() {
            moved.extend(managed.covered(*range));
            unmanaged.extend(managed.uncovered(*range));
        }
        let is_settled = gate.is_some();
        if is_settled && is_answered {
            // The rest is as it was, and may be a file.
            let parts = regiven.ranges().iter();
            moved.extend(parts.flat_map(|range| managed.covered(*range)));
            lock(&self.prepared.doubtful).given = RangeSet::default();
        }
        drop(managed);
        drop(gate);
        let later = if is_settled {
            self.register_all(&mut unmanaged)
        } else {
            std::mem::take(&mut unmanaged)
        };
        moved.extend(unmanaged);
        let failed = self.withhold(&moved, changes);
        let mut moved = lock(&self.prepared.moved);
        failed
            .into_iter()
            .chain(later)
            .for_each(|range| moved.add(range));
    }

    /// The VMAs that may be withheld, adjacent ones as one, as addresses, and what is kept from
    /// children by mistake: that is looked for where it is not given, as no more of it comes within a fork.
    ///
    /// # Errors
    /// If the program is gone.
    pub(crate) fn withheld_spans(
        &self,
        by_mistake: &mut Option<RangeSet>,
    ) -> io::Result<Vec<(u64, u64)>> {
        let inspector = self.inspector().ok_or(io::ErrorKind::NotFound)?;
        let others = match by_mistake {
            Some(others) => others,
            None => by_mistake.insert(self.kept_by_mistake()?),
        };
        let others = others.ranges().iter();
        let others = others.map(|range| (range.start.address(), range.end.address()));
        let mut withheld = lock(&self.prepared.withheld);
        let (mut known, mut spans) = (RangeSet::default(), Vec::<(u64, u64)>::new());
        if withheld.ranges().is_empty() {
            return Ok(others.collect());
        }
        for area in inspector.vmas()?.iter().filter(|area| area.is_anonymous()) {
            let range = PageRange::of_addresses(area.start, area.end);
            if withheld.covered(range).is_empty() {
                continue;
            }
            known.add(range);
            match spans.last_mut() {
                Some((_, last)) if *last == area.start => *last = area.end,
                _ => spans.push((area.start, area.end)),
            }
        }
        // What was unmapped since is forgotten. (What is moving is where it was, until its event is read.)
        if !self.is_changing() {
            *withheld = known;
        }
        spans.extend(others);
        Ok(spans)
    }

    /// What is kept from children by mistake. What of it is registered is withheld from here on, as far as that is known; else
    /// the governor sees to it.
    fn kept_by_mistake(&self) -> io::Result<RangeSet> {
        let doubtful = lock(&self.prepared.doubtful).ranges();
        let (registered, others) = match self.kept_in(&doubtful) {
            // It does not tell: a child may lack what it should have.
            Err(error) if error.kind() != io::ErrorKind::FileTooLarge && !self.is_gone() => {
                log::debug!("not seen what is kept from children: {error}");
                return Ok(RangeSet::default());
            }
            kept => kept?,
        };
        lock(&self.prepared.withheld).add_all(&registered);
        Ok(others)
    }

    /// Registers what the child of a prepared fork inherited. It stands still until it is welcomed. `false` if a range
    /// cannot be registered: the child must not run, as it would read zeros there.
    pub(crate) fn adopt(&self, range: PageRange) -> bool {
        for _ in 0..TRIES {
            match self.register(range) {
                Ok(()) => {
                    // What was to be protected at the fork was not registered yet.
                    self.protect_new(range);
                    lock(&self.prepared.withheld).add(range);
                    lock(&self.prepared.marked).add(range);
                    return true;
                }
                // The kernel may be short of memory for a moment.
                Err(Errno::ENOMEM) => crate::time::sleep(PAUSE),
                Err(_) => return false,
            }
        }
        false
    }

    /// Lists what a child must withhold itself before it runs on. `false` if that is too much.
    pub(crate) fn list_adopted(&self) -> bool {
        let withheld = lock(&self.prepared.withheld).ranges().to_vec();
        let spans = withheld.iter();
        let spans = spans.map(|range| (range.start.address(), range.end.address()));
        self.channel.list_withheld(0, &spans.collect::<Vec<_>>())
    }
}
