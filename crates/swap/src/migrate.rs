//! Migration of pages between tiers, without their owners noticing.
//!
//! A migration takes a count, reads and verifies the page as a load does, stores it in the other
//! tier, and changes the entry. The old data is freed after a grace period. If any step fails, the
//! page stays where it was. Cold pages that left one after the other move into a block together; what
//! is left of a block of which half is gone moves into a new one.
//!
//! One migration runs at a time in a space, so that a page has one mover.

mod blocks;
mod scan;

pub use scan::ScanPolicy;

use zsmalloc::{ObjectWord, PageSource, Relocate};

use crate::{
    PAGE_SIZE,
    config::BlockShape,
    entry::{Entry, Location, Position, TierKind, wrong_entry},
    error::{LoadError, StoreError},
    migrator::Migrator,
    page::Page,
    scratch::Scratch,
    slot::{CLUSTER_SLOTS, ClusterId, Slot},
    space::{Patience, SwapSpace},
    store::STORE_ORDER,
    stored_bytes::StoredBytes,
    sync::{
        MutexGuard,
        atomic::Ordering::{self, Relaxed},
        lock, pause, try_lock,
    },
    tier::{Placed, slot_of},
};

/// Pages moved at once. More make longer writes to the file and take more memory.
const BATCH: usize = 64;
/// The same where they may go to other machines. More share a round trip, with several machines at
/// once.
const REMOTE_BATCH: usize = 256;

/// Times that a load looks whether its page has moved before it waits for all that move with it. The later
/// ones follow after pauses: all together take a tenth of a second.
const MOVING_POLLS: u32 = 200;
/// Times that write-back looks whether loads still wait for the migrator that it has given up. More give them
/// more time to take it, and delay who waits for room.
const PASSING_POLLS: u32 = 110;

/// The outcome of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrateReport {
    /// Slots with a page that were examined.
    pub looked_at: u64,
    /// Pages that were moved.
    pub moved: u64,
    /// Bytes that the moved pages took before.
    pub bytes_before: u64,
    /// Bytes that they take now.
    pub bytes_after: u64,
    /// Pages that could not be read or stored. They stay where they were.
    pub failed: u64,
    /// Why the last of them could not be stored.
    pub store_error: Option<StoreError>,
    /// Whether the migration reached the end of the space.
    pub finished: bool,
}

/// Whether somebody waits for a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Haste {
    /// No thread does. The scan yields the migrator to threads that wait for it.
    Background,
    Wanted,
}

/// Pages to be moved.
#[derive(Clone, Copy)]
struct Chosen<'a> {
    slots: &'a [Slot],
    /// The tiers they are in.
    from: &'a [TierKind],
    /// The tiers to try, in order.
    to: &'a [TierKind],
    haste: Haste,
}

/// A page that is being moved.
struct Moving {
    slot: Slot,
    from: Position,
    /// Index of the buffer it is read into.
    buffer: usize,
}

impl<S: PageSource> SwapSpace<S> {
    /// Moves every page of one tier to the tiers for new pages, while the space is in use: swapoff
    /// without a walk through address spaces. Pages that enter the tier meanwhile may be left.
    /// Same-filled pages stay.
    ///
    /// Stops at the first page without room, which [`store_error`](MigrateReport::store_error)
    /// reports, and when `go_on`, called for each cluster, returns `false`.
    pub fn evacuate(
        &self,
        tier: TierKind,
        scratch: &mut Scratch,
        mut go_on: impl FnMut() -> bool,
    ) -> MigrateReport {
        let mut report = MigrateReport::default();
        if tier == TierKind::SameFilled {
            report.finished = true;
            return report;
        }
        let targets: Vec<_> = STORE_ORDER
            .into_iter()
            .filter(|&kind| kind != tier && self.tiers[kind.index()].is_some())
            .collect();
        let mut cluster = ClusterId(1);
        while !self.allocator.is_past_end(cluster) {
            if !go_on() {
                return report;
            }
            let mut migrator = self.wanted_migrator();
            self.allocator.walk(cluster, || {
                let mut slots = std::mem::take(&mut migrator.candidates);
                slots.clear();
                slots.extend(
                    (0..CLUSTER_SLOTS)
                        .map(|index| cluster.slot(index))
                        .filter(|&slot| {
                            let position = self.table.entry(slot).load().position();
                            position.is_some_and(|position| position.tier == tier)
                        }),
                );
                report.looked_at += slots.len() as u64;
                let chosen = Chosen {
                    slots: &slots,
                    from: &[tier],
                    to: &targets,
                    haste: Haste::Wanted,
                };
                self.move_pages(&mut migrator, chosen, scratch, &mut report);
                migrator.candidates = slots;
            });
            if report.store_error.is_some() {
                return report;
            }
            cluster.0 += 1;
        }
        report.finished = true;
        report
    }

