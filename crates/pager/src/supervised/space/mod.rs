//! One program's memory: its page states, what is managed of it, and the way to its helper.
//!
//! **Lock order** (take only downwards): `inheritance` → gate → `mover` → `stage` → `regions`,
//! `windows`, `thread_ends`. `claims_left`, the reclaimer's and the handlers' own locks are leaves.
//! Nobody holds `mover`, `stage`, `regions`, `windows` or `thread_ends` while waiting for the gate or
//! for the helper.

pub mod clock;
pub mod cow;
pub mod fork_state;
pub mod gate;
pub mod life;
pub mod listeners;
pub mod orphan;
pub mod removals;
pub mod sampling;
pub mod staging;
pub mod stopped;
pub mod table_sweep;

use self::clock::Clock;
use self::cow::CowProtection;
use self::fork_state::ForkState;
use self::life::{Kill, Life, Phase};
use self::listeners::Listeners;
use self::orphan::Orphan;
use self::removals::Removals;
use self::sampling::Sampling;
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{ClaimNumber, PageState};
use crate::page_table::{PageTable, TableUse};
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Order;
use crate::supervised::fault::readahead::sequential::Windows;
use crate::supervised::fork::family;
use crate::supervised::fork::shared_estimate::PendingFork;
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::reclaim::stage::Stage;
use crate::supervised::registration::refused::Refused;
use crate::supervised::resources::Resources;
use crate::supervised::space::gate::Gated;
use crate::supervised::space::stopped::StopState;
use crate::supervised::space::table_sweep::Sweep;
use crate::sync::lock;
use memfold_swap::{Charge, Page, Scratch, Slot, SlotRanges, StoreError};
use memfold_sys::port::SharedChannel;
use memfold_sys::process::{Credentials, Inspector};
use memfold_sys::uffd::Uffd;
use memfold_sys::{Errno, PAGE_SIZE};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Where a helper's own memory lies in the program.
#[derive(Debug, Clone, Copy)]
pub struct Arena {
    /// All of it: never managed.
    pub whole: PageRange,
    /// The stage.
    pub stage: PageRange,
    /// The page that children read.
    pub beacon: VirtualPage,
}

/// What is known once the helper has said hello.
pub struct Attached {
    pub inspector: Arc<Inspector>,
    pub arena: Arena,
    /// What the helper may, if the program may have less one day. Looked at when it is first compared.
    pub to_follow: OnceLock<Option<Credentials>>,
}

/// Changes of the mappings that were read and are not applied yet.
#[derive(Default)]
pub struct Changes {
    pub order: Order,
    /// The userfaultfds of forked children, by the number in their change.
    pub forks: HashMap<u64, (OwnedFd, PendingFork)>,
    pub next_fork: u64,
    /// The last read failed.
    pub unreadable: bool,
}

