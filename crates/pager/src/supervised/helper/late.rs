//! Programs do without a helper until that is worth it, as most end long before.
//!
//! While the group has room, the library does nothing when a program starts ([`Switch`]). A thread looks at the programs
//! without a helper so often that they cannot use up that room in between, counts what they have in memory, and has the
//! helper of one that has grown started (`inject/late.rs`). Where there is little room, programs start theirs by themselves
//! again, and those without one need less to be worth it. What programs without one have mapped is no room: they may all
//! fill it at once, in less than it takes to start their helpers.
//!
//! What such a program has in memory was never registered, so nothing of it is anywhere else.

use crate::page::bytes;
use crate::supervised::group::Group;
use crate::supervised::helper::candidate::{Candidate, LONG, Need};
use crate::supervised::helper::forked::{self, ForkedChildren};
use crate::supervised::helper::inject::{AttachError, Attacher, Haste};
use crate::supervised::registration::governor::{
    FASTEST_GROWTH, FEW, MOST_UNMANAGED_PAGES, SMALLEST_PROGRAM_PAGES, room_before_managing,
};
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::deadline;
use memfold_sys::hello::{
    ALWAYS_STARTS_AT_ONCE, FORKS_ALONE, STARTS_AT_ONCE, STARTS_LATE, STARTS_LATE_AT, TRACES,
};
use memfold_sys::process::{self, Process, Sizes};
use memfold_sys::thread::{self, Standing};
use memfold_sys::{privilege, tracee};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Resident anonymous pages from which a helper is worth it, while there is room, to a program that has them for a while.
/// More leaves more small programs without one; all of them are managed once there is little room.
const WORTH_PAGES: u64 = 1024;
/// Bounds of the interval between two looks. The group must have room for what programs can touch in the shorter one.
const INTERVALS: [Duration; 2] = [Duration::from_millis(6), Duration::from_millis(100)];
/// The interval in times of what a look takes, so that looks take a fiftieth of a CPU at most.
const REST: u32 = 50;
/// How long a program's command line is waited for, which is its memory. Longer delays the start of others' helpers.
const COMMAND_LINE: Duration = Duration::from_millis(20);
/// Private writable pages that a program without a helper fills at most before one is started. More keeps more room free
/// for programs that map much and use little of it.
const MOST_FILLED_PAGES: u64 = 4096;

/// The programs that have no helper as yet.
#[derive(Debug, Default)]
pub(crate) struct WaitingPrograms {
    waiting_pids: Mutex<Vec<i32>>,
}

impl WaitingPrograms {
    /// Their PIDs when they were last looked at, with those of other processes that are as small.
    pub(crate) fn pids(&self) -> Vec<i32> {
        lock(&self.waiting_pids).clone()
    }
}

/// The word in the library's file by which programs know whether to do without a helper.
#[derive(Debug)]
pub(crate) struct Switch {
    file: File,
    place: u64,
    is_on: AtomicBool,
    /// Programs trace others, so it stays off. Held while the word is written.
    left_off: Mutex<bool>,
    /// Programs may do without a helper while it is off, too. Until a look finds none.
    looks_on: AtomicBool,
}

impl Switch {
    /// Of the file at `library`, in which a rendezvous is at `place`. It is off there.
    pub(crate) fn new(library: &Path, place: usize) -> io::Result<Switch> {
        Ok(Switch {
            file: File::options().write(true).open(library)?,
            place: (place + STARTS_LATE_AT) as u64,
            is_on: AtomicBool::new(false),
            left_off: Mutex::new(false),
            looks_on: AtomicBool::new(false),
        })
    }

    /// Whether programs do without a helper.
    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Notes what a program says in place of why it has no userfaultfds ([`Hello::refused`](memfold_sys::hello::Hello::refused)).
    /// `false` if it is not of what is noted here.
    pub(crate) fn note(&self, said: u64) -> bool {
        match said {
            TRACES => self.leave_off(),
            FORKS_ALONE => self.look_on(),
            _ => return false,
        }
        true
    }

    /// Has all programs start their helper from now on, as this process could not trace those that others trace.
    fn leave_off(&self) {
        let mut left_off = lock(&self.left_off);
        *left_off = true;
        self.write(ALWAYS_STARTS_AT_ONCE);
    }

