//! The governor: samples the programs' sizes, and registers their mappings once the group comes near
//! its limit. Below that, programs run at native speed.

use crate::page::bytes;
use crate::supervised::fault::listen::Handlers;
use crate::supervised::fault::service::FaultService;
use crate::supervised::fork::shared_counter::SharingWatch;
use crate::supervised::group::Group;
use crate::supervised::limit_state::tolerance;
use crate::supervised::reclaim::affinity::AffinityFollower;
use crate::supervised::reclaim::proactive::Proactive;
use crate::supervised::reclaim::watermarks::Watermarks;
use crate::supervised::registration::register::register;
use crate::supervised::registration::vma_scan::VmaScan;
use crate::supervised::space::AddressSpace;
use crate::supervised::util::pace::Pace;
use crate::sync::lock;
use crate::time::Instant;
use cpu_watch::CpuWatch;
use memfold_sys::PAGE_SIZE;
use memfold_sys::thread::{self, Standing};
use messages::MessageService;
use release::Releasing;
use request::Outcome;
use rest::Rest;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use steady::Steady;
use traced::Tracing;
use unregister::Unregistering;
use waiting::Waiting;

mod cpu_watch;
mod messages;
mod recall;
mod release;
mod request;
mod rest;
mod steady;
mod traced;
mod unregister;
mod waiting;

/// Interval of checks for programs of which only the helper is left, and for dropped privileges. These
/// read more of `/proc` than a sample of sizes; a longer interval, as there is for the former where there are many
/// programs ([`Pace`]), delays the exit of such programs.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Checks of the former take so small a part of a CPU: a larger value delays the exit of such programs where there are many.
const EXIT_CHECK_REST: u32 = 400;
/// Change of the mapped pages that triggers a scan. More scans less often and finds new mappings later.
const REMAPPED_TO_SCAN_PAGES: u64 = 16;
/// A change that is smaller than such a part of the resident pages triggers a scan once the last one is
/// [`SMALL_CHANGE_INTERVAL`] ago. A larger divisor scans more often; a smaller one leaves more unmanaged meanwhile.
const SMALL_CHANGE: u64 = 16;
/// In milliseconds, for each [`FEW`] programs, and at most. Longer scans less often programs that map and unmap a little
/// all the time, and leaves that unmanaged for longer.
const SMALL_CHANGE_INTERVAL: u64 = 50;
const LONGEST_SMALL_CHANGE_INTERVAL: u64 = 500;
/// Resident pages below which a program is not managed, unless it may grow suddenly. More leaves more memory unreclaimable.
pub(crate) const SMALLEST_PROGRAM_PAGES: i64 = 128;
/// Private writable pages that a small program, one of many, has mapped at most without being managed. A small shell
/// has half of that. More lets more of them exceed the limit; less registers more that never grow.
pub(crate) const MOST_UNMANAGED_PAGES: u64 = 256;
/// Assumed time in which a program is looked at and registered. A larger value manages many programs earlier.
const REGISTRATION_TIME: Duration = Duration::from_micros(100);
/// Assumed maximum growth of the programs, in bytes per second. A larger value samples more often near
/// the limit.
pub(crate) const FASTEST_GROWTH: u64 = 8 << 30;
/// Age at which a forked child without a helper is taken never to get one. Longer leaves it unguarded
/// for longer.
const HELPERLESS: Duration = Duration::from_millis(250);
/// Time after its helper exited at which a program that still exists is taken to share its memory with
/// another process. Longer leaves that process unguarded for longer.
const OUTLIVED: Duration = Duration::from_millis(50);
/// Least interval at which handlers are reminded of what a failed read left unread, where there are more than `FEW` programs;
/// else each sample reminds them. Longer costs less with many programs, and delays what was not read.
const REMINDER_INTERVAL: Duration = Duration::from_millis(10);
/// Reminders take one part of a CPU in this number at most. More delays what was not read where there are many programs.
const REMINDER_REST: u32 = 100;
pub(crate) const FEW: usize = 8;
/// Bounds of the interval between two samples.
const SHORTEST_TICK: Duration = Duration::from_millis(1);
const LONGEST_TICK: Duration = Duration::from_millis(20);
/// Growth of resident pages by the kernel's own faults that triggers a scan. More scans less often and
/// finds new mappings later.
const GROWTH_TO_SCAN_PAGES: i64 = 256;
/// Longest wait for a gate before the program is left to another tick. Longer delays samples of the
/// others.
const GATE_PATIENCE: Duration = Duration::from_millis(5);