/// One program's memory: identity, page states behind the gate, and the parts that its folder's files
/// describe. Atomics in all parts are hints (Relaxed) unless said otherwise: what they announce is
/// published by the gate or a mutex.
pub struct AddressSpace {
    pub id: u64,
    uffd: OwnedFd,
    pub channel: Arc<SharedChannel>,
    pub resources: Arc<Resources>,
    /// What the program is charged for, below the whole run. The resident pages are those of the
    /// kernel's last answer, and what was added and dropped since.
    charges: memfold_swap::Group,
    pub table: Gated<PageTable>,
    pub table_use: Arc<TableUse>,
    pub sweep: Sweep,
    /// Managed ranges.
    pub managed: Mutex<RangeSet>,
    /// Pages that stay in memory whatever is done with those around them, in order. A new one is
    /// noted before its range is managed.
    pub thread_ends: Mutex<Arc<[VirtualPage]>>,
    pub stage: Mutex<Stage>,
    pub helper_port: Mutex<HelperPort>,
    /// The helper's thread, as it calls itself; 0 if there is none.
    pub helper: AtomicU32,
    attached: OnceLock<Attached>,
    /// The process of a child that has no helper yet, or never will.
    seen: Mutex<Option<Arc<Inspector>>>,
    pub listeners: Mutex<Listeners>,
    /// No handler listens, as the gate could not be had or that failed: the governor lets them try again.
    pub unlistened: AtomicBool,
    /// That it failed was logged.
    pub warned_unlistened: AtomicBool,
    pub windows: Mutex<Windows>,
    /// How many claims faults have tried to make.
    pub claims: AtomicU32,
    /// Claims of faults that found the program gone.
    claims_left: Mutex<Vec<(VirtualPage, Slot, ClaimNumber)>>,
    /// Changes that were read and wait for others; locked only inside the gate.
    pub changes: Mutex<Changes>,
    pub removed: Removals,
    /// How often memory was unregistered at the program's request; changes while the gate is held
    /// exclusively.
    pub unregistered: AtomicU32,
    /// What another userfaultfd or the kind of the mapping keeps from being registered.
    pub refused: Mutex<Refused>,
    pub life: Life,
    pub orphan: Orphan,
    pub stop: StopState,
    pub fork: ForkState<AddressSpace>,
    pub cow: CowProtection,
    pub clock: Clock,
    pub sampling: Sampling,
}

impl AddressSpace {
    /// The address space of an executed program, or of a forked child with its `fork` state.
    pub fn new(
        resources: Arc<Resources>,
        id: u64,
        (uffd, helper_port): (OwnedFd, HelperPort),
        fork: ForkState<AddressSpace>,
    ) -> AddressSpace {
        let mut table = Gated::<PageTable>::default();
        let table_use = table.get_mut().used().clone();
        AddressSpace {
            id,
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
            seen: Mutex::default(),
            listeners: Mutex::default(),
            unlistened: AtomicBool::new(false),
            warned_unlistened: AtomicBool::new(false),
            windows: Mutex::default(),
            claims: AtomicU32::new(0),
            claims_left: Mutex::default(),
            changes: Mutex::default(),
            removed: Removals::default(),
            unregistered: AtomicU32::new(0),
            refused: Mutex::default(),
            life: Life::default(),
            orphan: Orphan::default(),
            stop: StopState::default(),
            fork,
            cow: CowProtection::default(),
            clock: Clock::default(),
            sampling: Sampling::default(),
        }
    }

    /// Whether a fault on `page` is a forked child's read of its ID.
    pub fn is_id_request(&self, page: VirtualPage) -> bool {
        self.fork.beacon() == Some(page) && self.attached().is_none()
    }

    pub fn uffd(&self) -> Uffd {
        Uffd(self.uffd.as_raw_fd())
    }

    pub fn uffd_descriptor(&self) -> &OwnedFd {
        &self.uffd
    }

    /// The helper said hello: from now on pages can be moved out.
    pub fn attach(&self, attached: Attached) -> bool {
        *lock(&self.stage) = Stage::new(attached.arena.stage.pages() as usize);
        let is_first = self.attached.set(attached).is_ok();
        // Its descriptors are of no more use.
        lock(&self.seen).take();
        is_first
    }

    pub fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    /// The way to look into the program's process, if it is known.
    pub fn inspector(&self) -> Option<Arc<Inspector>> {
        let attached = self.attached().map(|attached| attached.inspector.clone());
        attached.or_else(|| lock(&self.seen).clone())
    }

    /// The pages of a range that are in memory.
    pub fn present(&self, range: PageRange) -> io::Result<RangeSet> {
        let inspector = self.inspector().ok_or(io::ErrorKind::NotFound)?;
        let (start, end) = (range.start.address(), range.end.address());
        let mut regions = RangeSet::default();
        for (start, end) in inspector.present(start, end)? {
            regions.add(PageRange::of_addresses(start, end));
        }
        Ok(regions)
    }

    /// Notes which process a child without a helper is.
    pub fn set_seen(&self, inspector: Inspector) {
        // The first is as good as any later one.
        lock(&self.seen).get_or_insert_with(|| Arc::new(inspector));
    }

