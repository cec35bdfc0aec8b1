//! Thread mode: the thread that reads fault messages and serves them.
//!
//! Waking a thread on another CPU costs more than the rest of a fault, so the listener follows the
//! faulting CPU. It samples the CPU of a fault: often after each change, rarely while it stays the same.

use super::area::{FaultServer, Served};
use super::engine_state::EngineState;
use super::remote_queue::PAUSE;
use super::worker;
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::{Process, own_id};
use memfold_sys::signal::die;
use memfold_sys::thread;
use memfold_sys::uffd::{EVENT_PAGEFAULT, Message};

/// Faults between two samples, at least and at most. More costs fewer reads of /proc, and follows a
/// change of CPU later.
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
            // Without /proc, the scheduler places the listener.
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
            // The cpuset may exclude that CPU.
            self.cpu = thread::pin_to(cpu).is_ok().then_some(cpu);
        }
        self.until_sample = self.distance;
    }
}

/// The address that [`stop`] touches: the last page of the stage, behind all workers' parts.
fn stop_page(engine: &EngineState) -> usize {
    engine.stage.start().as_ptr() as usize + engine.stage.length() - PAGE_SIZE
}

/// Serves faults until the engine is dropped.
pub(super) fn run(engine: &EngineState) {
    let uffd = engine.uffd();
    if let Err(errno) = uffd.set_blocking() {
        die(&["cannot make the userfaultfd blocking: ", &errno.to_string()]);
    }
    let mut follower = Follower::new();
    let mut messages = [Message::default(); 16];
    let mut stopped = false;
    // Ends only after the stop page was filled: `stop` waits for it.
    while !stopped {
        let count = match uffd.read(&mut messages) {
            Ok(count) => count,
            // No other thread can serve the faults: the faulting threads would wait for ever.
            Err(errno) => die(&["cannot read from the userfaultfd: ", &errno.to_string()]),
        };
        // Not held while waiting: a process may have more engines than there are workers.
        let mut worker = worker::take();
        for message in &messages[..count] {
            if message.event != EVENT_PAGEFAULT {
                continue;
            }
            let address = message.exact_fault_address() as usize;
            if address / PAGE_SIZE == stop_page(engine) / PAGE_SIZE {
                let _ = uffd.zero(stop_page(engine) as u64, PAGE_SIZE as u64);
                stopped = true;
                continue;
            }
            let faulting = message.fault_thread();
            let listening = lock(&engine.listening);
            // The message may be older than an unmap: nothing, or an area of another engine, may be there.
            let mut served = Served::Done;
            if let Some(area) = engine.area_at(address) {
                served = engine.serve(&area, address, faulting as usize, &mut worker);
                follower.follow(faulting);
            }
            drop(listening);
            match served {
                Served::Done => {}
                Served::Asked => continue,
                Served::Busy => thread::nap(PAUSE),
            }
            // The copy woke threads that waited for this page; a thread that faulted later may not be.
            let page = address as u64 & !(PAGE_SIZE as u64 - 1);
            let _ = uffd.wake(page, PAGE_SIZE as u64);
        }
    }
}

/// Stops the listener, which may be waiting for a fault, by a fault.
pub(super) fn stop(engine: &EngineState) {
    // SAFETY: a page of the stage, which lives as long as `engine` and is used for nothing else.
    unsafe { (stop_page(engine) as *const u8).read_volatile() };
}