/// The governor thread.
pub(crate) struct Governor {
    group: Arc<Group>,
    handlers: Arc<Handlers>,
    /// Reads events and serves the faults among them; its buffers are also used by recalls.
    messages: MessageService,
    sharing: SharingWatch,
    /// Time of the last check for exits and dropped privileges.
    last_exit_check: Instant,
    /// When all programs are checked for exits by threads.
    thread_exits: Pace,
    /// When handlers are reminded, where there are many programs.
    reminders: Pace,
    /// Time of the last look at the limit.
    last_watch: Instant,
    unregistering: Unregistering,
    /// Steps of these requests that wait for a program.
    waiting: Waiting<Outcome>,
    releasing: Releasing,
    tracing: Tracing,
    rest: Rest,
    steady: Steady,
    /// Number of programs that have come by the last sample.
    came: u64,
    cpu_watch: CpuWatch,
    /// What a program waits for is under way, as of the last sample.
    is_awaited: bool,
    /// A program's messages are not listened to, as of the last sample.
    is_any_unlistened: bool,
    proactive: Option<Proactive>,
}

impl Governor {
    /// The governor of a group, which reclaims proactively or not.
    pub(crate) fn new(
        group: Arc<Group>,
        handlers: Arc<Handlers>,
        is_proactive: bool,
    ) -> io::Result<Governor> {
        Ok(Governor {
            messages: MessageService::new(
                handlers.clone(),
                FaultService::with_patience(group.clone(), GATE_PATIENCE)?,
                GATE_PATIENCE,
            ),
            group,
            handlers,
            sharing: SharingWatch::default(),
            last_exit_check: Instant::now(),
            thread_exits: Pace::new(EXIT_CHECK_INTERVAL, EXIT_CHECK_REST),
            reminders: Pace::new(REMINDER_INTERVAL, REMINDER_REST),
            last_watch: Instant::now(),
            unregistering: Unregistering::default(),
            waiting: Waiting::default(),
            releasing: Releasing::default(),
            tracing: Tracing::default(),
            rest: Rest::default(),
            steady: Steady::default(),
            came: 0,
            cpu_watch: CpuWatch::default(),
            is_awaited: false,
            is_any_unlistened: false,
            proactive: is_proactive.then(Proactive::new),
        })
    }

    /// Runs until the group stops.
    pub(crate) fn run(&mut self) {
        thread::set_timer_slack(50_000);
        // A late sample lets programs outgrow the limit before they are managed: the more so, the more of them run.
        thread::set_standing(thread::current_id(), Standing::First);
        let group = self.group.clone();
        let alarm = group.resources.activity.alarm();
        if let Err(error) = alarm.adopt() {
            log::debug!("waits last to their end: {error}");
        }
        let mut affinity = AffinityFollower::new();
        let mut last = Instant::now();
        let mut resting = None;
        let mut began = thread::cpu_time();
        while !self.group.stopping.load(Ordering::Relaxed) {
            let mut nap = Duration::ZERO;
            if resting.is_none() || self.is_look_needed() {
                affinity.follow(&self.group);
                nap = self.tick();
                // With the wake-up, which may take longer than the look.
                let took = thread::cpu_time().saturating_sub(began);
                resting = self.rest_interval(took);
                if resting.is_none() {
                    nap = self.steady.interval(self.rest.cost(), nap);
                }
            }
            began = thread::cpu_time();
            match resting {
                Some(interval) => {
                    nap = nap.max(interval);
                    if alarm.wait(nap) {
                        self.rest.note_computing();
                    }
                }
                None => nap = self.nap(nap),
            }
            let pause = last.elapsed().saturating_sub(nap).as_nanos() as u64;
            let longest = &self.group.resources.counters.longest_pause_ns;
            longest.fetch_max(pause, Ordering::Relaxed);
            last = Instant::now();
        }
        alarm.disown();
    }

