//! Threads that help the reclaimer while programs wait for room, or exceed the limit, as far as CPUs are idle.
//!
//! The reclaimer hands out rounds, goes on with others itself, and takes note of what each made later. It alone chooses the
//! address spaces, none of which has two rounds at a time. A thread needs the right to raise its priority again
//! (`CAP_SYS_NICE`): it compresses behind all programs, but not what it does inside a gate.

use crate::bugs::Bug;
use crate::supervised::group::Group;
use crate::supervised::reclaim::priority::{Pressure, ReclaimerPriority};
use crate::supervised::reclaim::round::{Progress, Worker, can_be_commanded};
use crate::supervised::space::AddressSpace;
use crate::sync::{Event, Mutex, lock};
use crate::time::Instant;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for a job before the thread looks whether the group stops.
const IDLE: Duration = Duration::from_secs(1);

/// Time after which a round is hurried. Longer leaves programs more of busy CPUs, and an address space longer without another
/// round.
const UNHURRIED: Duration = Duration::from_millis(5);

/// What the reclaimer hands out: a round over an address space.
pub(crate) struct Job {
    /// Whose pages are to leave.
    pub space: Arc<AddressSpace>,
    /// By how much the group is above its watermark.
    pub excess_bytes: u64,
}

/// Where one thread gets its jobs.
pub(crate) struct Seat {
    /// The round to make, until the thread takes it.
    job: Mutex<Option<Job>>,
    /// What it made, until the reclaimer collects it.
    progress: Mutex<Option<Progress>>,
    /// Wakes the thread.
    posted: Event,
    /// Wakes the reclaimer. All seats share it.
    done: Arc<Event>,
    /// The thread's: behind programs while it compresses, unless it is hurried.
    priority: Arc<ReclaimerPriority>,
}

impl Seat {
    fn new(done: &Arc<Event>) -> Arc<Seat> {
        Arc::new(Seat {
            job: Mutex::default(),
            progress: Mutex::default(),
            posted: Event::default(),
            done: done.clone(),
            priority: Arc::default(),
        })
    }

    fn post(&self, job: Job) {
        *lock(&self.job) = Some(job);
        self.posted.notify();
    }

    /// What its thread works with.
    pub(crate) fn worker(&self, group: &Arc<Group>) -> io::Result<Worker> {
        Worker::that_helps(group.clone(), self.priority.clone())
    }

    /// Does the jobs that are posted here, until the group stops.
    pub(crate) fn attend(&self, group: &Arc<Group>, mut worker: Worker) {
        #[cfg(not(simulated))]
        self.priority.begin();
        while !group.stopping.load(Ordering::Relaxed) {
            self.posted.wait(IDLE);
            let job = lock(&self.job).take();
            if let Some(job) = job {
                // It was chosen some time ago.
                let progress = if can_be_commanded(&job.space) {
                    worker.round(&job.space, job.excess_bytes)
                } else {
                    Progress::default()
                };
                drop(job);
                *lock(&self.progress) = Some(progress);
                if !Bug::HelpAwaitedForGood.is_back() {
                    self.done.notify();
                }
            }
        }
    }
}

/// The round that a seat has.
struct Round {
    /// The address space's ID.
    of: u64,
    since: Instant,
}

/// The threads that help. The reclaimer owns it.
pub(crate) struct Crew {
    /// The seats, each with its round that is not collected.
    seats: Vec<(Arc<Seat>, Option<Round>)>,
    done: Arc<Event>,
    group: Arc<Group>,
    /// The CPUs on which they may run.
    cpus: Vec<usize>,
    most: usize,
}

impl Crew {
    /// One thread fewer than there are CPUs, each started when it is needed first.
    #[cfg(not(simulated))]
    pub(crate) fn of_cpus(group: Arc<Group>) -> Crew {
        /// More reclaim faster on large machines, and take more memory.
        const MOST: usize = 7;
        let cpus = memfold_sys::thread::allowed_cpus();
        Crew {
            seats: Vec::new(),
            done: Arc::default(),
            group,
            most: cpus.len().saturating_sub(1).min(MOST),
            cpus,
        }
    }

