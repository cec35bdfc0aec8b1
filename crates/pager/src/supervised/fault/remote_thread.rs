//! The threads that serve faults on pages that lie on other machines.

use crate::supervised::fault::message::{Admission, Resolution};
use crate::supervised::fault::primitives::{note_served, wake};
use crate::supervised::fault::remote::{RemoteFault, THREADS};
use crate::supervised::fault::service::FaultService;
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use memfold_sys::thread;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Starts the threads, if the group has a remote tier.
pub(crate) fn start(group: &Arc<Group>) -> io::Result<()> {
    if group.remote.is_none() {
        return Ok(());
    }
    for number in 0..THREADS {
        let group = group.clone();
        let service = FaultService::that_waits(group.clone())?;
        std::thread::Builder::new()
            .name(format!("remote-{number}"))
            .spawn(move || run(&group, service))?;
    }
    Ok(())
}

fn run(group: &Group, mut service: FaultService) {
    // As the handlers: a program waits for each fault.
    thread::set_nice(-10);
    let Some(remote) = &group.remote else {
        return;
    };
    let is_over = || group.stopping.load(Ordering::Relaxed);
    while let Some(fault) = remote.faults.pop(is_over) {
        serve(&mut service, &fault);
    }
}

fn serve(service: &mut FaultService, waiting: &RemoteFault<AddressSpace>) {
    let RemoteFault { space, fault, read } = waiting;
    if service.serve(space, *fault, Admission::Now) == Resolution::Retry {
        // The thread faults again, which has events read first.
        wake(space, fault.page, 1);
    }
    if let Some(read) = read {
        let elapsed = read.elapsed();
        let resources = &space.resources;
        resources.note_wait(false, elapsed);
        note_served(space, fault, elapsed);
        let remote = &resources.remote_latency;
        remote.record(elapsed.as_nanos() as u64);
    }
}