    /// There are zygotes, which start no helper in what they fork: it is looked for from now on.
    fn look_on(&self) {
        self.looks_on.store(true, Ordering::Relaxed);
    }

    /// If it cannot be set, it stays as it was, and is set at a later look.
    fn set(&self, is_on: bool) {
        let left_off = lock(&self.left_off);
        let is_on = is_on && !*left_off;
        if self.is_on() != is_on {
            self.write(if is_on { STARTS_LATE } else { STARTS_AT_ONCE });
        }
    }

    fn write(&self, word: u32) {
        match self.file.write_all_at(&word.to_ne_bytes(), self.place) {
            Ok(()) => self.is_on.store(word == STARTS_LATE, Ordering::Relaxed),
            Err(error) => log::debug!("the library's file cannot be written: {error}"),
        }
    }
}

/// What became of one.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Started,
    /// It is gone, or a debugger has it.
    Over,
    Waits,
    /// It was just forked. Its memory is its parent's for the most part, or all of it, after a `vfork`, and is counted there.
    Forked,
    /// It cannot have one.
    Failed,
}

/// The thread.
pub(crate) struct LateStarts {
    group: Arc<Group>,
    attacher: Attacher,
    switch: Arc<Switch>,
    waiting: Arc<WaitingPrograms>,
    candidates: HashMap<i32, Candidate>,
    forked: ForkedChildren,
    /// CPU time that a look takes, without the helpers that it starts.
    cost: Duration,
    /// Pages that programs without a helper may fill at once, as of the last look.
    fillable_pages: u64,
    /// The PIDs of the programs without a helper at the last look.
    seen: HashSet<i32>,
    /// The switch was on when the last pass began, or was set on at its end: programs that do without a helper may have
    /// started since the last look.
    was_on: bool,
}

impl LateStarts {
    pub(crate) fn new(
        group: Arc<Group>,
        attacher: Attacher,
        switch: Arc<Switch>,
        waiting: Arc<WaitingPrograms>,
    ) -> LateStarts {
        LateStarts {
            group,
            attacher,
            switch,
            waiting,
            candidates: HashMap::new(),
            forked: ForkedChildren::default(),
            cost: Duration::ZERO,
            fillable_pages: 0,
            seen: HashSet::new(),
            was_on: false,
        }
    }

    /// Runs until the group stops. Where this process may not trace others, programs start their helpers themselves.
    pub(crate) fn run(&mut self) {
        if privilege::give_up_in_thread().is_err() || !tracee::may_trace() {
            return;
        }
        thread::set_timer_slack(50_000);
        // A late look lets programs grow.
        thread::set_standing(thread::current_id(), Standing::Before);
        while !self.group.stopping.load(Ordering::Relaxed) {
            // A tracer may switch it off at any time.
            let is_on = self.switch.is_on();
            let is_any_waiting = !lock(&self.waiting.waiting_pids).is_empty();
            // What is said meanwhile is not lost.
            let looks_on = self.switch.looks_on.swap(false, Ordering::Relaxed);
            let is_needed = self.was_on || is_on || is_any_waiting || looks_on;
            if is_needed {
                self.look();
            }
            if looks_on && !self.seen.is_empty() {
                self.switch.look_on();
            }
            let need = self.need();
            self.forked.look(&self.group, &self.attacher, need);
            let time = self.time_of_room();
            let is_room = self.is_room_for_looks(time);
            self.switch.set(is_room);
            self.was_on = is_on || is_room;
            std::thread::sleep(self.pause(time, is_needed || self.was_on));
        }
    }

    /// How long the programs take to use up a quarter of the room, at the fastest: the rest is for the time that it takes to
    /// start helpers.
    fn time_of_room(&self) -> Duration {
        let room = room_before_managing(&self.group).saturating_sub(bytes(self.fillable_pages));
        let micros = room.saturating_mul(250_000) / FASTEST_GROWTH;
        Duration::from_micros(micros)
    }

    fn pause(&self, time: Duration, is_needed: bool) -> Duration {
        /// Until the first program has its helper, and others may do without. It may never have one.
        const FIRST: Duration = Duration::from_millis(2);
        const FIRST_WITHIN: u64 = 1000;
        let [_, longest] = INTERVALS;
        if self.has_any() && is_needed {
            time.clamp(self.shortest(), longest.max(self.shortest()))
        } else if self.has_any() {
            self.rest()
        } else if self.group.resources.milliseconds() < FIRST_WITHIN {
            FIRST
        } else {
            longest
        }
    }

