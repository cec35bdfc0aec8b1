//! One program's memory: its page states, what is managed of it, and the way to its helper.
//!
//! **Lock order** (take only downwards): `inheritance` → gate → `mover` → `stage` → `regions`,
//! `windows`, `thread_ends`. `claims_left`, the reclaimer's and the handlers' own locks are leaves.
//! Nobody holds `mover`, `stage`, `regions`, `windows` or `thread_ends` while waiting for the gate or
//! for the helper.

pub mod gate;
pub mod listeners;
pub mod staging;
pub mod stopped;
pub mod table_sweep;

use self::listeners::Listeners;
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{ClaimNumber, PageState};
use crate::page_table::{PageTable, TableUse};
use crate::range_set::Regions;
use crate::supervised::events::recent_remove::Dropped;
use crate::supervised::events::reorder::Order;
use crate::supervised::fault::readahead::sequential::Windows;
use crate::supervised::fork::family::{self, Family};
use crate::supervised::fork::inheritance::Inheritance;
use crate::supervised::fork::shared_estimate::ForkUnderWay;
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::reclaim::stage::Stage;
use crate::supervised::registration::refused::Refused;
use crate::supervised::resources::Resources;
use crate::supervised::space::gate::Gated;
use crate::supervised::space::stopped::Halt;
use crate::supervised::space::table_sweep::Sweep;
use crate::supervised::util::fd_pressure::{self, is_shortage};
use crate::sync::lock;
use memfold_swap::{Charge, Page, Scratch, Slot, SlotRanges, StoreError};
use memfold_sys::guardian::Guarded;
use memfold_sys::port::SharedChannel;
use memfold_sys::process::{Credentials, Inspector};
use memfold_sys::uffd::Uffd;
use memfold_sys::{Errno, PAGE_SIZE};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

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
    pub inspector: Inspector,
    pub arena: Arena,
    /// What the helper may, if the program may have less one day. Looked at when it is first compared.
    pub to_follow: OnceLock<Option<Credentials>>,
}

/// Changes of the mappings that were read and are not applied yet.
#[derive(Default)]
pub struct Changes {
    pub order: Order,
    /// The userfaultfds of forked children, by the number in their change.
    pub forks: HashMap<u64, (OwnedFd, ForkUnderWay)>,
    pub next_fork: u64,
    /// The last read failed.
    pub unreadable: bool,
}

