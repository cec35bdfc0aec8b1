//! One program's memory: its page states, its managed ranges, and the channel to its helper.
//!
//! The lock order is in section 5 of `docs/design.md`.

pub(crate) mod clock;
pub(crate) mod cow;
#[cfg(not(simulated))]
pub(crate) mod departure;
pub(crate) mod fork_state;
pub(crate) mod gate;
pub(crate) mod let_go;
pub(crate) mod life;
pub(crate) mod listeners;
pub(crate) mod orphan;
pub(crate) mod prepared;
pub(crate) mod removals;
pub(crate) mod sampling;
pub(crate) mod sealed;
pub(crate) mod staging;
pub(crate) mod stopped;
pub(crate) mod table_sweep;
pub(crate) mod unevictable;

use self::clock::Clock;
use self::cow::CowProtection;
use self::fork_state::ForkState;
use self::let_go::LetGo;
use self::life::{Kill, Life, Phase};
use self::listeners::Listeners;
use self::orphan::Orphan;
use self::prepared::Prepared;
use self::removals::Removals;
use self::sampling::Sampling;
use self::unevictable::Unevictable;
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{ClaimNumber, PageState};
use crate::page_table::{PageTable, TableUse};
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Order;
use crate::supervised::fault::readahead::sequential::Windows;
use crate::supervised::fork::family;
use crate::supervised::fork::unapplied::UnappliedFork;
use crate::supervised::kernel::{Inspector, Memory, Process, SharedChannel, Userfaultfd};
use crate::supervised::reclaim::batch::{Carried, HelperPort};
use crate::supervised::reclaim::stage::Stage;
use crate::supervised::registration::refused::Refused;
use crate::supervised::resources::Resources;
use crate::supervised::space::gate::Gated;
use crate::supervised::space::stopped::StopState;
use crate::supervised::space::table_sweep::Sweep;
use crate::sync::{Mutex, lock};
use memfold_swap::{Charge, Page, Scratch, Slot, SlotRanges, StoreError};
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::Credentials;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Where the helper's memory lies in the program. Never managed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arena {
    /// The whole arena.
    pub whole: PageRange,
    /// The stage.
    pub stage: PageRange,
    /// The page in which a forked child reads its ID.
    pub beacon: VirtualPage,
}

/// What the helper's hello announced. Set once, by the acceptor; immutable afterwards.
pub(crate) struct Attached {
    /// Access to the program's `/proc` files and memory.
    pub inspector: Arc<Inspector>,
    /// The helper's memory.
    pub arena: Arena,
    /// The helper's credentials at the first comparison, if they are privileged: the helper exits when
    /// the program gives up privileges.
    pub to_follow: OnceLock<Option<Credentials>>,
}

/// Events that were read and not applied yet. Used only inside the exclusive gate.
#[derive(Default)]
pub(crate) struct Changes {
    /// The events, in an order in which each was possible.
    pub order: Order,
    /// Forked children, by the number in [`Change::Fork`](crate::supervised::events::reorder::Change).
    pub forks: HashMap<u64, UnappliedFork>,
    /// The number of the next fork.
    pub next_fork: u64,
    /// A run that the helper carried off, from its event on until all changes of other threads are applied: reads in
    /// between may fail.
    pub carried: Option<Carried>,
    /// The last read failed.
    pub unreadable: bool,
}