    /// Sleeps until the next look, or until it is due after all. Returns how long it meant to sleep.
    fn nap(&mut self, nap: Duration) -> Duration {
        if !self.steady.is_late() {
            crate::time::sleep(nap);
            return nap;
        }
        let mut slept = Duration::ZERO;
        while slept < nap {
            let slice = SHORTEST_TICK.min(nap.saturating_sub(slept));
            crate::time::sleep(slice);
            slept += slice;
            if self.steady.is_look_needed() || self.has_any_come() {
                break;
            }
        }
        slept
    }

    /// Whether any program came since the last look.
    fn has_any_come(&self) -> bool {
        self.group.resources.programs_come() != self.came
    }

    /// The interval to the next sample if all programs are at rest, after one that took so much CPU time. Below the
    /// size from which programs are managed no message would end the rest.
    fn rest_interval(&mut self, took: Duration) -> Option<Duration> {
        let group = &self.group;
        let is_busy = group.resources.activity.take()
            || copied_bytes(group) < manage_from(group)
            || group.resources.reclaim_target().is_some()
            || !group.deferred.is_empty()
            || self.is_awaited
            || self.tracing.is_any_stopped()
            || self.is_any_unlistened;
        let limit = group.limit();
        let limits = [limit.total_bytes, limit.resident_bytes];
        let tolerated = limits.into_iter().flatten().map(tolerance).min();
        let sizes = (group.resources.resident_bytes(), tolerated.unwrap_or(0));
        let (watch, alarm) = (&mut self.cpu_watch, group.resources.activity.alarm());
        let watch = |time| watch.set(&group.spaces(), alarm, time);
        self.rest.interval(is_busy, sizes, took, watch)
    }

    /// Whether anything may have happened since the last sample, while all programs are at rest.
    fn is_look_needed(&self) -> bool {
        self.group.resources.activity.is_any() || self.rest.is_look_needed()
    }