/// See the module.
pub struct AddressSpace {
    pub id: u64,
    uffd: OwnedFd,
    pub channel: Arc<SharedChannel>,
    pub table: Gated<PageTable>,
    pub table_use: Arc<TableUse>,
    pub sweep: Sweep,
    pub regions: Mutex<Regions>,
    pub stage: Mutex<Stage>,
    pub helper_port: Mutex<HelperPort>,
    pub windows: Mutex<Windows>,
    /// Changes that were read and wait for others; locked only inside the gate.
    pub changes: Mutex<Changes>,
    /// Claims of faults that found the program gone.
    claims_left: Mutex<Vec<(VirtualPage, Slot, ClaimNumber)>>,
    /// How often memory was unregistered at the program's request; changes while the gate is held
    /// exclusively.
    pub unregistered: AtomicU32,
    /// What another userfaultfd or the kind of the mapping keeps from being registered.
    pub refused: Mutex<Refused>,
    /// How many claims faults have tried to make.
    pub claims: AtomicU32,
    attached: OnceLock<Attached>,
    /// The process of a child that has no helper yet, or never will.
    seen: OnceLock<Inspector>,
    /// For a forked child, until it was compared with its mappings: what it may have inherited.
    /// Locked before the gate.
    pub inheritance: Mutex<Option<Inheritance>>,
    /// Some of what was inherited is in the swap space.
    pub inherited_stored: AtomicBool,
    /// A forked child whose mappings were not looked at, as nothing depended on it: what the fork wiped
    /// counts as inherited.
    pub uncompared: AtomicBool,
    /// How often `madvise` dropped pages.
    pub removals: AtomicU32,
    /// And which of those were not managed.
    pub dropped: Mutex<Dropped>,
    /// Part of what was inherited is lost: the program must not run on.
    pub lost: AtomicBool,
    /// The program was killed as it cannot be served any more.
    stopped: AtomicBool,
    /// It was to be killed and could not be found.
    not_stopped: AtomicBool,
    /// For an address space made by a fork: the page in which the child looks for its number.
    beacon: Option<VirtualPage>,
    /// What is nowhere but in that page.
    pub(crate) secret: [u8; 16],
    /// What the program is charged for, below the whole run. Its resident pages are what the kernel
    /// said last, and what was added and dropped since.
    charges: memfold_swap::Group,
    /// Pages that stay in memory whatever is done with those around them, in order. A new one is
    /// noted before its range is managed.
    pub thread_ends: Mutex<Arc<[VirtualPage]>>,
    /// The clock hand.
    pub hand: AtomicU64,
    /// How far behind the hand a page that is asked for most likely left just now, in pages.
    pub lately: AtomicU64,
    /// For choosing whom to reclaim from: grows with the resident size, paid when chosen.
    pub credit: AtomicI64,
    /// The helper's socket closed, or there never was one: the space is probed until it is gone.
    pub detached: AtomicBool,
    /// The program has gone, or executes another one.
    left: AtomicBool,
    /// No handler listens, as the gate could not be had, or as that failed: the governor lets them try
    /// again.
    pub set_aside: AtomicBool,
    /// That it failed was said.
    pub said_unheard: AtomicBool,
    pub halt: Halt,
    /// The kernel said that the address space is no more.
    dead: AtomicBool,
    /// Somebody faulted outside what is known to be managed: look at the mappings again.
    pub look_again: AtomicBool,
    /// Made by a fork, or has forked: its pages may be shared.
    pub forked: AtomicBool,
    /// Pages mapped when the kernel was asked last, and when the mappings were looked at last.
    pub mapped: AtomicU64,
    pub mapped_at_look: AtomicU64,
    /// What it shared with a fork's other side when it was last looked at is write-protected.
    pub write_protected: AtomicBool,
    /// The page behind those that were last allowed to be written.
    pub written_to: AtomicU64,
    /// Faults since the governor looked of which it is known what they took out of sharing.
    pub counted_faults: AtomicU64,
    /// The helper's thread, as it calls itself; 0 if there is none.
    pub helper: AtomicU32,
    /// Those with whom they may be.
    pub family: Arc<Family<AddressSpace>>,
    /// When it was made.
    pub born: Instant,
    /// For a child without a helper: it must not outlive the supervisor.
    guarded: OnceLock<Guarded>,
    /// The same where its process is not known.
    held: OnceLock<Guarded>,
    /// When the governor found it detached first.
    pub detached_since: OnceLock<Instant>,
    /// Pages that are no longer shared since the last command and go out next.
    pub unshared: Mutex<Vec<PageRange>>,
    /// Pages that relatives took out of sharing to move them out: here they are to go out, too.
    pub to_follow: Mutex<Vec<PageRange>>,
    /// Resident pages since the mappings were looked at last that no service here brought in, so
    /// that they may lie in mappings that are not managed.
    pub grown_by_itself: AtomicI64,
    /// The handlers that listen, with samples of the CPUs that faults come from.
    pub listeners: Mutex<Listeners>,
    pub resources: Arc<Resources>,
}

