//! The governor: watches how large the programs are, and takes their memory under management
//! only when the group comes near its limit. Below that they run at native speed.

use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::PageState;
use crate::range_set::RangeSet;
use crate::supervised::fault::handler::{Handlers, Messages};
use crate::supervised::fault::message::Served;
use crate::supervised::fault::primitives::wake;
use crate::supervised::fault::server::Server;
use crate::supervised::fork::shared_counter::SharingWatch;
use crate::supervised::group::{Group, Watermarks};
use crate::supervised::reclaim::affinity::AffinityFollower;
use crate::supervised::registration::vma_scan::VmaScan;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::lock;
use memfold_sys::thread::{self, Standing};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use traced::Tracing;
use unregister::Unregistering;

mod recall;
mod traced;
mod unregister;

/// How often it is looked for programs of which only the helper is left: the look at a program takes
/// longer than that at its size.
const ENDS: Duration = Duration::from_millis(100);
/// New mappings of so many pages are worth a look.
const REMAPPED_TO_LOOK_PAGES: u64 = 16;
/// Programs smaller than this are left alone.
const SMALLEST_PROGRAM_PAGES: i64 = 128;
/// Memory that a program is taken to touch at most, in bytes a second.
const FASTEST_GROWTH: u64 = 8 << 30;
/// A forked child that has no helper by now is taken to have none for good.
const HELPERLESS: Duration = Duration::from_millis(250);
/// A program whose helper ended and that is still there by now has another process in its memory.
const OUTLIVED: Duration = Duration::from_millis(50);
const SHORTEST_TICK: Duration = Duration::from_millis(1);
const LONGEST_TICK: Duration = Duration::from_millis(20);
/// Resident memory that nobody here filled in and that makes it worth to look at the mappings again.
const GROWTH_TO_LOOK_PAGES: i64 = 256;
/// How long taking over waits for a gate before another turn.
const GATE_PATIENCE: Duration = Duration::from_millis(5);

/// The governor's thread.
pub struct Governor {
    group: Arc<Group>,
    handlers: Arc<Handlers>,
    server: Server,
    sharing: SharingWatch,
    /// When it was last looked for programs that only their helper keeps.
    looked_for_ends: Instant,
    unregistering: Unregistering,
    tracing: Tracing,
}

impl Governor {
    pub fn new(group: Arc<Group>, handlers: Arc<Handlers>) -> Governor {
        Governor {
            server: Server::new(group.clone()),
            group,
            handlers,
            sharing: SharingWatch::default(),
            looked_for_ends: Instant::now(),
            unregistering: Unregistering::default(),
            tracing: Tracing::default(),
        }
    }

    /// Runs until the group stops.
    pub fn run(&mut self) {
        thread::set_timer_slack(50_000);
        // Late, it lets programs outgrow the limit before they are managed.
        thread::set_standing(thread::current_id(), Standing::Before);
        let mut affinity = AffinityFollower::new();
        let mut looked = Instant::now();
        while !self.group.stopping.load(Ordering::Relaxed) {
            affinity.follow(&self.group);
            let nap = self.tick();
            std::thread::sleep(nap);
            let pause = looked.elapsed().saturating_sub(nap).as_nanos() as u64;
            let longest = &self.group.resources.counters.longest_pause_ns;
            longest.fetch_max(pause, Ordering::Relaxed);
            looked = Instant::now();
        }
    }