    /// Samples all programs and registers mappings if needed. Returns the time until the next sample.
    fn tick(&mut self) -> Duration {
        let spaces = self.group.spaces();
        self.steady.begin(spaces.len());
        if self.has_any_come() {
            self.came = self.group.resources.programs_come();
            self.steady.note_change();
        }
        if self.last_exit_check.elapsed() >= EXIT_CHECK_INTERVAL {
            self.last_exit_check = Instant::now();
            if self.thread_exits.is_due(spaces.len()) {
                let each = spaces.iter();
                let ((), took) = thread::cpu_time_of(|| {
                    each.for_each(|space| space.end_helper_after_threads());
                });
                self.thread_exits.note(spaces.len(), took);
            }
            for space in &spaces {
                space.follow_privileges();
                // The socket does not hang up if another process holds a duplicate.
                if space.is_gone() {
                    space.life.detach();
                }
            }
        }
        self.messages.service.finish_loads();
        spaces.iter().for_each(|space| self.sample(space));
        self.remind(&spaces);
        self.handlers.replace_busy();
        let is_awaited = self.unregister_for_programs(&spaces)
            | self.release_programs(&spaces)
            | self.recall_for_tracers(&spaces);
        self.is_awaited = is_awaited;
        self.is_any_unlistened = spaces.iter().any(|space| is_unlistened(space));
        self.count_refused(&spaces);
        self.sharing.update(&self.group);
        self.group.refresh_limit();
        self.group.note_peaks();
        // At rest longer, but the excess may have begun just now.
        let elapsed = self.last_watch.elapsed().min(LONGEST_TICK);
        self.group.watch_limit(elapsed);
        self.last_watch = Instant::now();
        let marks = Watermarks::of(self.group.resources.resident_limit_bytes());
        let resident = self.group.resources.resident_bytes();
        if let Some(proactive) = &mut self.proactive {
            proactive.update(&self.group);
        }
        let requested = self.group.resources.reclaim_target();
        let (copied, manage_from) = (copied_bytes(&self.group), manage_from(&self.group));
        if copied >= manage_from {
            self.register_new(&spaces, copied);
            for space in &spaces {
                space.protect_shared();
            }
            if resident > marks.pressing {
                self.group.resources.wake_reclaimer_under_pressure();
            } else if resident > marks.start.min(requested.unwrap_or(u64::MAX)) {
                self.group.resources.wake_reclaimer();
            }
        }
        if is_awaited || self.is_any_unlistened || copied < manage_from {
            self.steady.note_change();
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

    /// Reminds handlers of what is unread.
    fn remind(&mut self, spaces: &[Arc<AddressSpace>]) {
        let is_due = self.reminders.is_due(spaces.len());
        if spaces.len() > FEW && !is_due {
            return;
        }
        let listened = spaces.iter().filter(|space| !is_unlistened(space));
        let ((), took) = thread::cpu_time_of(|| {
            listened.for_each(|space| self.handlers.remind(space));
        });
        self.reminders.note(spaces.len(), took);
    }

    /// Samples the sizes of a program, and sees to it that it is guarded and listened to.
    fn sample(&self, space: &Arc<AddressSpace>) {
        if space.is_detached() {
            self.probe(space);
        }
        let filling = || space.sampling.filling.load(Ordering::Relaxed);
        let before = filling();
        if space.has_left() {
            // What another process brings in that uses its memory does not count.
            space.set_resident_pages(filling().max(before));
        } else if let Some(inspector) = space.inspector()
            && let Ok(sizes) = inspector.sizes()
        {
            // What is filled meanwhile may be in the sizes or not: until the next sample it counts twice at worst.
            space.note_resident_pages(sizes.resident_pages + filling().max(before));
            space
                .sampling
                .mapped
                .store(sizes.mapped_pages, Ordering::Relaxed);
            let (shared, writable) = (&space.sampling.shared, &space.sampling.writable);
            shared.store(sizes.shared_pages, Ordering::Relaxed);
            writable.store(sizes.writable_pages, Ordering::Relaxed);
        }
        if is_without_helper(space) {
            space.guard();
        }
        space.sweep_table();
        space.watch_removals();
        space.withhold_moved();
        if !is_unlistened(space) {
            space.note_listening();
        } else if space.may_retry_listening() {
            space.unlistened.store(false, Ordering::Relaxed);
            // A failure is retried at a later tick.
            let _ = self.handlers.listen(space);
        }
    }

    /// Asks the kernel whether an address space without a helper is gone, which no socket or event
    /// reports.
    fn probe(&self, space: &Arc<AddressSpace>) {
        if space.is_gone() {
            space.life.die();
            // Uncharge now, because other threads may keep references for a while.
            space.leave();
            self.handlers.forget(space);
            self.group.remove_space(space.id);
        } else if !space.has_left() {
            space.leave_if_ended();
        }
    }

    /// Scans the programs that may have new mappings. `copied`: see [`copied_bytes`].
    fn register_new(&mut self, spaces: &[Arc<AddressSpace>], copied: u64) {
        let limit = self.group.resources.resident_limit_bytes();
        // Programs may also be managed because memory is to be reclaimed below the limit: then small ones are left alone.
        let is_near = copied >= registration_watermark(limit, spaces.len() as u64);
        let suddenly_large = suddenly_large_pages(spaces.len(), limit).filter(|_| is_near);
        for space in spaces {
            let is_pending = self.unregistering.is_pending(space) || self.waiting.has(space.id);
            if needs_scan(space, spaces.len(), suddenly_large) && !is_pending {
                self.register_mappings(space);
            }
        }
    }

    /// Scans the mappings of a program, and registers new ones as a whole.
    fn register_mappings(&mut self, space: &Arc<AddressSpace>) {
        let Some(attached) = space.attached() else {
            return;
        };
        let now = self.group.resources.milliseconds();
        space.sampling.scanned.store(now, Ordering::Relaxed);
        space.sampling.rescan.store(false, Ordering::Relaxed);
        space.sampling.grown_by_itself.store(0, Ordering::Relaxed);
        space.sampling.mapped_at_scan.store(
            space.sampling.mapped.load(Ordering::Relaxed),
            Ordering::Relaxed,
        );
        let mut scan = match VmaScan::of(space, attached) {
            Ok(scan) => scan,
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                space.note_unreadable();
                return;
            }
            Err(_) => {
                // The program may never grow again, and would never be scanned.
                space.sampling.rescan.store(true, Ordering::Relaxed);
                self.steady.note_change();
                return;
            }
        };
        space.set_thread_ends(&scan.thread_ends);
        if scan.unmanaged.is_empty() {
            return;
        }
        if lock(&space.refused).is_any_new(&scan.unmanaged) {
            let now = self.group.resources.milliseconds();
            self.group.found_mappings.store(now, Ordering::Relaxed);
            self.steady.note_change();
        }
        // What was withheld, where forks are prepared, is checked by the changes since.
        let mut withheld_at = None;
        if self.group.resources.prepares_forks() {
            if !space.may_withhold_more() {
                return;
            }
            withheld_at = Some(space.prepared.watch());
            if space.withhold_unmanaged(&mut scan.unmanaged) {
                space.sampling.rescan.store(true, Ordering::Relaxed);
            }
        }
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            space.sampling.rescan.store(true, Ordering::Relaxed);
            return;
        };
        // Pending events first: they must not be applied to mappings registered now.
        let Some(messages) = self.messages.read_pending_events(space, &mut gate) else {
            space.sampling.rescan.store(true, Ordering::Relaxed);
            return;
        };
        // What was withheld may be elsewhere, and others mapped there.
        let is_withheld = withheld_at.is_none_or(|changes| {
            let unmanaged = &mut scan.unmanaged;
            space.prepared.retain_withheld(unmanaged, changes)
        });
        if !register(space, &gate, attached, &scan) || !is_withheld {
            space.sampling.rescan.store(true, Ordering::Relaxed);
        }
        drop(gate);
        self.messages.serve(space, messages);
    }
}