    /// The pause while no program does without a helper, nor may begin to: until there is room again. Each wake-up of an
    /// idle CPU costs it up to 50 µs.
    fn rest(&self) -> Duration {
        let [_, longest] = INTERVALS;
        let is_any = self.forked.is_any();
        if is_any { forked::INTERVAL } else { longest }
    }

    /// Whether the program that was started first has its helper, which shows that programs can have one.
    fn has_any(&self) -> bool {
        self.group.resources.programs_come() > 0
    }

    fn shortest(&self) -> Duration {
        INTERVALS[0].max(self.cost * REST)
    }

    /// Whether looks can be as frequent as the room asks for.
    fn is_room_for_looks(&self, time: Duration) -> bool {
        let shortest = self.shortest();
        // To begin with there must be more, or a size at the boundary would switch it all the time.
        let needed = if self.switch.is_on() {
            shortest
        } else {
            shortest * 3 / 2
        };
        self.has_any() && time >= needed
    }

    fn look(&mut self) {
        let (programs, mut took) = thread::cpu_time_of(|| self.without_helper());
        let need = self.need();
        let is_many = programs.len() + self.group.space_count() > FEW;
        let is_filled = is_many && self.time_of_room() < INTERVALS[0];
        let seen: HashSet<i32> = programs.iter().map(|(pid, _)| *pid).collect();
        let seen_before = std::mem::replace(&mut self.seen, seen);
        // One that is starting its helper has the arena mapped; most of these are not seen twice.
        let may_be_large = |(pid, sizes): &(i32, Sizes)| {
            is_filled && sizes.writable_pages >= MOST_UNMANAGED_PAGES && seen_before.contains(pid)
        };
        let is_worth = |sizes: &Sizes| sizes.resident_pages >= need.worth;
        let (mut large, small): (Vec<_>, Vec<_>) = programs
            .into_iter()
            .partition(|program| is_worth(&program.1) || may_be_large(program));
        let tried: HashSet<i32> = large.iter().map(|(pid, _)| *pid).collect();
        let all = &self.seen;
        self.candidates.retain(|pid, candidate| {
            tried.contains(pid) || all.contains(pid) && candidate.has_failures()
        });
        // Of a new one it is not known whether it is starting its helper, where it does so by itself.
        let is_known = |pid: &i32| !need.is_little_room || seen_before.contains(pid);
        let has_failed = |pid: &i32| self.candidates.get(pid).is_some_and(Candidate::has_failed);
        let mut found = Found::default();
        for (pid, sizes) in small {
            let is_fillable = is_known(&pid) && !has_failed(&pid) && !self.forked.has(pid);
            found.add(pid, sizes.resident_pages, is_fillable.then_some(&sizes));
        }
        let at_once = need.worth_at_once(large.len() as u64);
        // To start a helper takes milliseconds: first where most can be paged out.
        large.sort_unstable_by_key(|(_, sizes)| Reverse(sizes.resident_pages));
        for (pid, sizes) in large {
            if self.forked.has(pid) {
                found.pids.push(pid);
                continue;
            }
            let starts = sizes.resident_pages >= at_once || may_be_large(&(pid, sizes));
            let (outcome, its) = thread::cpu_time_of(|| self.start(pid, starts));
            if outcome != Outcome::Started {
                took += its;
            }
            match outcome {
                Outcome::Waits => found.add(pid, sizes.resident_pages, Some(&sizes)),
                Outcome::Forked => found.add(pid, 0, Some(&sizes)),
                Outcome::Failed if sizes.resident_pages < need.worth => {
                    found.add(pid, sizes.resident_pages, None);
                }
                Outcome::Started | Outcome::Over | Outcome::Failed => {}
            }
        }
        self.cost = (self.cost * 3 + took) / 4;
        self.group.resources.set_waiting_pages(found.resident_pages);
        self.fillable_pages = found.fillable_pages;
        *lock(&self.waiting.waiting_pids) = found.pids;
    }

