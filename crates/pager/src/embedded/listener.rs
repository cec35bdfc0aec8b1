//! Thread mode: the thread that reads fault messages and serves them.
//!
//! Waking a thread on another CPU costs more than the rest of a fault, so the listener follows the
//! faulting CPU. It samples the CPU of a fault: often after each change, rarely while it stays the same.

use super::area::{FaultServer, Served};
use super::engine_state::EngineState;
use super::fault::CLOSED;
use super::remote_queue::PAUSE;
use super::worker;
use crate::sync::lock;
use memfold_sys::memory::discard;
use memfold_sys::process::{Process, own_id};
use memfold_sys::signal::die;
use memfold_sys::thread;
use memfold_sys::uffd::{EVENT_PAGEFAULT, Message};
use memfold_sys::{Errno, PAGE_SIZE};
use std::ptr::NonNull;

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

/// Fills the page of a fault in the stage, which the program populates where it locks all memory (`mlockall`). Then no
/// victim can be moved to that place until the next batch of its worker has emptied it. Returns whether the
/// fault was [`stop`]'s.
fn serve_stage(engine: &EngineState, address: usize) -> bool {
    let page = address - address % PAGE_SIZE;
    let start = engine.stage.start().as_ptr() as usize;
    if !(start..start + engine.stage.length()).contains(&page) {
        return false;
    }
    let is_filled = match engine.uffd().zero(page as u64, PAGE_SIZE as u64) {
        Ok(()) => true,
        Err(partial) => partial.errno == Errno::EEXIST,
    };
    // Looked at after the page was filled: `stop` empties it later if the engine was not stopping yet.
    is_filled && page == stop_page(engine) && engine.is_stopping()
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
            let faulting = message.fault_thread();
            let listening = lock(&engine.listening);
            // The message may be older than an unmap: nothing, or an area of another engine, may be there.
            let mut served = Served::Done;
            if let Some(area) = engine.area_at(address) {
                served = engine.serve(&area, address, faulting as usize, &mut worker);
                follower.follow(faulting);
            }
            drop(listening);
            if serve_stage(engine, address) {
                stopped = true;
                // A thread that populates memory may have made the fault: then `stop` waits for none.
                let _ = uffd.unregister(stop_page(engine) as u64, PAGE_SIZE as u64);
            }
            match served {
                Served::Done => {}
                Served::Asked => continue,
                Served::Busy => thread::nap(PAUSE),
            }
            // The copy woke threads that waited for this page; a thread that faulted later may not be.
            let page = address as u64 & !(PAGE_SIZE as u64 - 1);
            let woken = uffd.wake(page, PAGE_SIZE as u64);
            if let Err(errno @ (Errno::EBADF | Errno::ENOTTY)) = woken {
                // The number may be another file's by now, of which the next read would take a part.
                die(&["cannot wake a thread: ", &errno.to_string(), CLOSED]);
            }
        }
    }
}

/// Stops the listener, which may be waiting for a fault, by a fault. The engine is stopping already.
pub(super) fn stop(engine: &EngineState) {
    let page = stop_page(engine) as *mut u8;
    // SAFETY: a page of the stage, which lives as long as `engine` and is used for nothing else.
    unsafe {
        // The program may have populated it.
        if let Some(page) = NonNull::new(page) {
            let _ = discard(page, PAGE_SIZE);
        }
        page.read_volatile();
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::WORKERS;
    use super::super::{Engine, Mode};
    use super::*;
    use memfold_testing::skip;
    use std::sync::Arc;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    fn engine() -> Option<Arc<Engine>> {
        Engine::for_tests(Mode::Thread, None).map(Arc::new)
    }

    /// Ends the process if this takes long.
    fn watched(run: impl FnOnce()) {
        let (done, watch) = channel::<()>();
        let watch = std::thread::spawn(move || {
            let waited = watch.recv_timeout(Duration::from_secs(20));
            if waited == Err(RecvTimeoutError::Timeout) {
                eprintln!("the listener hangs");
                std::process::abort();
            }
        });
        run();
        drop(done);
        watch.join().unwrap();
    }

    /// As by `mlockall` after the limit was made. A region that is mapped then is not locked.
    #[test]
    fn pages_leave_for_a_stage_that_the_program_has_locked() {
        let Some(engine) = engine() else { return };
        let stage = &engine.state().stage;
        let (start, length) = (stage.start().as_ptr().cast(), stage.length());
        // SAFETY: locks pages of the stage as they are touched.
        if unsafe { libc::mlock2(start, length, libc::MLOCK_ONFAULT) } != 0 {
            return skip("memory that may be locked (CAP_IPC_LOCK)");
        }
        watched(|| {
            let region = engine.map(64 * PAGE_SIZE).unwrap();
            for page in 0..64 {
                // SAFETY: of the region, which this thread alone uses.
                unsafe { region.start().add(page * PAGE_SIZE).write_volatile(7) };
            }
            assert!(region.page_out(0..region.length()).unwrap() > 0);
            for page in 0..64 {
                // SAFETY: as above.
                let byte = unsafe { region.start().add(page * PAGE_SIZE).read_volatile() };
                assert_eq!(byte, 7);
            }
            drop(region);
            drop(engine);
        });
    }

    /// As `mlockall` populates it, with all other memory.
    #[test]
    fn a_stage_that_the_program_populates_is_used_again() {
        const PAGES: usize = 512;
        let Some(engine) = engine() else { return };
        watched(|| {
            let region = engine.map(PAGES * PAGE_SIZE).unwrap();
            let word = |page: usize| {
                // SAFETY: of the region, which this thread alone uses.
                unsafe { region.start().cast::<u64>().add(page * PAGE_SIZE / 8) }
            };
            for page in 0..PAGES {
                // SAFETY: as above.
                unsafe { word(page).write_volatile(page as u64 + 1) };
            }
            let stage = &engine.state().stage;
            for offset in (0..stage.length()).step_by(PAGE_SIZE) {
                // SAFETY: of the stage; any byte is a value.
                let byte = unsafe { stage.start().add(offset).read_volatile() };
                assert_eq!(byte, 0);
            }
            // Each worker empties its part of the stage by a batch that stays.
            for _ in 0..=WORKERS {
                region.page_out(0..region.length()).unwrap();
            }
            assert_eq!(region.resident_bytes(), 0);
            for page in 0..PAGES {
                // SAFETY: of the region, as above.
                assert_eq!(unsafe { word(page).read_volatile() }, page as u64 + 1);
            }
            drop(region);
            drop(engine);
        });
    }
}