/// Whether a program's messages are not listened to.
fn is_unlistened(space: &AddressSpace) -> bool {
    space.unlistened.load(Ordering::Relaxed)
}

/// Whether no helper would kill the program when the supervisor dies: it never had a helper, or its
/// helper exited while another process shares its memory.
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

/// Resident bytes that the group may grow by before its programs are managed.
#[cfg(not(simulated))]
pub(crate) fn room_before_managing(group: &Group) -> u64 {
    manage_from(group).saturating_sub(copied_bytes(group))
}

/// Resident bytes with all that is shared copied: that may be faster than what is copied can be registered.
fn copied_bytes(group: &Group) -> u64 {
    let resources = &group.resources;
    resources.resident_bytes() + bytes(resources.shared.pages())
}

/// Resident bytes of the group from which programs are managed; none where memory is to be reclaimed below the limit.
fn manage_from(group: &Group) -> u64 {
    if group.resources.reclaim_target().is_some() {
        return 0;
    }
    let limit = group.resources.resident_limit_bytes();
    registration_watermark(limit, group.space_count() as u64)
}

/// Resident bytes near a limit: three quarters of it, or less if the rest could be touched before
/// the next sample, and until all programs are registered.
fn registration_watermark(limit: u64, programs: u64) -> u64 {
    const HEADROOM: u64 = 16 << 20;
    const EACH: u64 = FASTEST_GROWTH / 1_000_000 * REGISTRATION_TIME.as_micros() as u64;
    (limit / 4 * 3)
        .min(limit.saturating_sub(HEADROOM + programs * EACH))
        .max(limit / 4)
}