    fn without_helper(&self) -> Vec<(i32, Sizes)> {
        let with_helper = self.with_helper();
        let below = process::mostly_below(process::own_id()).into_iter();
        let without_helper = below.filter(|pid| !with_helper.contains(pid));
        let with_sizes = without_helper.map(|pid| Some((pid, process::sizes(pid)?)));
        with_sizes.flatten().collect()
    }

    fn need(&self) -> Need {
        let is_little_room = !self.switch.is_on();
        Need {
            worth: if is_little_room {
                SMALLEST_PROGRAM_PAGES as u64
            } else {
                WORTH_PAGES
            },
            is_little_room,
            room_pages: room_before_managing(&self.group) / PAGE_SIZE as u64,
        }
    }

    /// Processes whose memory is counted elsewhere.
    fn with_helper(&self) -> HashSet<i32> {
        let spaces = self.group.spaces();
        let pid_of = |space: &Arc<AddressSpace>| Some(space.inspector()?.pid());
        let held = spaces.iter().filter(|space| !space.has_left());
        let guardian = self.group.resources.guardian.process();
        held.filter_map(pid_of).chain(guardian).collect()
    }

    fn start(&mut self, pid: i32, at_once: bool) -> Outcome {
        let now = Instant::now();
        let is_new = !self.candidates.contains_key(&pid);
        let candidate = self.candidates.entry(pid);
        let candidate = candidate.or_insert(Candidate::new(now));
        let is_long = now.duration_since(candidate.since) >= LONG;
        // The child of a program that is managed starts its own; most others end or execute one soon.
        if is_new && process::is_fork(pid) {
            return Outcome::Forked;
        }
        if now < candidate.not_before || !(at_once || is_long) {
            return outcome(candidate);
        }
        let haste = if is_long || !self.switch.is_on() {
            Haste::Interrupts
        } else {
            Haste::Waits
        };
        let Ok(process) = Process::open(pid) else {
            return Outcome::Over;
        };
        // Who holds up the look at it is not helped either, for now.
        let look = process.user().ok();
        let look = look
            .and_then(|user| deadline::within(user, COMMAND_LINE, move || process::is_zygote(pid)));
        if look != Some(false) {
            candidate.fail(now);
            return outcome(candidate);
        }
        match self.attacher.start_late(&Arc::new(process), haste) {
            Ok(()) => Outcome::Started,
            Err(AttachError::Held) => Outcome::Over,
            Err(AttachError::Busy | AttachError::Stopped) => Outcome::Waits,
            // It may have executed a program just now.
            Err(error) => {
                log::debug!("no helper is started in process {pid}: {error}");
                candidate.fail(now);
                outcome(candidate)
            }
        }
    }
}

/// What a look has found.
#[derive(Debug, Default)]
struct Found {
    pids: Vec<i32>,
    resident_pages: u64,
    fillable_pages: u64,
}

impl Found {
    /// A program that has no helper as yet. `resident_pages`: those that are not counted elsewhere. `fillable`: its sizes, if
    /// it may fill what it has mapped before it has a helper.
    fn add(&mut self, pid: i32, resident_pages: u64, fillable: Option<&Sizes>) {
        self.pids.push(pid);
        self.resident_pages += resident_pages;
        let fillable = fillable.map_or(0, |sizes| sizes.writable_pages);
        self.fillable_pages += fillable.min(MOST_FILLED_PAGES);
    }
}

fn outcome(candidate: &Candidate) -> Outcome {
    if candidate.has_failed() {
        Outcome::Failed
    } else {
        Outcome::Waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_that_was_left_off_stays_off() {
        let name = format!("memfold-switch-of-{}", process::own_id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, [7; 2 * STARTS_LATE_AT]).unwrap();
        let word = || {
            let at = 3 + STARTS_LATE_AT;
            std::fs::read(&path).unwrap()[at - 1..at + 5].to_vec()
        };
        let switch = Switch::new(&path, 3).unwrap();
        switch.set(false);
        assert_eq!(word(), [7; 6], "it is off to begin with");
        switch.set(true);
        assert!(switch.is_on());
        assert_eq!(word(), [7, 1, 0, 0, 0, 7]);
        switch.leave_off();
        switch.set(true);
        assert!(!switch.is_on());
        assert_eq!(word(), [7, 2, 0, 0, 0, 7]);
        std::fs::remove_file(path).unwrap();
    }
}
