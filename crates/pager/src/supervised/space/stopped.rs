//! Programs stopped by a signal or a tracer, and helpers that do not respond.
//!
//! A stopped program's helper is stopped, too, so nothing can be paged out until it continues. Its
//! faults do not wait for room, because a reader of its memory would wait for room that only the
//! program can make.
//!
//! A tracer under the same limit (`strace`) continues the program once the tracer's own pages are in.
//! These would be the only victims, and the tracer's faults would wait for room that the stopped
//! program must make. So a tracer is spared for a while whenever its program is found stopped: its
//! pages stay, and its faults are served. The time is bounded, because a debugger stops a program
//! indefinitely.
//!
//! A program in a frozen cgroup or without CPU time does not show as stopped. Its helper is *silent*
//! once it has ignored a command for a while: commands then go to other programs first, and handlers
//! retry a gate that it holds at growing intervals.

use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Time for which a tracer is spared, in milliseconds. Longer exceeds the limit by more while a
/// debugger holds a program.
const SPARED: u64 = 100;

/// Milliseconds after which a helper that has not done its command is silent. A larger value lets a
/// frozen program delay reclaim for longer; a smaller one passes over programs that only lack CPU time.
const SILENT: u64 = 30;
/// First and longest interval in milliseconds at which handlers retry a gate that was not available.
/// Longer saves CPU time and delays the program's faults once it continues.
const PAUSES: (u64, u64) = (20, 160);

/// Milliseconds for which reclaim leaves a program alone whose gate was not available. Longer lets it
/// outgrow the limit for longer; shorter makes reclaim wait for it more often.
const GATE_MISSED: u64 = 10;

/// What is known of a program's stops. Hints for all threads: all accesses are Relaxed.
#[derive(Debug, Default)]
pub(crate) struct StopState {
    /// The program was found stopped, and not found running since.
    found_stopped: AtomicBool,
    /// A tracer holds the program and may read its memory: nothing of it is paged out.
    pub held: AtomicBool,
    /// Pages swapped in while it did, in all stops.
    pub pages_in: AtomicU64,
    /// Time of the last command, in milliseconds since the supervisor's start.
    posted: AtomicU64,
    /// Current retry interval of the gate, in milliseconds.
    pause: AtomicU64,
    /// End of the current interval, in milliseconds since the supervisor's start.
    pause_ends: AtomicU64,
    /// End of the time for which reclaim leaves the program alone, in milliseconds since the supervisor's
    /// start.
    gate_missed_until: AtomicU64,
}

impl AddressSpace {
    /// Whether the program was found stopped, and still is. Reads `/proc` only if it was.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.found_stopped.load(Ordering::Relaxed) && self.check_stopped()
    }

    /// Reads from `/proc` whether the helper is stopped, and spares the tracer at a new stop.
    pub(crate) fn check_stopped(&self) -> bool {
        let stopped = self
            .attached()
            .is_some_and(|attached| attached.inspector.is_stopped());
        let was_stopped = self.stop.found_stopped.swap(stopped, Ordering::Relaxed);
        if stopped && !was_stopped {
            self.spare_tracer();
        }
        stopped
    }

    /// Whether a tracer has held the program stopped for some time (`registration/governor/traced.rs`).
    pub(crate) fn is_held(&self) -> bool {
        self.stop.held.load(Ordering::Relaxed)
    }

    /// Notes the time of a command.
    pub(crate) fn note_posted(&self) {
        let now = self.resources.milliseconds();
        self.stop.posted.store(now, Ordering::Relaxed);
    }

    /// Whether the helper has ignored a command for [`SILENT`] ms. Wakes it then: it sleeps through one that was posted
    /// while it was stopped.
    pub(crate) fn is_silent(&self) -> bool {
        let posted = self.stop.posted.load(Ordering::Relaxed);
        let waits = self.resources.milliseconds().saturating_sub(posted) > SILENT;
        let is_silent = waits && lock(&self.helper_port).waits_for_helper();
        if is_silent {
            self.channel.wake_helper();
        }
        is_silent
    }

    /// Whether handlers should retry the gate of a program that they stopped listening to; less often
    /// each time. Called by the governor.
    pub(crate) fn may_retry_listening(&self) -> bool {
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

    /// Resets the retry interval, as handlers listen to the program. Called by the governor.
    pub(crate) fn note_listening(&self) {
        if self.stop.pause.load(Ordering::Relaxed) != 0
            && self.resources.milliseconds() >= self.stop.pause_ends.load(Ordering::Relaxed)
        {
            self.stop.pause.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that reclaim did not get the gate: its holder waits for the program.
    pub(crate) fn note_gate_missed(&self) {
        let until = self.resources.milliseconds() + GATE_MISSED;
        self.stop.gate_missed_until.store(until, Ordering::Relaxed);
    }

    /// Whether reclaim did not get the gate a short time ago.
    pub(crate) fn was_gate_missed(&self) -> bool {
        let until = self.stop.gate_missed_until.load(Ordering::Relaxed);
        until != 0 && self.resources.milliseconds() < until
    }

    /// Spares the tracer of this program.
    fn spare_tracer(&self) {
        let attached = self.attached();
        let Some(tracer) = attached.and_then(|attached| attached.inspector.tracer()) else {
            return;
        };
        let until = self.resources.milliseconds() + SPARED;
        self.resources.tracers.spare(tracer, until);
    }

    /// Whether the program is a tracer that reclaim spares.
    pub(crate) fn is_spared(&self) -> bool {
        let now = self.resources.milliseconds();
        self.resources.tracers.spares_any(now)
            && self
                .inspector()
                .is_some_and(|inspector| self.resources.tracers.spares(inspector.pid(), now))
    }
}