impl AddressSpace {
    pub fn new(
        resources: Arc<Resources>,
        id: u64,
        uffd: OwnedFd,
        helper_port: HelperPort,
    ) -> AddressSpace {
        let mut table = Gated::<PageTable>::default();
        let table_use = table.get_mut().used().clone();
        AddressSpace {
            id,
            uffd,
            channel: helper_port.channel().clone(),
            table,
            table_use,
            sweep: Sweep::default(),
            regions: Mutex::default(),
            stage: Mutex::new(Stage::new(0)),
            helper_port: Mutex::new(helper_port),
            windows: Mutex::default(),
            changes: Mutex::default(),
            claims_left: Mutex::default(),
            unregistered: AtomicU32::new(0),
            refused: Mutex::default(),
            claims: AtomicU32::new(0),
            attached: OnceLock::new(),
            seen: OnceLock::new(),
            inheritance: Mutex::default(),
            inherited_stored: AtomicBool::new(false),
            uncompared: AtomicBool::new(false),
            removals: AtomicU32::new(0),
            dropped: Mutex::default(),
            lost: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            not_stopped: AtomicBool::new(false),
            beacon: None,
            secret: [0; 16],
            charges: resources.swap.new_group(resources.swap.root_group()),
            thread_ends: Mutex::new(Arc::from([])),
            hand: AtomicU64::new(0),
            lately: AtomicU64::new(0),
            credit: AtomicI64::new(0),
            // Until the helper is welcomed nobody would notice the end.
            detached: AtomicBool::new(true),
            left: AtomicBool::new(false),
            set_aside: AtomicBool::new(false),
            said_unheard: AtomicBool::new(false),
            halt: Halt::default(),
            dead: AtomicBool::new(false),
            look_again: AtomicBool::new(false),
            forked: AtomicBool::new(false),
            mapped: AtomicU64::new(0),
            mapped_at_look: AtomicU64::new(0),
            write_protected: AtomicBool::new(false),
            written_to: AtomicU64::new(0),
            counted_faults: AtomicU64::new(0),
            helper: AtomicU32::new(0),
            family: Arc::default(),
            born: Instant::now(),
            guarded: OnceLock::new(),
            held: OnceLock::new(),
            detached_since: OnceLock::new(),
            unshared: Mutex::default(),
            to_follow: Mutex::default(),
            grown_by_itself: AtomicI64::new(0),
            listeners: Mutex::default(),
            resources,
        }
    }

    /// Makes this the address space of a forked child: of the family given, its number to be
    /// asked for at that page.
    pub fn of_child(
        mut self,
        family: Arc<Family<AddressSpace>>,
        beacon: Option<VirtualPage>,
    ) -> AddressSpace {
        self.beacon = beacon;
        if beacon.is_some() {
            getrandom::fill(&mut self.secret).expect("the kernel has random numbers");
        }
        self.family = family;
        self.forked = AtomicBool::new(true);
        self
    }

    /// The page in which a child looks for its number, if this is a child's address space.
    pub fn beacon(&self) -> Option<VirtualPage> {
        self.beacon
    }

    /// Whether a fault on `page` is a forked child's question which address space is its own.
    pub fn asks_for_number(&self, page: VirtualPage) -> bool {
        self.beacon == Some(page) && self.attached().is_none()
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
        self.attached.set(attached).is_ok()
    }

    pub fn attached(&self) -> Option<&Attached> {
        self.attached.get()
    }

    /// The way to look into the program's process, if it is known.
    pub fn inspector(&self) -> Option<&Inspector> {
        let attached = self.attached().map(|attached| &attached.inspector);
        attached.or_else(|| self.seen.get())
    }

    /// The pages of a range that are in memory.
    pub fn present(&self, range: PageRange) -> io::Result<Regions> {
        let inspector = self.inspector().ok_or(io::ErrorKind::NotFound)?;
        let (start, end) = (range.start.address(), range.end.address());
        let mut regions = Regions::default();
        for (start, end) in inspector.present(start, end)? {
            regions.add(PageRange::of_addresses(start, end));
        }
        Ok(regions)
    }

    /// Notes which process a child without a helper is.
    pub fn set_seen(&self, inspector: Inspector) {
        // The first is as good as any later one.
        let _ = self.seen.set(inspector);
    }