    /// Of so many threads, which are still to attend to their seats.
    #[cfg(simulated)]
    pub(crate) fn of_seats(group: Arc<Group>, number: usize) -> (Crew, Vec<Arc<Seat>>) {
        let done = Arc::default();
        let seats: Vec<Arc<Seat>> = (0..number).map(|_| Seat::new(&done)).collect();
        let crew = Crew {
            most: seats.len(),
            seats: seats.iter().map(|seat| (seat.clone(), None)).collect(),
            done,
            group,
            cpus: Vec::new(),
        };
        (crew, seats)
    }

    /// Number of further rounds that can be handed out.
    pub(crate) fn free(&self) -> usize {
        self.most - self.busy()
    }

    /// Number of rounds that are handed out and not collected.
    pub(crate) fn busy(&self) -> usize {
        let busy = self.seats.iter().filter(|(_, round)| round.is_some());
        busy.count()
    }

    /// Whether an address space has a round that is not collected.
    pub(crate) fn has(&self, id: u64) -> bool {
        let mut rounds = self.seats.iter().filter_map(|(_, round)| round.as_ref());
        rounds.any(|round| round.of == id)
    }

    /// Hands a round out. If no thread can be started for it, none is made.
    pub(crate) fn hand_out(&mut self, job: Job) {
        let free = self.seats.iter().position(|(_, round)| round.is_none());
        let Some(number) = free.or_else(|| self.start()) else {
            return;
        };
        // Below the limit it takes what CPUs have to spare.
        let pressure = match self.group.resources.priority.pressure() {
            Pressure::Exceeded => Pressure::Exceeded,
            Pressure::Short | Pressure::None => Pressure::None,
        };
        let (seat, round) = &mut self.seats[number];
        *round = Some(Round {
            of: job.space.id,
            since: Instant::now(),
        });
        seat.priority.set_pressure(pressure);
        seat.post(job);
    }

    /// What was made since, by the ID of the address space. Hurries what takes long.
    pub(crate) fn collect(&mut self) -> Vec<(u64, Progress)> {
        let mut made = Vec::new();
        for (seat, round) in &mut self.seats {
            let Some(Round { of, since }) = round else {
                continue;
            };
            let progress = lock(&seat.progress).take();
            if let Some(progress) = progress {
                made.push((*of, progress));
                *round = None;
            } else if since.elapsed() > UNHURRIED {
                seat.priority.raise_pressure(Pressure::Short);
            }
        }
        made
    }

    /// Hands no round out from now on. Called before any was.
    #[cfg(not(simulated))]
    pub(crate) fn dismiss(&mut self) {
        self.most = 0;
    }

    /// Hurries all rounds, and waits until one may be collected, at most `patience`.
    pub(crate) fn wait(&self, patience: Duration) {
        for (seat, round) in &self.seats {
            if round.is_some() {
                seat.priority.raise_pressure(Pressure::Short);
            }
        }
        while !self.done.wait(patience) && Bug::HelpAwaitedForGood.is_back() {}
    }

    /// Starts a thread. Returns the number of its seat.
    fn start(&mut self) -> Option<usize> {
        let group = self.group.clone();
        let (seat, cpus) = (Seat::new(&self.done), self.cpus.clone());
        let name = format!("reclaim-{}", self.seats.len() + 1);
        let its = seat.clone();
        let started = seat.worker(&group).and_then(|worker| {
            std::thread::Builder::new().name(name).spawn(move || {
                // Else it stays where the reclaimer is for the moment. Failure costs time only.
                let _ = memfold_sys::thread::run_on(&cpus);
                its.attend(&group, worker);
            })
        });
        match started {
            Ok(_) => {
                self.seats.push((seat, None));
                Some(self.seats.len() - 1)
            }
            Err(error) => {
                log::debug!("no further thread to reclaim with: {error}");
                self.most = self.seats.len();
                None
            }
        }
    }
}
