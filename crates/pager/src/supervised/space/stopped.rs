//! A program that is stopped, by a signal or by a tracer.
//!
//! Its helper is stopped with it, so nothing can be moved out until it goes on, and none of its faults
//! waits for room: whoever reads its memory would wait for what only the program can make.
//!
//! A tracer that is under the same limit lets the program go on after each stop (`strace`), as soon as
//! it has its own pages. Those would be the only ones left to go out, and its faults would wait for
//! room that the program makes once it goes on. So a tracer is spared for a while whenever its program
//! is found to have been stopped: its pages stay, its faults are served. Only for a while: a debugger
//! keeps a program stopped for as long as somebody thinks.

//!
//! A program in a frozen control group shows no such state, nor one that gets no CPU. Its helper is
//! *silent* once it has left a command alone for a while: then commands go to others, if there are any,
//! until it has done it; and where it is inside the gate, handlers look for it less and less often.

use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How long a tracer is spared, in milliseconds.
const SPARED: u64 = 100;

/// Milliseconds after which a helper that has not done its command is silent; more keeps others waiting
/// for longer, less takes turns from programs on a busy machine.
const SILENT: u64 = 30;
/// Milliseconds between two looks of handlers at a gate that could not be had: first and longest.
const PAUSES: (u64, u64) = (20, 160);

/// What is known of a program's stops.
#[derive(Debug, Default)]
pub struct StopState {
    /// It was found stopped, and not found running since.
    halted: AtomicBool,
    /// A tracer has it stopped and may read its memory: none of it is moved out.
    pub held: AtomicBool,
    /// When the last command was posted, in milliseconds since the supervisor started.
    posted: AtomicU64,
    /// The last pause between two looks at its gate, and when it ends.
    pause: AtomicU64,
    pause_ends: AtomicU64,
}

impl AddressSpace {
    /// Whether the program was found stopped, and still is.
    pub fn is_stopped(&self) -> bool {
        self.stop.halted.load(Ordering::Relaxed) && self.look_whether_stopped()
    }

    /// Looks whether the helper is stopped.
    pub fn look_whether_stopped(&self) -> bool {
        let stopped = self
            .attached()
            .is_some_and(|attached| attached.inspector.is_stopped());
        let was_stopped = self.stop.halted.swap(stopped, Ordering::Relaxed);
        if stopped && !was_stopped {
            self.spare_tracer();
        }
        stopped
    }

    /// Whether a tracer has the program stopped for longer than a moment.
    pub fn is_held(&self) -> bool {
        self.stop.held.load(Ordering::Relaxed)
    }

    /// Notes that a command is posted.
    pub fn note_posted(&self) {
        let now = self.resources.milliseconds();
        self.stop.posted.store(now, Ordering::Relaxed);
    }

    /// Whether the helper has left a command alone for a while.
    pub fn is_silent(&self) -> bool {
        let posted = self.stop.posted.load(Ordering::Relaxed);
        let waits = self.resources.milliseconds().saturating_sub(posted) > SILENT;
        waits && lock(&self.helper_port).waits_for_helper()
    }

    /// For the governor: whether handlers are to try again to enter the gate of a program that was set
    /// aside. Less often each time.
    pub fn may_retry_listening(&self) -> bool {
        let now = self.resources.milliseconds();
        if now < self.stop.pause_ends.load(Ordering::Relaxed) {
            return false;
        }
        let (first, longest) = PAUSES;
        let pause = 2 * self.stop.pause.load(Ordering::Relaxed);
        let pause = pause.clamp(first, longest);
        self.stop.pause.store(pause, Ordering::Relaxed);
        self.stop.pause_ends.store(now + pause, Ordering::Relaxed);
        true
    }

    /// For the governor: handlers listen to the program.
    pub fn note_listening(&self) {
        if self.stop.pause.load(Ordering::Relaxed) != 0
            && self.resources.milliseconds() >= self.stop.pause_ends.load(Ordering::Relaxed)
        {
            self.stop.pause.store(0, Ordering::Relaxed);
        }
    }

    /// Spares the one that traces this program.
    fn spare_tracer(&self) {
        let attached = self.attached();
        let Some(tracer) = attached.and_then(|attached| attached.inspector.tracer()) else {
            return;
        };
        let until = self.resources.milliseconds() + SPARED;
        self.resources.tracers.spare(tracer, until);
    }

    /// Whether the program traces one that was found stopped just now.
    pub fn is_spared(&self) -> bool {
        let now = self.resources.milliseconds();
        self.resources.tracers.spares_any(now)
            && self
                .inspector()
                .is_some_and(|inspector| self.resources.tracers.spares(inspector.pid(), now))
    }
}
