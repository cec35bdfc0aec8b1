//! Thread mode: the thread that reads fault messages and serves them.
//!
//! Waking a thread on another CPU costs more than the rest of a fault, so the listener runs on the
//! CPU that faults come from. Which that is, is sampled: often at first and after each surprise,
//! rarely once it is settled. With faults from several CPUs it stays where most come from.

use super::engine::{Shared, lock};
use super::worker;
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::{Process, own_id};
use memfold_sys::signal::die;
use memfold_sys::thread;
use memfold_sys::uffd::{EVENT_PAGEFAULT, Message};

/// Samples are at least this far apart, in faults, and at most.
const SAMPLE_NEAREST: u32 = 4;
const SAMPLE_FARTHEST: u32 = 512;

struct Follower {
    process: Option<Process>,
    cpu: Option<usize>,
    until_sample: u32,
    distance: u32,
}

impl Follower {
    fn new() -> Follower {
        Follower {
            // Without it the listener stays where the scheduler puts it.
            process: Process::open(own_id()).ok(),
            cpu: None,
            until_sample: 0,
            distance: SAMPLE_NEAREST,
        }
    }

    /// Called for each fault.
    fn follow(&mut self, faulting: u32) {
        if self.until_sample > 0 {
            self.until_sample -= 1;
            return;
        }
        let Some(process) = &self.process else {
            return;
        };
        let Some(cpu) = process.last_cpu(faulting) else {
            return;
        };
        if self.cpu == Some(cpu) {
            self.distance = (self.distance * 2).min(SAMPLE_FARTHEST);
        } else {
            self.distance = SAMPLE_NEAREST;
            // A CPU that this thread may not use is no better than any other.
            self.cpu = thread::pin_to(cpu).is_ok().then_some(cpu);
        }
        self.until_sample = self.distance;
    }
}

/// The address that [`stop`] touches: the page behind the stage's places.
fn doorbell(shared: &Shared) -> usize {
    shared.stage.start().as_ptr() as usize + shared.stage.length() - PAGE_SIZE
}

/// Serves faults until the engine is dropped.
pub(super) fn run(shared: &Shared) {
    let uffd = shared.uffd();
    if let Err(errno) = uffd.set_blocking() {
        die(&["cannot wait for faults: ", &errno.to_string()]);
    }
    let mut follower = Follower::new();
    let mut messages = [Message::default(); 16];
    let mut rung = false;
    // Not before: whoever rings waits for the answer.
    while !rung {
        let count = match uffd.read(&mut messages) {
            Ok(count) => count,
            // Nobody else can serve the faults of threads that wait for ever now.
            Err(errno) => die(&["cannot read faults: ", &errno.to_string()]),
        };
        // Not kept while waiting: there are fewer than a process may have engines.
        let mut worker = worker::take();
        for message in &messages[..count] {
            if message.event != EVENT_PAGEFAULT {
                continue;
            }
            let address = message.exact_fault_address() as usize;
            if address / PAGE_SIZE == doorbell(shared) / PAGE_SIZE {
                let _ = uffd.zero(doorbell(shared) as u64, PAGE_SIZE as u64);
                rung = true;
                continue;
            }
            let thread = message.fault_thread();
            let listening = lock(&shared.listening);
            // A message may be older than what lies there now: nothing, or another engine's.
            if let Some(area) = shared.area_at(address) {
                shared.serve(&area, address, thread as usize, &mut worker);
                follower.follow(thread);
            }
            drop(listening);
            // Whoever was served by a copy is awake already; others may have the page by now.
            let page = address as u64 & !(PAGE_SIZE as u64 - 1);
            let _ = uffd.wake(page, PAGE_SIZE as u64);
        }
    }
}

/// Makes the listener end: a fault of our own, as it may wait for one.
pub(super) fn stop(shared: &Shared) {
    // SAFETY: a page of the stage, which lives while `shared` does, used for nothing else.
    unsafe { (doorbell(shared) as *const u8).read_volatile() };
}