    /// Samples, registers what is due, and says how long to sleep.
    fn tick(&mut self) -> Duration {
        let spaces = self.group.spaces();
        if self.looked_for_ends.elapsed() >= ENDS {
            self.looked_for_ends = Instant::now();
            for space in &spaces {
                space.end_helper_after_threads();
                space.follow_privileges();
                // Its end is not told where somebody else holds its helper's socket.
                if space.is_gone() {
                    space.life.detach();
                }
            }
        }
        for space in &spaces {
            if space.is_detached() {
                self.probe(space);
            }
            if !space.has_left()
                && let Some(inspector) = space.inspector()
                && let Ok(sizes) = inspector.sizes()
            {
                space.note_resident_pages(sizes.resident_pages);
                space
                    .sampling
                    .mapped
                    .store(sizes.mapped_pages, Ordering::Relaxed);
            }
            if is_without_helper(space) {
                space.guard();
            }
            space.sweep_table();
            if !space.unlistened.load(Ordering::Relaxed) {
                self.handlers.remind(space);
                space.note_listening();
            } else if space.may_retry_listening() {
                space.unlistened.store(false, Ordering::Relaxed);
                // Where that fails it is tried again soon.
                let _ = self.handlers.listen(space);
            }
        }
        let is_awaited = self.unregister_for_programs(&spaces) | self.recall_for_tracers(&spaces);
        self.count_refused(&spaces);
        self.sharing.update(&self.group);
        self.group.refresh_limit();
        self.group.note_peaks();
        let marks = Watermarks::of(self.group.resources.resident_limit_bytes());
        let resident = self.group.resources.resident_bytes();
        let manage_from = manage_from(marks.hard);
        // What forks share may be copied faster than it is taken under management.
        let copied = resident + bytes(self.group.resources.shared.pages());
        if copied >= manage_from {
            for space in &spaces {
                if worth_a_look(space) && !self.unregistering.is_pending(space) {
                    self.take_over(space);
                }
            }
            for space in &spaces {
                space.protect_shared();
            }
            if resident > marks.pressing {
                self.group.resources.wake_reclaimer_under_pressure();
            } else if resident > marks.start {
                self.group.resources.wake_reclaimer();
            }
        }
        if is_awaited {
            return SHORTEST_TICK;
        }
        let room = if copied < manage_from {
            manage_from - copied
        } else {
            marks.hard.saturating_sub(resident) / 4
        };
        let micros = room.saturating_mul(1_000_000) / FASTEST_GROWTH;
        Duration::from_micros(micros).clamp(SHORTEST_TICK, LONGEST_TICK)
    }

    /// An address space without a helper tells nobody when it goes: ask the kernel.
    fn probe(&self, space: &Arc<AddressSpace>) {
        if space.is_gone() {
            space.life.die();
            // Whoever told may not have come to it, and others may hold it for a while.
            space.leave();
            self.handlers.forget(space);
            self.group.remove_space(space.id);
        }
    }

    /// Registers the mappings of a program that are not yet, whole, and notes what is resident.
    fn take_over(&mut self, space: &Arc<AddressSpace>) {
        let Some(attached) = space.attached() else {
            return;
        };
        space.sampling.rescan.store(false, Ordering::Relaxed);
        space.sampling.grown_by_itself.store(0, Ordering::Relaxed);
        space.sampling.mapped_at_scan.store(
            space.sampling.mapped.load(Ordering::Relaxed),
            Ordering::Relaxed,
        );
        let Ok(survey) = VmaScan::of(space, attached) else {
            return;
        };
        *lock(&space.thread_ends) = survey.thread_ends.as_slice().into();
        if survey.fresh.is_empty() {
            return;
        }
        if lock(&space.refused).is_any_new(&survey.fresh) {
            let now = self.group.resources.milliseconds();
            self.group.found_mappings.store(now, Ordering::Relaxed);
        }
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            space.sampling.rescan.store(true, Ordering::Relaxed);
            return;
        };
        // Events that are on their way must not be applied to what is registered now.
        let messages = self.handlers.read_messages(space, &mut gate);
        if !self.register(space, &gate, attached, &survey) {
            space.sampling.rescan.store(true, Ordering::Relaxed);
        }
        drop(gate);
        self.take_in(space, messages);
    }

    /// Does what was read along with events, after the gate was left.
    fn take_in(&mut self, space: &Arc<AddressSpace>, messages: Messages) {
        for child in &messages.children {
            // Reported by the handler's next read otherwise; here it is this thread's to do.
            let _ = self.handlers.listen(child);
        }
        for (fault, thread) in messages.faults {
            let admission = space.admission_of(thread);
            if self.server.serve(space, fault, admission) == Served::Retry {
                wake(space, fault.page, 1);
            }
        }
    }

    /// Registers mappings; the gate is held exclusively. `false` if they are to be looked at again.
    ///
    /// Only what is registered, and has been since before its pages were looked for, may count as
    /// managed: a page that is moved out of memory that is not registered is a page lost, as the
    /// kernel itself fills the hole that it leaves. The kernel registers what there is of a range,
    /// and gaps fill without an event: the survey may be of another time. So afterwards it is asked
    /// whether all of the range is one registered mapping. Only events could have made and unmade
    /// that in between, so no change may be under way then.
    ///
    /// Nor may one be before: a fork that has copied the mappings already, but whose event is not
    /// there to be read yet, would make a child of which the page states say that it is managed and
    /// the kernel that it is not.
    ///
    /// What was registered and does not count stays so, as something else may have moved there by
    /// now; what is not in `regions` is never moved out, and its faults are served like any other.
    fn register(
        &self,
        space: &AddressSpace,
        gate: &Exclusive<'_>,
        attached: &Attached,
        survey: &VmaScan,
    ) -> bool {
        if space.is_changing() {
            return false;
        }
        let uffd = space.uffd();
        if lock(&space.managed).ranges().is_empty()
            && uffd
                .register(attached.arena.beacon.address(), bytes(1))
                .is_err()
        {
            return false;
        }
        let mut found = Vec::new();
        let mut complete = true;
        for range in &survey.fresh {
            if !is_still_mapped(attached, *range) {
                complete = false;
                continue;
            }
            for part in lock(&space.managed).uncovered(*range) {
                let (start, length) = (part.start.address(), bytes(part.pages()));
                // The mapping may be gone or be another by now: then it is looked at again later.
                if uffd.register_protectable(start, length).is_err() {
                    lock(&space.refused).note(part);
                    continue;
                }
                match space.present(part) {
                    Ok(present) if uffd.is_registered(start, length) => found.push((part, present)),
                    _ => complete = false,
                }
            }
        }
        if space.is_changing() {
            return false;
        }
        for (part, present) in found {
            for piece in survey.guards.uncovered(part) {
                note_present(space, gate, piece, &present);
                lock(&space.managed).add(piece);
                space.protect_new(piece);
            }
        }
        complete
    }
}