    /// Whether the program exited or executed another one.
    pub fn has_left(&self) -> bool {
        self.life.phase() >= Phase::Left
    }

    /// Ends the helper of a program whose threads ended one by one (`exit` and not `exit_group`): the
    /// kernel would wait for the helper, too, before it tells the parent. It makes the status of who
    /// ends last that of the process. What the main thread ended with is known, and mostly it was the
    /// last.
    pub fn end_helper_after_threads(&self) {
        if !self.has_left()
            && let Some(attached) = self.attached()
            && let Some(status) = attached.inspector.left_to_one()
        {
            self.channel.dismiss_helper(status);
        }
    }

    /// Ends a helper that may more than its program does by now: whoever takes the program over would have
    /// it, too.
    pub fn follow_privileges(&self) {
        let Some(attached) = self.attached().filter(|_| !self.has_left()) else {
            return;
        };
        let privileges = || {
            let of_helper = attached.inspector.credentials().ok();
            of_helper.filter(Credentials::are_privileged)
        };
        let Some(of_helper) = attached.to_follow.get_or_init(privileges) else {
            return;
        };
        let process = attached.inspector.process();
        let of_program = process.credentials(process.pid());
        if of_program.is_ok_and(|now| now != *of_helper) {
            log::info!(
                "process {} gave up privileges: its helper ends, and nothing more of it is moved out",
                process.pid()
            );
            self.channel.dismiss_helper(0);
        }
    }

    /// The program has gone, or executes another one: nothing of it is resident any more.
    pub fn leave(&self) {
        self.life.leave();
        self.resources.shared.remove_space(|| {
            let resident = self.resident_pages() as u64;
            self.set_resident_pages(0);
            // What it shared with one other process is that one's alone now.
            if self.fork.forked.load(Ordering::Relaxed) {
                resident
            } else {
                0
            }
        });
    }

    /// Whether the kernel has released the address space.
    pub fn is_dead(&self) -> bool {
        self.life.phase() == Phase::Dead
    }

    /// Whether no helper's socket is open.
    pub fn is_detached(&self) -> bool {
        self.life.phase() != Phase::Attached
    }

    /// For a thread that waits for the gate: a helper that was killed inside never leaves it.
    pub fn is_dead_or_gone(&self) -> bool {
        if !self.is_dead() && self.is_gone() {
            self.life.die();
        }
        self.is_dead()
    }

    /// Whether the kernel says that the address space is no more.
    pub fn is_gone(&self) -> bool {
        self.uffd().is_gone()
    }

    /// Whether the program is changing its mappings, or has and the event is unread.
    pub fn is_changing(&self) -> bool {
        // The kernel looks for changes before it looks at the range, which is none.
        let asked = self.uffd().zero(1, PAGE_SIZE as u64);
        asked.is_err_and(|partial| partial.errno == Errno::EAGAIN)
    }

    /// Kills the program, which cannot be served any more, and says why. `false` if its process is not
    /// known; it may be by its next fault.
    pub fn kill_program(&self, why: &str) -> bool {
        let Some(inspector) = self.inspector() else {
            if self.life.note_kill(Kill::NotFound) {
                log::error!("cannot kill a program, its PID is unknown: {why}");
            }
            return false;
        };
        if self.life.note_kill(Kill::Sent) {
            log::error!("process {} is killed: {why}", inspector.pid());
            // Fails only if it is gone.
            let _ = inspector.kill(9);
        }
        true
    }

    pub fn resident_pages(&self) -> i64 {
        (self.charges.charged(Charge::Resident) / PAGE_SIZE as u64) as i64
    }

    /// What the program is charged for.
    pub fn charges(&self) -> &memfold_swap::Group {
        &self.charges
    }

    /// Charges the program for what is staged now.
    pub fn note_staged(&self) {
        let stage = lock(&self.stage);
        self.charges.set(Charge::Staged, bytes(stage.live() as u64));
    }