/// Private writable pages from which small programs are managed, too. None up to [`FEW`] programs: they are looked at often
/// enough. Of more, each may touch all that it has mapped before it is looked at, and together they could fill what is left
/// above the size from which programs are managed. At least as many as trigger a scan.
fn suddenly_large_pages(programs: usize, limit: u64) -> Option<u64> {
    if programs <= FEW {
        return None;
    }
    let each = limit / 4 / PAGE_SIZE as u64 / programs as u64;
    Some(each.clamp(REMAPPED_TO_SCAN_PAGES, MOST_UNMANAGED_PAGES))
}

/// Whether the VMAs of a program should be scanned. `programs`: how many there are. `suddenly_large`: see
/// [`suddenly_large_pages`].
fn needs_scan(space: &AddressSpace, programs: usize, suddenly_large: Option<u64>) -> bool {
    let Some(attached) = space.attached() else {
        return false;
    };
    // Under the limit the resident size does not grow, so new mappings show in the mapped size only.
    let mapped = space.sampling.mapped.load(Ordering::Relaxed);
    let remapped = mapped.abs_diff(space.sampling.mapped_at_scan.load(Ordering::Relaxed));
    let resident = space.resident_pages();
    let is_small_program = resident < SMALLEST_PROGRAM_PAGES;
    let writable = space.sampling.writable.load(Ordering::Relaxed);
    let own = writable.saturating_sub(attached.arena.whole.pages());
    let may_grow = suddenly_large.is_some_and(|large| own >= large);
    let small_change = if is_small_program {
        suddenly_large.unwrap_or_default()
    } else {
        resident as u64 / SMALL_CHANGE
    };
    let interval = SMALL_CHANGE_INTERVAL * programs.div_ceil(FEW) as u64;
    let due = space.sampling.scanned.load(Ordering::Relaxed)
        + interval.min(LONGEST_SMALL_CHANGE_INTERVAL);
    let is_small_change = remapped < small_change && space.resources.milliseconds() < due;
    !space.is_dead()
        && !space.is_detached()
        && !space.prepared.released.load(Ordering::Relaxed)
        && !space.sampling.is_unreadable.load(Ordering::Relaxed)
        && (!is_small_program || may_grow)
        && (space.sampling.grown_by_itself.load(Ordering::Relaxed) >= GROWTH_TO_SCAN_PAGES
            || remapped >= REMAPPED_TO_SCAN_PAGES && !is_small_change
            || space.sampling.rescan.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn many_programs_are_managed_earlier() {
        assert_eq!(registration_watermark(1024 * MIB, 1), 768 * MIB);
        assert_eq!(
            registration_watermark(1024 * MIB, 200),
            768 * MIB,
            "there is room"
        );
        let many = registration_watermark(160 * MIB, 50);
        assert!(many > 100 * MIB && many < 110 * MIB, "{many}");
        assert_eq!(registration_watermark(160 * MIB, 200), 40 * MIB);
        assert_eq!(registration_watermark(16 * MIB, 1), 4 * MIB);
        assert_eq!(registration_watermark(0, 1), 0);
    }

    #[test]
    fn small_programs_that_may_grow_are_managed_where_there_are_many() {
        assert_eq!(suddenly_large_pages(8, 16 * MIB), None);
        assert_eq!(suddenly_large_pages(9, 160 * MIB), Some(256));
        assert_eq!(suddenly_large_pages(200, 160 * MIB), Some(51));
        assert_eq!(suddenly_large_pages(2000, 16 * MIB), Some(16));
        assert_eq!(suddenly_large_pages(0, 0), None);
    }
}
