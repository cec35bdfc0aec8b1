//! Forked children of programs that were attached do without a helper until that is worth it.
//!
//! ```text
//!  new process below a guest ──► Child ── helper started ──► a guest itself
//!            │                     │
//!            └─► Stranger ◄────────┘ executed a program, was let go, cannot have one
//! ```
//! No handler of the library runs in such a child: it is served from the fork event on, and the thread that starts late
//! helpers (`late.rs`) looks for it among the processes below the guests. One that is found is known by its pidfd from then
//! on, also when its parent ends and it comes to another. It has its helper started (`inject/forked.rs`) as a program of a
//! run has, but not in the time in which most children execute a program.

use crate::supervised::group::Group;
use crate::supervised::helper::candidate::{Candidate, LONG, Need};
use crate::supervised::helper::inject::{AttachError, Attacher, ForkedChild, Haste};
use crate::supervised::space::AddressSpace;
use memfold_sys::process::{self, Process};
use memfold_sys::thread;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The age from which a child has its helper started: most that execute a program have done so. More lets the others grow
/// for longer.
const SETTLED: Duration = Duration::from_millis(100);
/// The shortest interval between two looks. A longer one lets children grow for longer.
pub(super) const INTERVAL: Duration = Duration::from_millis(20);
/// The interval in times of what a look takes.
const REST: u32 = 50;
/// How many children are known at a time; each takes two descriptors. Others wait until one of them has its helper.
const MOST_CHILDREN: usize = 256;

/// What is known of a process.
#[derive(Debug)]
enum Kind {
    Child(Box<ForkedChild>, Candidate),
    /// It has no copy of the library that could start a helper.
    Stranger,
}

/// A process below a guest.
#[derive(Debug)]
struct Known {
    /// With the PID it tells a process from an earlier one.
    started: u64,
    kind: Kind,
}

impl Known {
    fn child(&self) -> Option<&ForkedChild> {
        match &self.kind {
            Kind::Child(child, _) => Some(child),
            Kind::Stranger => None,
        }
    }
}

/// The children. The thread that starts late helpers owns it.
#[derive(Debug, Default)]
pub(super) struct ForkedChildren {
    known: HashMap<i32, Known>,
    detachments: u64,
    last: Option<Instant>,
    /// There were attached programs or children of such at the last look.
    is_any: bool,
    /// CPU time of a look.
    cost: Duration,
}

impl ForkedChildren {
    /// Whether there may be such children.
    pub(super) fn is_any(&self) -> bool {
        self.is_any
    }

    /// Whether a process is one that is looked after here.
    pub(super) fn has(&self, pid: i32) -> bool {
        self.known
            .get(&pid)
            .is_some_and(|known| known.child().is_some())
    }

    /// Looks for children, if it is time to, and has the helpers of those started that need one.
    pub(super) fn look(&mut self, group: &Group, attacher: &Attacher, need: Need) {
        let interval = INTERVAL.max(self.cost * REST);
        if group.resources.prepares_forks()
            || self.last.is_some_and(|last| last.elapsed() < interval)
        {
            return;
        }
        let began = thread::cpu_time();
        let (detachments, guests) = attacher.guests_with_library();
        if detachments != self.detachments {
            // Some of them may be let go.
            self.known.clear();
            self.detachments = detachments;
        }
        self.is_any = !guests.is_empty() || !self.known.is_empty();
        if self.is_any {
            let with_helper = with_helper(group);
            self.find(attacher, guests, &with_helper);
            self.start(attacher, need);
        }
        self.cost = (self.cost * 3 + thread::cpu_time().saturating_sub(began)) / 4;
        self.last = Some(Instant::now());
    }

    /// Finds new children, and forgets those that ended or have a helper.
    fn find(
        &mut self,
        attacher: &Attacher,
        guests: Vec<(Arc<Process>, u64)>,
        with_helper: &HashSet<i32>,
    ) {
        let mut found = HashSet::new();
        let children = self.known.values().filter_map(Known::child);
        let children = children.map(|child| (child.process.clone(), child.library));
        let roots: Vec<_> = children.chain(guests).collect();
        for (root, library) in roots {
            for pid in process::mostly_below(root.pid()) {
                if !with_helper.contains(&pid) && found.insert(pid) {
                    self.classify(attacher, pid, (&root, library));
                }
            }
        }
        self.known.retain(|pid, known| match known.child() {
            Some(child) => !with_helper.contains(pid) && child.process.signal(0).is_ok(),
            None => found.contains(pid),
        });
    }

    /// Notes what a process is that was found below another, once.
    fn classify(&mut self, attacher: &Attacher, pid: i32, (root, library): (&Arc<Process>, u64)) {
        let Some(started) = process::living_since(pid) else {
            return;
        };
        let is_known = self
            .known
            .get(&pid)
            .is_some_and(|known| known.started == started);
        if is_known || self.known.values().filter_map(Known::child).count() >= MOST_CHILDREN {
            return;
        }
        let child = || {
            let process = Process::open(pid).ok()?;
            let descends = process::is_fork(pid) && process.descends_from(root).ok()?;
            let child = ForkedChild {
                process: Arc::new(process),
                library,
                detachments: self.detachments,
            };
            (descends && attacher.has_library(&child)).then_some(child)
        };
        let kind = child().map_or(Kind::Stranger, |child| {
            Kind::Child(Box::new(child), Candidate::new(Instant::now()))
        });
        self.known.insert(pid, Known { started, kind });
    }

    /// Has the helpers of those children started that need one, the largest first.
    fn start(&mut self, attacher: &Attacher, need: Need) {
        let now = Instant::now();
        let worth = self
            .known
            .iter()
            .filter(|(_, known)| known.child().is_some());
        let worth = worth.filter_map(|(pid, _)| Some((process::sizes(*pid)?.resident_pages, *pid)));
        let mut large: Vec<(u64, i32)> = worth.filter(|(has, _)| *has >= need.worth).collect();
        let at_once = need.worth_at_once(large.len() as u64);
        large.sort_unstable_by(|one, other| other.cmp(one));
        for (has, pid) in large {
            let Some(known) = self.known.get_mut(&pid) else {
                continue;
            };
            let Kind::Child(child, candidate) = &mut known.kind else {
                continue;
            };
            let age = now.duration_since(candidate.since);
            let is_wanted = age >= LONG || has >= at_once && age >= SETTLED;
            if !is_wanted || now < candidate.not_before {
                continue;
            }
            let haste = if age >= LONG || need.is_little_room {
                Haste::Interrupts
            } else {
                Haste::Waits
            };
            match attacher.start_forked(child, haste) {
                Ok(()) | Err(AttachError::Busy | AttachError::Stopped) => {}
                // Another process traces it, and may let it go; or the program handles its system calls just now.
                Err(AttachError::NotPermitted | AttachError::Dispatched) => candidate.fail(now),
                Err(error) => {
                    log::debug!("no helper is started in forked process {pid}: {error}");
                    candidate.fail(now);
                    if matches!(error, AttachError::Gone) || candidate.has_failed() {
                        known.kind = Kind::Stranger;
                    }
                }
            }
        }
    }
}

/// Processes that have, or had, a helper.
fn with_helper(group: &Group) -> HashSet<i32> {
    let spaces = group.spaces();
    let has = |space: &&Arc<AddressSpace>| space.attached().is_some() && !space.has_left();
    let pid_of = |space: &Arc<AddressSpace>| Some(space.inspector()?.pid());
    spaces.iter().filter(has).filter_map(pid_of).collect()
}