/// One program's memory: its identity, the page states behind the gate, and one part for each file of
/// this directory. All threads share it.
///
/// Atomics of all parts are hints, with Relaxed accesses unless stated otherwise: the data that they
/// announce is published by the gate or a mutex.
pub(crate) struct AddressSpace {
    /// Unique in the run. A forked child reads it in its beacon.
    pub id: u64,
    /// When it was made, in milliseconds of the run.
    made_at: u64,
    /// What guards a program without a helper. Dropped before `uffd`, which the guardian's list names.
    pub orphan: Orphan,
    uffd: Userfaultfd,
    /// Memory shared with the helper.
    pub channel: Arc<SharedChannel>,
    /// What all address spaces share.
    pub resources: Arc<Resources>,
    /// Charges of the program, a child of the run's group. Resident pages are those of the governor's
    /// last sample, corrected by pages brought in and dropped since.
    charges: memfold_swap::Group,
    /// Page states, accessible inside the gate.
    pub table: Gated<PageTable>,
    /// Memory use of `table`, readable outside the gate.
    pub table_use: Arc<TableUse>,
    /// The governor's progress in freeing empty nodes of `table`.
    pub sweep: Sweep,
    /// Managed ranges.
    pub managed: Mutex<RangeSet>,
    /// Last pages of thread stacks, and what the kernel writes to when a thread that forks goes on, in order. They are never
    /// victims. A page of the former is added before its range becomes managed.
    pub thread_ends: Mutex<Arc<[VirtualPage]>>,
    /// Places of the stage.
    pub stage: Mutex<Stage>,
    /// The supervisor's end of the channel, with the batch in flight.
    pub helper_port: Mutex<HelperPort>,
    /// TID of the helper in its PID namespace; 0 if there is none.
    pub helper: AtomicU32,
    attached: OnceLock<Attached>,
    /// Whether a user detached the program.
    pub let_go: LetGo,
    /// Whether the stage is sealed; read before the first command.
    seal: sealed::Seal,
    /// The process of a forked child that has no helper, or none yet.
    child_process: Mutex<Option<Arc<Inspector>>>,
    /// The handlers that listen to the userfaultfd.
    pub listeners: Mutex<Listeners>,
    /// No handler listens, because the gate was not available or epoll failed; the governor retries.
    pub unlistened: AtomicBool,
    /// The failure to listen was logged.
    pub warned_unlistened: AtomicBool,
    /// Readahead state.
    pub windows: Mutex<Windows>,
    /// Number of claims that faults tried to make.
    pub claims: AtomicU32,
    /// Claims of faults that found the program gone. Drop releases them.
    abandoned_claims: Mutex<Vec<(VirtualPage, Slot, ClaimNumber)>>,
    /// Events that were read and not applied yet. Locked only inside the gate.
    pub changes: Mutex<Changes>,
    /// `madvise` events.
    pub removed: Removals,
    /// Number of times memory was unregistered at the program's request. Changes under the exclusive
    /// gate.
    pub unregistered: AtomicU32,
    /// Ranges that the kernel refuses to register.
    pub refused: Mutex<Refused>,
    /// Lifecycle.
    pub life: Life,
    /// Stops by a signal or a tracer.
    pub stop: StopState,
    /// Relation to the programs that it was forked from or forked.
    pub fork: ForkState<AddressSpace>,
    /// What prepared forks need.
    pub prepared: Prepared,
    /// Write protection of pages that forks share.
    pub cow: CowProtection,
    /// The clock hand.
    pub clock: Clock,
    /// Mappings that the hand skips.
    pub unevictable: Unevictable,
    /// The governor's samples.
    pub sampling: Sampling,
}

impl AddressSpace {
    /// The address space of an executed program, or of a forked child with its `fork` state.
    pub(crate) fn new(
        resources: Arc<Resources>,
        id: u64,
        (uffd, helper_port): (Userfaultfd, HelperPort),
        fork: ForkState<AddressSpace>,
    ) -> AddressSpace {
        let mut table = Gated::<PageTable>::default();
        let table_use = table.get_mut().used().clone();
        let space = AddressSpace {
            id,
            made_at: resources.milliseconds(),
            orphan: Orphan::default(),
            uffd,
            channel: helper_port.channel().clone(),
            charges: resources.swap.new_group(resources.swap.root_group()),
            resources,
            table,
            table_use,
            sweep: Sweep::default(),
            managed: Mutex::default(),
            thread_ends: Mutex::new(Arc::from([])),
            stage: Mutex::new(Stage::new(0)),
            helper_port: Mutex::new(helper_port),
            helper: AtomicU32::new(0),
            attached: OnceLock::new(),
            let_go: LetGo::default(),
            seal: sealed::Seal::default(),
            child_process: Mutex::default(),
            listeners: Mutex::default(),
            unlistened: AtomicBool::new(false),
            warned_unlistened: AtomicBool::new(false),
            windows: Mutex::default(),
            claims: AtomicU32::new(0),
            abandoned_claims: Mutex::default(),
            changes: Mutex::default(),
            removed: Removals::default(),
            unregistered: AtomicU32::new(0),
            refused: Mutex::default(),
            life: Life::default(),
            stop: StopState::default(),
            fork,
            prepared: Prepared::default(),
            cow: CowProtection::default(),
            clock: Clock::default(),
            unevictable: Unevictable::default(),
            sampling: Sampling::default(),
        };
        #[cfg(not(simulated))]
        if let Err(error) = space.hold() {
            // The governor tries again where it matters: if the program has no helper.
            log::debug!("address space {id} is not guarded: {error}");
        }
        space
    }

    /// Whether a fault on `page` is a forked child's read of its ID.
    pub(crate) fn is_id_request(&self, page: VirtualPage) -> bool {
        self.fork.beacon() == Some(page) && self.attached().is_none()
    }

    /// The userfaultfd that the stage and managed ranges are registered with.
    pub(crate) fn uffd(&self) -> &Userfaultfd {
        &self.uffd
    }