    /// Stores a page of the program's.
    pub fn store(&self, page: &Page, scratch: &mut Scratch) -> Result<Slot, StoreError> {
        self.resources.swap.store_for(&self.charges, page, scratch)
    }

    /// What the kernel says; changes since its look are lost, until the next.
    pub fn set_resident_pages(&self, pages: u64) {
        self.charges.set(Charge::Resident, bytes(pages));
    }

    /// As [`AddressSpace::set_resident_pages`], and notes by how much it is more than was known.
    pub fn note_resident_pages(&self, pages: u64) {
        let unknown = pages as i64 - self.resident_pages();
        // The governor alone gets here.
        let grown = self.sampling.grown_by_itself.load(Ordering::Relaxed) + unknown;
        self.sampling
            .grown_by_itself
            .store(grown.max(0), Ordering::Relaxed);
        if unknown > 0 {
            // Each is a fault of the kernel's that took nothing out of sharing.
            self.sampling
                .counted_faults
                .fetch_add(unknown.unsigned_abs(), Ordering::Relaxed);
        }
        if unknown < 0 && self.fork.forked.load(Ordering::Relaxed) {
            // Unmapped, or the program is gone: what it shared with one other is that one's alone.
            self.resources.shared.lower_at_most(unknown.unsigned_abs());
        }
        self.set_resident_pages(pages);
    }

    pub fn add_resident_pages(&self, pages: i64) {
        let changed = bytes(pages.unsigned_abs());
        if pages > 0 {
            self.charges.charge(Charge::Resident, changed);
        } else {
            self.charges.uncharge(Charge::Resident, changed);
        }
    }

    pub fn metadata_bytes(&self) -> u64 {
        self.table_use.bytes()
    }

    /// Whether a page is in a managed range. If not, the mappings are looked at again soon.
    pub fn is_managed(&self, page: VirtualPage) -> bool {
        let managed = lock(&self.managed).containing(page).is_some();
        if !managed {
            self.sampling.rescan.store(true, Ordering::Relaxed);
        }
        managed
    }

    /// The part of a window around `page` that is in the same managed range: never across the
    /// mapping's end. The one page where nothing is known.
    pub fn clip(&self, page: VirtualPage, window: PageRange) -> PageRange {
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

    /// Leaves claims to the end of the address space. For who may not touch its pages any more, as it
    /// is gone: an event may just be taking them.
    pub fn leave_claims(&self, pages: &[(VirtualPage, Slot)], number: ClaimNumber) {
        let claimed = pages.iter().map(|(page, slot)| (*page, *slot, number));
        lock(&self.claims_left).extend(claimed);
    }

    /// Takes all slots out of the table. For an address space that is no more.
    fn take_slots(&mut self) -> SlotRanges {
        let mut slots = SlotRanges::new();
        let table = self.table.get_mut();
        for (page, slot, number) in lock(&self.claims_left).drain(..) {
            // A claim has one count, whether the table still says so or an event took the page.
            let entry = table.entry(page);
            entry.replace(PageState::Filling(slot, number), PageState::Hole);
            slots.push(slot);
        }
        table.visit(PageTable::everything(), |_, entry| {
            if let PageState::Swapped(slot) | PageState::Filling(slot, _) =
                entry.take(PageState::Hole)
            {
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
        // Whoever filled a page held a reference, so no `Filling` entry is anybody's any more.
        self.leave();
        for (_, (uffd, _)) in lock(&self.changes).forks.drain() {
            // Closed, it would let the child read zeros.
            log::error!(
                "a forked program stands still: its parent ended before the fork could be read in order"
            );
            std::mem::forget(uffd);
        }
        self.set_resident_pages(0);
        self.charges.set(Charge::Staged, 0);
        let mut slots = self.take_slots();
        if let Some(inheritance) = lock(&self.fork.inheritance).take() {
            for slot in inheritance.into_slots() {
                slots.push(slot);
            }
        }
        self.resources.release(slots);
        self.resources.swap.end_group(&self.charges);
    }
}