    /// Whether [`AddressSpace::leave`] was called.
    pub fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    /// Sees to it that who has no helper, or lost it, does not outlive the supervisor and read zeros.
    /// To be tried again where descriptors are short, which passes.
    pub fn guard(&self) {
        let guardian = &self.resources.guardian;
        // Where a helper ended, it is another process that shares the memory.
        let known = self.seen.get().filter(|_| self.attached().is_none());
        let (place, guarded) = match known {
            _ if self.guarded.get().is_some() => return,
            Some(inspector) => {
                let handle = inspector.handle();
                (
                    &self.guarded,
                    handle.and_then(|handle| guardian.guard(handle)),
                )
            }
            None if self.held.get().is_some() => return,
            None => {
                let uffd = self.uffd.try_clone();
                (&self.held, uffd.and_then(|uffd| guardian.hold(uffd)))
            }
        };
        match guarded {
            // The governor alone gets here.
            Ok(guarded) => drop(place.set(guarded)),
            Err(error) if is_shortage(&error) && self.born.elapsed() < fd_pressure::PATIENCE => {}
            Err(error) => {
                self.stop_program(&format!("it cannot be guarded: {error}"));
            }
        }
    }

    /// Ends the helper of a program whose threads ended one by one (`exit` and not `exit_group`): the
    /// kernel would wait for the helper, too, before it tells the parent. It makes the status of who
    /// ends last that of the process. What the main thread ended with is known, and mostly it was the
    /// last.
    pub fn end_with_program(&self) {
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
        self.left.store(true, Ordering::Relaxed);
        self.resources.shared.left(|| {
            let resident = self.resident_pages() as u64;
            self.set_resident_pages(0);
            // What it shared with one other process is that one's alone now.
            if self.forked.load(Ordering::Relaxed) {
                resident
            } else {
                0
            }
        });
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    pub fn set_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// For who waits for the gate: a helper that was killed inside never leaves it.
    pub fn is_dead_or_gone(&self) -> bool {
        if !self.is_dead() && self.is_gone() {
            self.set_dead();
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
    pub fn stop_program(&self, why: &str) -> bool {
        let Some(inspector) = self.inspector() else {
            if !self.not_stopped.swap(true, Ordering::Relaxed) {
                log::error!("a program is to be stopped, but is not found: {why}");
            }
            return false;
        };
        if !self.stopped.swap(true, Ordering::Relaxed) {
            log::error!("a program is stopped: {why}");
            // Fails only if it is gone.
            let _ = inspector.kill(9);
        }
        true
    }

    /// Whether the clock hand went over a page just now: if it is asked for again, then soon after it
    /// left, most likely. (It may have been out since an earlier lap; few are, of those asked for.)
    pub fn left_lately(&self, page: VirtualPage) -> bool {
        let hand = self.hand.load(Ordering::Relaxed);
        hand.wrapping_sub(page.0) <= self.lately.load(Ordering::Relaxed)
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
        let grown = self.grown_by_itself.load(Ordering::Relaxed) + unknown;
        self.grown_by_itself.store(grown.max(0), Ordering::Relaxed);
        if unknown > 0 {
            // Each is a fault of the kernel's that took nothing out of sharing.
            self.counted_faults
                .fetch_add(unknown.unsigned_abs(), Ordering::Relaxed);
        }
        if unknown < 0 && self.forked.load(Ordering::Relaxed) {
            // Unmapped, or the program is gone: what it shared with one other is that one's alone.
            self.resources.shared.lower(unknown.unsigned_abs());
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
        let managed = lock(&self.regions).containing(page).is_some();
        if !managed {
            self.look_again.store(true, Ordering::Relaxed);
        }
        managed
    }

    /// The part of a window around `page` that is in the same managed range: never across the
    /// mapping's end. The one page where nothing is known.
    pub fn clip(&self, page: VirtualPage, window: PageRange) -> PageRange {
        match lock(&self.regions).containing(page) {
            Some(region) => window.intersection(region),
            None => {
                self.look_again.store(true, Ordering::Relaxed);
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
        if let Some(inheritance) = lock(&self.inheritance).take() {
            for slot in inheritance.into_slots() {
                slots.push(slot);
            }
        }
        self.resources.release(slots);
        self.resources.swap.end_group(&self.charges);
    }
}