    /// Moves the chosen pages to the first tier that accepts them. Their slots may be freed and
    /// reused meanwhile; their clusters stay.
    fn move_pages(
        &self,
        migrator: &mut Migrator,
        chosen: Chosen<'_>,
        scratch: &mut Scratch,
        report: &mut MigrateReport,
    ) {
        if chosen.slots.is_empty() {
            return;
        }
        let batch = if chosen.to.contains(&TierKind::Remote) {
            REMOTE_BATCH
        } else {
            BATCH
        };
        let missing = batch.saturating_sub(migrator.pages.len());
        if migrator.pages.try_reserve_exact(missing).is_err() {
            report.failed += chosen.slots.len() as u64;
            report.store_error = Some(StoreError::NoMemory);
            return;
        }
        if missing > 0 {
            migrator.pages.resize(batch, [0; PAGE_SIZE]);
        }
        for slots in chosen.slots.chunks(batch) {
            if report.store_error.is_some() {
                // The next batch would most likely fail too.
                return;
            }
            if chosen.haste == Haste::Background && self.migrator_wanted.load(Relaxed) > 0 {
                return;
            }
            let mut held = Vec::with_capacity(slots.len());
            let batch = Chosen { slots, ..chosen };
            let moving = self.read_batch(batch, &mut migrator.pages, scratch, &mut held, report);
            let mut retired = Vec::with_capacity(moving.len());
            let moving = if chosen.to == [TierKind::Recompressed] {
                self.store_in_blocks(
                    moving,
                    (&migrator.pages, self.block_shape(chosen.haste)),
                    scratch,
                    &mut retired,
                    report,
                )
            } else {
                moving
            };
            self.store_moving(
                moving,
                &migrator.pages,
                chosen.to,
                scratch,
                &mut retired,
                report,
            );
            if !retired.is_empty() {
                // A load that read an old entry may still read the old data.
                self.grace.wait();
                for kind in TierKind::ALL {
                    let mut locations: Vec<Location> = retired
                        .iter()
                        .filter(|position| position.tier == kind)
                        .map(|position| position.location)
                        .collect();
                    if !locations.is_empty() {
                        self.tier(kind).free(&mut locations);
                    }
                }
            }
            self.release_bulk(&held);
        }
    }