    /// Notes the helper's hello: from now on pages can be moved out. `false` if a helper attached
    /// before.
    pub(crate) fn attach(&self, attached: Attached) -> bool {
        *lock(&self.stage) = Stage::new(attached.arena.stage.pages() as usize);
        let is_first = self.attached.set(attached).is_ok();
        // Drop its descriptors.
        lock(&self.child_process).take();
        is_first
    }

    /// What the helper's hello announced, if a helper ever attached.
    pub(crate) fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    /// Access to the program's process, if it is known.
    pub(crate) fn inspector(&self) -> Option<Arc<Inspector>> {
        let attached = self.attached().map(|attached| attached.inspector.clone());
        attached.or_else(|| lock(&self.child_process).clone())
    }

    /// What the ancestors of a child forked now are: this address space, and those of its own that are served yet.
    pub(crate) fn ancestors_of_child(&self, is_served: impl Fn(u64) -> bool) -> Vec<u64> {
        let own = self.fork.ancestors.iter().copied();
        let mut ancestors: Vec<u64> = own.filter(|id| is_served(*id)).collect();
        ancestors.push(self.id);
        ancestors
    }

    /// The pages of a range that are resident (pagemap).
    pub(crate) fn present(&self, range: PageRange) -> io::Result<RangeSet> {
        let inspector = self.inspector().ok_or(io::ErrorKind::NotFound)?;
        inspector.resident(range)
    }

    /// Notes the process of a child without a helper.
    pub(crate) fn set_child_process(&self, inspector: Inspector) {
        // Any later inspector is of the same process.
        lock(&self.child_process).get_or_insert_with(|| Arc::new(inspector));
    }

    /// Whether the program is known to have exited, or to have executed another one.
    pub(crate) fn has_left(&self) -> bool {
        self.life.phase() >= Phase::Left
    }

    /// The program exited or executed another one: nothing of it is resident.
    pub(crate) fn leave(&self) {
        self.life.leave();
        self.resources.shared.remove_space(|| {
            let resident = self.resident_pages() as u64;
            self.set_resident_pages(0);
            // Pages shared with one other process are no longer shared.
            if self.fork.forked.load(Ordering::Relaxed) {
                self.fork.sharing.take_left(resident)
            } else {
                0
            }
        });
    }

    /// Whether the kernel has released the address space.
    pub(crate) fn is_dead(&self) -> bool {
        self.life.phase() == Phase::Dead
    }

    /// Whether no helper's socket is open.
    pub(crate) fn is_detached(&self) -> bool {
        self.life.phase() != Phase::Attached
    }

    /// Whether a wait for the gate is futile: a helper that was killed inside the gate never leaves it.
    pub(crate) fn is_dead_or_gone(&self) -> bool {
        if !self.is_dead() && self.is_gone() {
            self.life.die();
        }
        self.is_dead()
    }

    /// Whether the address space is released. Where its process is known, no lock of the program's is waited for.
    pub(crate) fn is_gone(&self) -> bool {
        let told = self.inspector().and_then(|inspector| inspector.released());
        told.unwrap_or_else(|| self.uffd().is_gone())
    }

    /// Whether a mapping change is in progress or its event is unread (the kernel's `mmap_changing`).
    pub(crate) fn is_changing(&self) -> bool {
        self.uffd.is_changing()
    }

    /// Kills the program, which cannot be served any more, and logs why. `false` if its PID is unknown;
    /// its next fault may reveal it.
    pub(crate) fn kill_program(&self, why: &str) -> bool {
        let Some(inspector) = self.inspector() else {
            if self.life.note_kill(Kill::NotFound) {
                log::error!("cannot kill a program, because its PID is not known yet: {why}");
            }
            return false;
        };
        if self.life.note_kill(Kill::Sent) {
            log::error!("killing process {}: {why}", inspector.pid());
            // Fails only if the process is gone.
            let _ = inspector.kill(9);
        }
        true
    }

    /// Resident pages charged to the program.
    pub(crate) fn resident_pages(&self) -> i64 {
        (self.charges.charged(Charge::Resident) / PAGE_SIZE as u64) as i64
    }

    /// The program's charges.
    pub(crate) fn charges(&self) -> &memfold_swap::Group {
        &self.charges
    }

    /// Updates the charge for staged pages.
    pub(crate) fn note_staged(&self) {
        let stage = lock(&self.stage);
        self.charges.set(Charge::Staged, bytes(stage.live() as u64));
    }

    /// Stores a page, charged to the program.
    pub(crate) fn store(&self, page: &Page, scratch: &mut Scratch) -> Result<Slot, StoreError> {
        self.resources.swap.store_for(&self.charges, page, scratch)
    }

    /// Sets the resident pages to the kernel's count. Changes since the sample are lost until the next
    /// one.
    pub(crate) fn set_resident_pages(&self, pages: u64) {
        self.charges.set(Charge::Resident, bytes(pages));
    }

