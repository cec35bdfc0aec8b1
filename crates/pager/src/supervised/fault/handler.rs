//! What a handler thread does for one program: reads its messages and serves its faults.

use crate::supervised::events::read::Reader;
use crate::supervised::fault::message::{Fault, Resolution};
use crate::supervised::fault::primitives::{note_served, wake};
use crate::supervised::fault::service::FaultService;
use crate::supervised::fork::inheritance::Identified;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::GATE_PATIENCE;
use crate::time::Instant;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The thread that serves a program, as far as it listens for messages.
pub(crate) trait Listener {
    /// Listens to a forked child.
    fn listen(&mut self, child: &AddressSpace);

    /// Stops listening to a program whose helper was stopped inside the gate, for a while.
    fn set_aside(&mut self, space: &AddressSpace);

    /// A thread of the program faulted.
    fn note_fault(&mut self, space: &AddressSpace, thread: u32);
}

/// Reads messages and serves faults until no fault needs another try.
pub(crate) fn serve_space(
    space: &Arc<AddressSpace>,
    service: &mut FaultService,
    reader: &Reader,
    listener: &mut impl Listener,
) {
    #[cfg(not(simulated))]
    space.resources.activity.note();
    let mut retries: Vec<(Fault, u32)> = Vec::new();
    let mut rounds = 0;
    loop {
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            if !space.is_dead() {
                if space.take_over_gate() {
                    continue;
                }
                listener.set_aside(space);
            }
            for (fault, _) in retries {
                wake(space, fault.page, 1);
            }
            return;
        };
        let messages = reader.read_messages(space, &mut gate);
        drop(gate);
        for child in &messages.children {
            listener.listen(child);
        }
        if messages.faults.is_empty() && retries.is_empty() {
            return;
        }
        let again = std::mem::take(&mut retries);
        retries = serve_faults(space, service, reader, listener, messages.faults, again);
        rounds += 1;
        if retries.is_empty() {
            // Epoll reports messages that came meanwhile.
            return;
        }
        if rounds > 1000 {
            for (fault, _) in retries.drain(..) {
                wake(space, fault.page, 1);
            }
        } else if rounds > 10 {
            crate::time::yield_now();
        }
    }
}

/// Serves faults that were just read, and `again` those of earlier reads. Returns those that need another try.
fn serve_faults(
    space: &Arc<AddressSpace>,
    service: &mut FaultService,
    reader: &Reader,
    listener: &mut impl Listener,
    news: Vec<(Fault, u32)>,
    again: Vec<(Fault, u32)>,
) -> Vec<(Fault, u32)> {
    let group = service.group.clone();
    let resources = &space.resources;
    let mut retries = Vec::new();
    let read = Instant::now();
    let second = resources.seconds_at(read);
    space.clock.faulted.store(second, Ordering::Relaxed);
    // One fault's end is the next one's beginning: the clock is read once a fault.
    let mut began = read;
    let new_faults = news.len();
    for (index, (fault, thread)) in news.into_iter().chain(again).enumerate() {
        if space.is_fork_request(fault.page) {
            let meanwhile = reader.prepare_fork(space, fault.page);
            for child in &meanwhile.children {
                listener.listen(child);
            }
            retries.extend(meanwhile.faults);
            continue;
        }
        let identified = space.identify_child(&group, Some(thread));
        if identified != Identified::Yes && !space.is_id_request(fault.page) {
            if identified == Identified::NotYet {
                wake(space, fault.page, 1);
            }
            continue;
        }
        let admission = space.admission_of(thread);
        let served = service.serve(space, fault, admission);
        let ended = Instant::now();
        let elapsed = ended.duration_since(std::mem::replace(&mut began, ended));
        if served != Resolution::Queued {
            resources.note_wait(service.first_touch, ended.duration_since(read));
        }
        match served {
            Resolution::Queued => {}
            Resolution::Retry | Resolution::GateMissed => retries.push((fault, thread)),
            Resolution::Done => note_served(space, &fault, elapsed),
        }
        if index < new_faults {
            listener.note_fault(space, thread);
        }
    }
    retries
}