    /// The migrator for what somebody waits for: a scan in the background gives it up after a batch.
    fn wanted_migrator(&self) -> MutexGuard<'_, Migrator> {
        self.migrator_wanted.fetch_add(1, Relaxed);
        let migrator = lock(&self.migrator);
        self.migrator_wanted.fetch_sub(1, Relaxed);
        migrator
    }

    /// Gives the migrator to loads that wait for it, and takes it again.
    fn pass_to_loads<'a>(&'a self, migrator: MutexGuard<'a, Migrator>) -> MutexGuard<'a, Migrator> {
        let are_waiting = || self.loads_waiting.load(Relaxed) > 0;
        if !are_waiting() {
            return migrator;
        }
        drop(migrator);
        // The lock is not fair.
        (0..PASSING_POLLS)
            .take_while(|_| are_waiting())
            .for_each(pause);
        self.wanted_migrator()
    }

    /// Reads a page whose data and annex word do not match, as it is moving, or damaged: again until it has
    /// moved, or, reliably, while no page moves. A move takes little time, but its thread may be preempted;
    /// the batches that follow may take long.
    pub(crate) fn read_beside_moves(
        &self,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
        patience: Patience,
    ) -> Result<Entry, LoadError> {
        let mut polls = 0;
        let migrator = loop {
            match try_lock(&self.migrator) {
                Some(migrator) => break migrator,
                None if polls == MOVING_POLLS => break self.migrator_for_load(),
                None => pause(polls),
            }
            polls += 1;
            let found = self.read(slot, out, scratch, patience);
            if !matches!(found, Err(LoadError::Corrupt { .. })) {
                return found;
            }
        };
        let found = self.read(slot, out, scratch, patience.without_waiting());
        drop(migrator);
        match found {
            Err(LoadError::Tier { .. }) => self.read(slot, out, scratch, patience),
            found => found,
        }
    }

    /// The migrator for a load, for which write-back gives it up, too.
    fn migrator_for_load(&self) -> MutexGuard<'_, Migrator> {
        self.loads_waiting.fetch_add(1, Relaxed);
        let migrator = self.wanted_migrator();
        self.loads_waiting.fetch_sub(1, Relaxed);
        migrator
    }

    fn block_shape(&self, haste: Haste) -> BlockShape {
        match haste {
            Haste::Background => self.blocks_in_background,
            Haste::Wanted => self.blocks_for_room,
        }
    }

    /// Adds a count to each slot that still holds a page, and reads the pages.
    fn read_batch(
        &self,
        chosen: Chosen<'_>,
        pages: &mut [Page],
        scratch: &mut Scratch,
        held: &mut Vec<Slot>,
        report: &mut MigrateReport,
    ) -> Vec<Moving> {
        if chosen.from.contains(&TierKind::Remote) {
            self.prefetch(chosen.slots.iter().copied());
        }
        let mut moving = Vec::with_capacity(chosen.slots.len());
        for &slot in chosen.slots {
            let Some(from) = self.table.entry(slot).try_hold(slot, &self.overflow) else {
                continue;
            };
            held.push(slot);
            // The slot may hold another page by now. A same-filled page must not move to a tier
            // with annex words: its own annex word is read without a check.
            if !chosen.from.contains(&from.tier) {
                continue;
            }
            let buffer = moving.len();
            match self.read(slot, &mut pages[buffer], scratch, Patience::OneTry) {
                Ok(_) => moving.push(Moving { slot, from, buffer }),
                Err(_) => {
                    self.counters.load_failed();
                    report.failed += 1;
                }
            }
        }
        moving
    }

    /// Stores pages in the first tier that accepts them, and changes their entries.
    fn store_moving(
        &self,
        mut moving: Vec<Moving>,
        pages: &[Page],
        targets: &[TierKind],
        scratch: &mut Scratch,
        retired: &mut Vec<Position>,
        report: &mut MigrateReport,
    ) {
        let mut outcomes = Vec::with_capacity(moving.len());
        for (index, &target) in targets.iter().enumerate() {
            // A page that one tier outside of memory cannot store now is offered to the other.
            let has_next = self.outside.contains(&target) && index + 1 < targets.len();
            if moving.is_empty() {
                break;
            }
            let batch: Vec<_> = moving
                .iter()
                .map(|page| (page.slot, &pages[page.buffer]))
                .collect();
            outcomes.clear();
            self.tier(target)
                .store_batch(&batch, scratch, &mut outcomes);
            assert_eq!(
                outcomes.len(),
                batch.len(),
                "the {target} tier returned the wrong number of outcomes"
            );
            let mut declined = Vec::new();
            for (page, outcome) in moving.into_iter().zip(outcomes.drain(..)) {
                let placed = match outcome {
                    Ok(Placed::Declined) => {
                        declined.push(page);
                        continue;
                    }
                    Err(_) if has_next => {
                        declined.push(page);
                        continue;
                    }
                    Ok(Placed::At(location)) => Ok(location),
                    Ok(Placed::WithAnnex(location, word)) => {
                        self.keep_annex(page.slot, target, location, word)
                    }
                    Err(error) => Err(error),
                };
                match placed {
                    Ok(location) => {
                        self.rename(
                            &page,
                            Position {
                                tier: target,
                                location,
                            },
                            retired,
                            report,
                        );
                    }
                    Err(error) => {
                        self.counters.stores_failed(1);
                        report.failed += 1;
                        report.store_error = Some(error);
                    }
                }
            }
            moving = declined;
        }
        // If nothing was gained, the requested tier may take the page as it is, so that it is not
        // tried again.
        for page in moving {
            if let Some(&target) = targets.first()
                && self.tier(target).reads(page.from.tier)
            {
                self.rename_in_place(&page, target);
            }
        }
    }

    /// Stores a tier's annex word for a page that moves there. Until the entry changes, a load that
    /// needs the old word fails and is retried after the move: only pages with a checksum move.
    pub(crate) fn keep_annex(
        &self,
        slot: Slot,
        tier: TierKind,
        location: Location,
        word: u64,
    ) -> Result<Location, StoreError> {
        if let Err(error) = self.allocator.take_annex(slot) {
            self.tier(tier).free(&mut [location]);
            return Err(error);
        }
        self.table.annex(slot).store(word, Ordering::Release);
        Ok(location)
    }

    /// Changes the entry to the new position of a page, if that is a gain.
    fn rename(
        &self,
        page: &Moving,
        to: Position,
        retired: &mut Vec<Position>,
        report: &mut MigrateReport,
    ) {
        let after = self.tier(to.tier).bytes(to.location);
        let before = self.held_bytes(page);
        if to.tier == TierKind::Recompressed && after >= before {
            self.tier(to.tier).free(&mut [to.location]);
            if self.tier(to.tier).reads(page.from.tier) {
                self.rename_in_place(page, to.tier);
            }
            return;
        }
        let from = self.relocate_from(page, |_| to);
        // Only this migration knows the old position now, so it does not change.
        let before = self.tier(from.tier).bytes(from.location);
        self.counters.moved((from.tier, before), (to.tier, after));
        let (mut old, mut new) = (StoredBytes::default(), StoredBytes::default());
        old.add(from.tier, before);
        new.add(to.tier, after);
        {
            let groups = self.groups.read();
            let group = groups.get(self.allocator.group_of(page.slot.cluster()));
            new.charge(group);
            old.uncharge(group);
        }
        retired.push(from);
        report.moved += 1;
        report.bytes_before += before;
        report.bytes_after += after;
    }

    /// Changes the tier in the entry for the same data.
    fn rename_in_place(&self, page: &Moving, tier: TierKind) {
        let from = self.relocate_from(page, |from| Position { tier, ..from });
        let bytes = self.tier(tier).bytes(from.location);
        self.counters.moved((from.tier, bytes), (tier, bytes));
    }

    /// Changes a page's position, following compaction within its tier. Returns the old position.
    fn relocate_from(&self, page: &Moving, to: impl Fn(Position) -> Position) -> Position {
        let cell = self.table.entry(page.slot);
        let mut from = page.from;
        loop {
            if cell.relocate(from, to(from)) {
                return from;
            }
            // The migration holds a count, and no other runs.
            let found = cell.load();
            match found.position() {
                Some(now) if now.tier == from.tier => from = now,
                _ => wrong_entry(page.slot, found, "moving its page"),
            }
        }
    }

    /// Compacts the pool, concurrently with everything else, until `go_on` returns `false`.
    pub fn compact(&self, go_on: impl FnMut() -> bool) -> zsmalloc::CompactReport {
        self.pool.compact(self, go_on)
    }
}

impl<S: PageSource> Relocate for SwapSpace<S> {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        // Each looks up by what would be its name in the object, and finds another word there if it is
        // the other's. An uncompressed page fills its zspage, which is never sparse.
        self.relocate_page(old, new, object) || self.blocks.relocate(old, new, object)
    }
}

impl<S: PageSource> SwapSpace<S> {
    /// Changes the entry of a page in the pool whose object was moved. `false` if there is none.
    fn relocate_page(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        let Some(slot) = slot_of(object).filter(|&slot| self.table.has(slot)) else {
            return false;
        };
        let cell = self.table.entry(slot);
        let (old, new) = (
            Location::from_raw(old.into_raw()),
            Location::from_raw(new.into_raw()),
        );
        [TierKind::Compressed, TierKind::Recompressed]
            .into_iter()
            .any(|tier| {
                let at = |location| Position { tier, location };
                cell.relocate(at(old), at(new))
            })
    }
}
