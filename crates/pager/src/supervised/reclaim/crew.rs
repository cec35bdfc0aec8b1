//! Threads that help the reclaimer while programs wait for room, or exceed the limit, as far as CPUs are idle.
//!
//! The reclaimer hands out rounds, goes on with others itself, and takes note of what each made later. It alone chooses the
//! address spaces, none of which has two rounds at a time.
//!
//! A seat is *empty*; the reclaimer *posts* a job there; its thread *takes* it, and leaves it *done* until the reclaimer
//! collects it.

use crate::supervised::group::Group;
use crate::supervised::reclaim::round::{GATE_PATIENCE, Progress, Worker};
use crate::supervised::space::AddressSpace;
use crate::sync::{Event, Mutex, lock};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for a job before the thread looks whether the group stops.
const IDLE: Duration = Duration::from_secs(1);

/// What the reclaimer hands out: a round over an address space.
pub(crate) struct Job {
    /// Whose pages are to leave.
    pub space: Arc<AddressSpace>,
    /// By how much the group is above its watermark.
    pub excess_bytes: u64,
}

impl Job {
    fn run(self, worker: &mut Worker) -> Progress {
        worker.round(&self.space, self.excess_bytes)
    }
}

/// Where one thread gets its jobs.
pub(crate) struct Seat {
    desk: Mutex<Desk>,
    /// Wakes the thread.
    posted: Event,
    /// Wakes the reclaimer. All seats share it.
    done: Arc<Event>,
}

#[derive(Default)]
enum Desk {
    #[default]
    Empty,
    Posted(Job),
    Taken,
    Done(Progress),
}

impl Seat {
    fn new(done: &Arc<Event>) -> Arc<Seat> {
        Arc::new(Seat {
            desk: Mutex::default(),
            posted: Event::default(),
            done: done.clone(),
        })
    }

    fn post(&self, job: Job) {
        *lock(&self.desk) = Desk::Posted(job);
        self.posted.notify();
    }

    fn take(&self) -> Option<Job> {
        let mut desk = lock(&self.desk);
        match std::mem::take(&mut *desk) {
            Desk::Posted(job) => {
                *desk = Desk::Taken;
                Some(job)
            }
            other => {
                *desk = other;
                None
            }
        }
    }

    fn collect(&self) -> Option<Progress> {
        let mut desk = lock(&self.desk);
        match std::mem::take(&mut *desk) {
            Desk::Done(progress) => Some(progress),
            other => {
                *desk = other;
                None
            }
        }
    }

    /// Does the jobs that are posted here, until the group stops.
    pub(crate) fn attend(&self, group: &Arc<Group>) {
        let mut worker = Worker::that_helps(group.clone());
        while !group.stopping.load(Ordering::Relaxed) {
            let has_unfinished = worker.service.has_unfinished();
            self.posted
                .wait(if has_unfinished { GATE_PATIENCE } else { IDLE });
            worker.service.finish_loads();
            if let Some(job) = self.take() {
                let progress = job.run(&mut worker);
                *lock(&self.desk) = Desk::Done(progress);
                self.done.notify();
            }
        }
    }
}

/// The threads that help. The reclaimer owns it.
pub(crate) struct Crew {
    /// The seats, each with the address space that has its round.
    seats: Vec<(Arc<Seat>, Option<Arc<AddressSpace>>)>,
    done: Arc<Event>,
    /// The group, as long as further threads may be started.
    group: Option<Arc<Group>>,
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
            group: Some(group),
            most: cpus.len().saturating_sub(1).min(MOST),
            cpus,
        }
    }

    /// Of so many threads, which are still to attend to their seats.
    #[cfg(simulated)]
    pub(crate) fn of_seats(number: usize) -> (Crew, Vec<Arc<Seat>>) {
        let done = Arc::default();
        let seats: Vec<Arc<Seat>> = (0..number).map(|_| Seat::new(&done)).collect();
        let crew = Crew {
            most: seats.len(),
            seats: seats.iter().map(|seat| (seat.clone(), None)).collect(),
            done,
            group: None,
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
        let busy = self.seats.iter().filter(|(_, has)| has.is_some());
        busy.count()
    }

    /// Whether an address space has a round that is not collected.
    pub(crate) fn has(&self, space: &Arc<AddressSpace>) -> bool {
        let its = self.seats.iter().filter_map(|(_, has)| has.as_ref());
        its.into_iter().any(|other| Arc::ptr_eq(other, space))
    }

    /// Hands a round out. If no thread can be started for it, none is made.
    pub(crate) fn hand_out(&mut self, job: Job) {
        let free = self.seats.iter().position(|(_, has)| has.is_none());
        let Some(number) = free.or_else(|| self.start()) else {
            return;
        };
        let (seat, has) = &mut self.seats[number];
        *has = Some(job.space.clone());
        seat.post(job);
    }

    /// What was made since, of which address space.
    pub(crate) fn collect(&mut self) -> Vec<(Arc<AddressSpace>, Progress)> {
        let mut made = Vec::new();
        for (seat, has) in &mut self.seats {
            if has.is_some()
                && let Some(progress) = seat.collect()
            {
                made.extend(has.take().map(|space| (space, progress)));
            }
        }
        made
    }

    /// Waits until something is to be collected, at most `patience`.
    pub(crate) fn wait(&self, patience: Duration) {
        self.done.wait(patience);
    }

    /// Starts a thread. Returns the number of its seat.
    fn start(&mut self) -> Option<usize> {
        let group = self.group.clone()?;
        let (seat, cpus) = (Seat::new(&self.done), self.cpus.clone());
        let name = format!("reclaim-{}", self.seats.len() + 1);
        let its = seat.clone();
        let run = move || {
            // Else it stays where the reclaimer is for the moment. Failure costs time only.
            let _ = memfold_sys::thread::run_on(&cpus);
            its.attend(&group);
        };
        match std::thread::Builder::new().name(name).spawn(run) {
            Ok(_) => {
                self.seats.push((seat, None));
                Some(self.seats.len() - 1)
            }
            Err(error) => {
                log::debug!("no further thread to reclaim with: {error}");
                (self.group, self.most) = (None, self.seats.len());
                None
            }
        }
    }
}