    /// Sets the resident pages to the governor's sample, and attributes the difference to faults that
    /// the kernel served itself.
    pub(crate) fn note_resident_pages(&self, pages: u64) {
        let unknown = pages as i64 - self.resident_pages();
        // Only the governor calls this, so load and store need not be one operation.
        let grown = self.sampling.grown_by_itself.load(Ordering::Relaxed) + unknown;
        self.sampling
            .grown_by_itself
            .store(grown.max(0), Ordering::Relaxed);
        if unknown > 0 {
            // Each new page was a minor fault that broke no COW.
            self.sampling
                .counted_faults
                .fetch_add(unknown.unsigned_abs(), Ordering::Relaxed);
        }
        if unknown < 0 && self.fork.forked.load(Ordering::Relaxed) {
            // Pages left by munmap or exit; those shared with one other process are no longer shared.
            let left = self.fork.sharing.take_left(unknown.unsigned_abs());
            self.resources.shared.lower_at_most(left);
        }
        self.set_resident_pages(pages);
    }

    /// Adjusts the resident pages by pages that were brought in or dropped.
    pub(crate) fn add_resident_pages(&self, pages: i64) {
        let changed = bytes(pages.unsigned_abs());
        if pages > 0 {
            self.charges.charge(Charge::Resident, changed);
        } else {
            self.charges.uncharge(Charge::Resident, changed);
        }
    }

    /// Charges pages before they are filled.
    pub(crate) fn begin_filling(&self, pages: u64) {
        self.sampling.filling.fetch_add(pages, Ordering::Relaxed);
        self.add_resident_pages(pages as i64);
    }

    /// Of pages that were charged before, `done` are filled.
    pub(crate) fn end_filling(&self, pages: u64, done: u64) {
        if pages != done {
            self.add_resident_pages(done as i64 - pages as i64);
        }
        self.sampling.filling.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Bytes of the page table.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.table_use.bytes()
    }

    /// Whether a page is in a managed range. If not, requests a scan of the mappings.
    pub(crate) fn is_managed(&self, page: VirtualPage) -> bool {
        let managed = lock(&self.managed).containing(page).is_some();
        if !managed {
            self.sampling.rescan.store(true, Ordering::Relaxed);
        }
        managed
    }

    /// The part of `window` in the managed range of `page`, or `page` alone if it is not managed. So no
    /// window crosses the end of a mapping.
    pub(crate) fn clip(&self, page: VirtualPage, window: PageRange) -> PageRange {
        match lock(&self.managed).containing(page) {
            Some(region) => window.intersection(region),
            None => {
                self.sampling.rescan.store(true, Ordering::Relaxed);
                PageRange {
                    start: page,
                    end: page.plus(1),
                }
            }
        }
    }

    /// Leaves claims to be released by Drop. For a fault that cannot enter the gate any more, because
    /// the address space is gone, and so must not change entries that an event may be changing.
    pub(crate) fn abandon_claims(
        &self,
        pages: impl Iterator<Item = (VirtualPage, Slot)>,
        number: ClaimNumber,
    ) {
        let claimed = pages.map(|(page, slot)| (page, slot, number));
        lock(&self.abandoned_claims).extend(claimed);
    }

    /// Takes all slots out of the table, for Drop.
    fn take_slots(&mut self) -> SlotRanges {
        let mut slots = SlotRanges::new();
        let table = self.table.get_mut();
        for (page, slot, number) in lock(&self.abandoned_claims).drain(..) {
            // A claim owns one reference, even if an event has taken its page.
            let entry = table.entry(page);
            entry.replace(PageState::Filling(slot, number), PageState::Hole);
            slots.push(slot);
        }
        table.visit(PageTable::everything(), |_, entry| {
            if let PageState::Swapped(slot, _) | PageState::Filling(slot, _) = entry.load() {
                entry.set(PageState::Hole);
                slots.push(slot);
            }
            true
        });
        slots
    }
}

impl family::Member for AddressSpace {
    fn id(&self) -> u64 {
        self.id
    }

    fn has_left(&self) -> bool {
        self.has_left()
    }

    fn is_dead(&self) -> bool {
        self.is_dead()
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        // A fault in progress holds a reference, so no `Filling` entry belongs to a running fault.
        self.leave();
        for (_, fork) in lock(&self.changes).forks.drain() {
            log::error!(
                "a forked child hangs at its next fault, because its parent exited before the fork event \
                 was applied, and its pages are unknown; kill it"
            );
            fork.leave_waiting();
        }
        self.set_resident_pages(0);
        self.charges.set(Charge::Staged, 0);
        let slots = self.take_slots();
        self.resources.release(slots);
        self.resources.swap.end_group(&self.charges);
    }
}