/// Whether a range is all in one mapping yet, as far as the kernel tells. To register a part of another
/// would divide that one for a moment, in which the program cannot move it as one (`mremap`).
fn is_still_mapped(attached: &Attached, range: PageRange) -> bool {
    match attached.inspector.mapping_at(range.start.address()) {
        Ok(Some((start, end))) => start <= range.start.address() && range.end.address() <= end,
        Ok(None) => false,
        Err(_) => true,
    }
}

/// Notes which pages of a range are there already.
fn note_present(space: &AddressSpace, gate: &Exclusive<'_>, piece: PageRange, present: &RangeSet) {
    let note = |range: PageRange, state: PageState| {
        for page in range.start.0..range.end.0 {
            let entry = gate.table().entry(VirtualPage(page));
            entry.replace(PageState::Hole, state);
        }
    };
    let present = present.covered(piece);
    if let Some((ranges, removal)) =
        lock(&space.removed.unmanaged).pending(space.resources.seconds())
    {
        let about_to_go = present.iter().flat_map(|range| ranges.covered(*range));
        about_to_go.for_each(|range| note(range, PageState::Removed(removal)));
    }
    let state = PageState::Resident {
        skips: 0,
        shared: space.fork.forked.load(Ordering::Relaxed),
    };
    present.into_iter().for_each(|range| note(range, state));
}

/// Whether nobody would tell a program that the supervisor is gone: it never had a helper, or lost it
/// and is still there, as another process shares its memory.
fn is_without_helper(space: &AddressSpace) -> bool {
    if space.attached().is_none() {
        return space.orphan.born.elapsed() > HELPERLESS;
    }
    space.is_detached()
        && !space.is_dead()
        && space
            .orphan
            .detached_since
            .get_or_init(Instant::now)
            .elapsed()
            > OUTLIVED
}

/// From how many resident bytes on programs are managed: three quarters of the limit, or less where
/// the rest would be touched before the governor looks again.
fn manage_from(limit: u64) -> u64 {
    const HEADROOM: u64 = 16 << 20;
    (limit / 4 * 3)
        .min(limit.saturating_sub(HEADROOM))
        .max(limit / 4)
}

fn worth_a_look(space: &AddressSpace) -> bool {
    // At the limit a program is as large as ever, however much of it lies in new mappings.
    let mapped = space.sampling.mapped.load(Ordering::Relaxed);
    let remapped = mapped.abs_diff(space.sampling.mapped_at_scan.load(Ordering::Relaxed));
    space.attached().is_some()
        && !space.is_dead()
        && !space.is_detached()
        && space.resident_pages() >= SMALLEST_PROGRAM_PAGES
        && (space.sampling.grown_by_itself.load(Ordering::Relaxed) >= GROWTH_TO_LOOK_PAGES
            || remapped >= REMAPPED_TO_LOOK_PAGES
            || space.sampling.rescan.load(Ordering::Relaxed))
}
