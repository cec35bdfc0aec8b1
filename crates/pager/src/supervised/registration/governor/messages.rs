//! Reading a program's events, and serving the faults among them.

use crate::supervised::events::read::Messages;
use crate::supervised::fault::listen::Handlers;
use crate::supervised::fault::message::Resolution;
use crate::supervised::fault::primitives::wake;
use crate::supervised::fault::service::FaultService;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Exclusive;
use crate::sync::lock;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// What a thread needs to read events: the governor, which waits for no program, or a thread of
/// `waiting.rs`, which waits for one.
pub(super) struct MessageService {
    handlers: Arc<Handlers>,
    /// Serves the faults.
    pub(super) service: FaultService,
    /// Longest wait for a program's gate.
    pub(super) patience: Duration,
    /// Whether to wait for the end of changes in progress.
    waits: bool,
}

impl MessageService {
    /// For the governor.
    pub(super) fn new(
        handlers: Arc<Handlers>,
        service: FaultService,
        patience: Duration,
    ) -> MessageService {
        MessageService {
            handlers,
            service,
            patience,
            waits: false,
        }
    }

    /// For a thread that no other program needs.
    pub(super) fn that_waits(
        handlers: Arc<Handlers>,
        patience: Duration,
    ) -> io::Result<MessageService> {
        let service = FaultService::new(handlers.reader.group().clone())?;
        Ok(MessageService {
            waits: true,
            ..MessageService::new(handlers, service, patience)
        })
    }

    /// Makes sure that the events of all completed changes are applied. `None` while a change is in
    /// progress, whose end the program may delay, unless this thread waits for it.
    pub(super) fn read_pending_events(
        &self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
    ) -> Option<Messages> {
        // Events that are not read yet belong to changes in progress.
        if space.is_changing() && !self.waits {
            return None;
        }
        let is_waiting = lock(&space.changes).order.is_waiting();
        Some(if is_waiting || self.waits {
            self.handlers.reader.read_messages(space, gate)
        } else {
            Messages::default()
        })
    }

    /// Serves faults that were read along with events, and listens to forked children, after leaving
    /// the gate.
    pub(super) fn serve(&mut self, space: &Arc<AddressSpace>, messages: Messages) {
        for child in &messages.children {
            // On failure, a later tick retries.
            let _ = self.handlers.listen(child);
        }
        for (fault, thread) in messages.faults {
            let admission = space.admission_of(thread);
            match self.service.serve(space, fault, admission) {
                Resolution::Done | Resolution::Queued => {}
                Resolution::Retry | Resolution::GateMissed => wake(space, fault.page, 1),
            }
        }
    }
}
