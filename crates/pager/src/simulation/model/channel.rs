//! The gate, and the channel between supervisor and helper.

use crate::page::PageRange;
use crate::simulation::adversity;
use crate::simulation::sync::{dawdle, lock_model, stall};
use crate::sync::interleave;
use crate::time;
use memfold_sys::Errno;
use memfold_sys::channel::fork_step::{GIVEN, GO};
use memfold_sys::channel::{DropRun, MoveRun};
use memfold_sys::gate::Abandoned;
use memfold_sys::port::Outcome;
use shuttle::thread::Thread;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Nothing is handed to a program of the model.
pub(crate) type ChannelFile = ();

/// Looks at a gate before the time of one wait is over.
const LOOKS: u64 = 64;

/// The supervisor's gate of one address space.
#[derive(Default)]
pub(crate) struct Gate(Mutex<Inside>);

#[derive(Default)]
struct Inside {
    shared: u32,
    exclusive: bool,
    /// Threads that wait to be alone; newcomers stay out.
    pending: u32,
    /// A thread that comes when the gate is left, to be alone.
    next: Next,
}

/// What came of a thread that is to come when the gate was left so often.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Next {
    #[default]
    None,
    Comes(u32),
    Came,
}

impl Gate {
    fn enter(
        &self,
        nap_ns: u64,
        give_up: impl Fn() -> bool,
        enter: impl Fn(&mut Inside) -> bool,
    ) -> Result<(), Abandoned> {
        loop {
            interleave();
            if enter(&mut lock_model(&self.0)) {
                return Ok(());
            }
            time::sleep(Duration::from_nanos(nap_ns / LOOKS));
            if give_up() {
                return Err(Abandoned);
            }
        }
    }

    /// Enters shared.
    pub(crate) fn enter_shared(
        &self,
        nap_ns: u64,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        stall(adversity::last_fault());
        self.enter(nap_ns, give_up, |inside| {
            let free = !inside.exclusive && inside.pending == 0;
            inside.shared += u32::from(free);
            free
        })
    }

    /// Enters shared, or not at all.
    pub(crate) fn try_enter_shared(&self) -> bool {
        self.enter_shared(0, || true).is_ok()
    }

    /// Leaves after `enter_shared`.
    pub(crate) fn leave_shared(&self) {
        let mut inside = lock_model(&self.0);
        inside.shared -= 1;
        if let Next::Comes(times) = inside.next {
            let times = times.saturating_sub(1);
            let comes = times == 0 && inside.shared == 0;
            inside.exclusive |= comes;
            inside.next = if comes {
                Next::Came
            } else {
                Next::Comes(times)
            };
        }
        drop(inside);
        interleave();
    }

    /// A thread comes when the gate was left so often, before any other.
    pub(crate) fn enter_when_left(&self, times: u32) {
        lock_model(&self.0).next = Next::Comes(times);
    }

    /// Whether it has come, and so must leave.
    pub(crate) fn has_come(&self) -> bool {
        lock_model(&self.0).next == Next::Came
    }

    /// It comes no more, or leaves.
    pub(crate) fn leave_again(&self) {
        if std::mem::take(&mut lock_model(&self.0).next) == Next::Came {
            self.leave_exclusive();
        }
    }

    /// Enters alone.
    pub(crate) fn enter_exclusive(
        &self,
        nap_ns: u64,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        lock_model(&self.0).pending += 1;
        let entered = self.enter(nap_ns, give_up, |inside| {
            let free = !inside.exclusive && inside.shared == 0;
            inside.exclusive |= free;
            free
        });
        lock_model(&self.0).pending -= 1;
        entered
    }

    /// Leaves after `enter_exclusive`.
    pub(crate) fn leave_exclusive(&self) {
        lock_model(&self.0).exclusive = false;
        interleave();
    }
}

/// The helper's part of the gate.
#[derive(Default)]
pub(crate) struct HelperGate(Mutex<HelperInside>);

#[derive(Default)]
struct HelperInside {
    helper: bool,
    closed: bool,
}

impl HelperGate {
    /// For the helper: enters once it is open. `false` if the channel was closed for good.
    pub(crate) fn enter(&self) {
        loop {
            interleave();
            let mut inside = lock_model(&self.0);
            if !inside.closed {
                inside.helper = true;
                return;
            }
            drop(inside);
            time::yield_now();
        }
    }

    /// For the helper: whether it was not relieved since it entered.
    pub(crate) fn is_inside(&self) -> bool {
        lock_model(&self.0).helper
    }

    /// For the helper: leaves.
    pub(crate) fn leave(&self) {
        lock_model(&self.0).helper = false;
        interleave();
    }

    /// For a thread of the program that is about to fork: waits until no messages are being read.
    pub(crate) fn wait_open(&self) {
        loop {
            interleave();
            if !lock_model(&self.0).closed {
                return;
            }
            time::yield_now();
        }
    }

    /// For the supervisor: keeps the helper out.
    pub(crate) fn close(&self, nap_ns: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        loop {
            interleave();
            let mut inside = lock_model(&self.0);
            if !inside.helper {
                inside.closed = true;
                return Ok(());
            }
            drop(inside);
            time::sleep(Duration::from_nanos(nap_ns / LOOKS));
            if give_up() {
                return Err(Abandoned);
            }
        }
    }

    /// For the supervisor: lets the helper in again.
    pub(crate) fn open(&self) {
        lock_model(&self.0).closed = false;
        interleave();
    }

    /// For the supervisor: takes the place of a helper that is stopped inside. `false` if it is not.
    pub(crate) fn relieve(&self) -> bool {
        let relieved = std::mem::take(&mut lock_model(&self.0).helper);
        interleave();
        relieved
    }
}

/// A command, as the helper sees it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Command {
    /// The event count at which the moves were planned.
    pub event_count: u32,
    /// Staged pages to drop.
    pub drops: Vec<DropRun>,
    /// Pages to move, or to break COW of.
    pub moves: Vec<MoveRun>,
}

/// What a fork's VMAs are listed by.
#[derive(Debug, Clone, Default)]
pub(crate) struct Listed {
    /// By which the child is recognised.
    pub token: u64,
    /// First and last addresses.
    pub spans: Vec<(u64, u64)>,
}

/// What the helper is asked to withhold.
#[derive(Default)]
struct Withhold {
    /// The range, and whether it is to be given instead.
    asked: Option<(PageRange, bool)>,
    answer: Option<Result<(), Errno>>,
}

/// The part of a channel that any thread uses.
#[derive(Default)]
pub(crate) struct SharedChannel {
    gate: Gate,
    helper_gate: HelperGate,
    event_count: AtomicU32,
    carrying: AtomicU32,
    carried: AtomicU32,
    posted: AtomicU32,
    done: AtomicU32,
    /// Threads of the program that are forking.
    pub forking: AtomicU32,
    /// The helper is to end.
    pub closed: AtomicBool,
    /// The helper has withheld something, or has had a command: pages may be out.
    pub managed: AtomicBool,
    /// What a forking thread asks that reads the beacon.
    pub asked: AtomicU32,
    /// A thread of the program forks; others wait.
    pub turn: AtomicBool,
    step: AtomicU32,
    listed: Mutex<Listed>,
    withhold: Mutex<Withhold>,
    command: Mutex<Command>,
    outcome: Mutex<Outcome>,
    helper: Mutex<Option<Thread>>,
}

impl SharedChannel {
    /// The supervisor's gate.
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The helper's part of it.
    pub(crate) fn helper_gate(&self) -> &HelperGate {
        &self.helper_gate
    }

    /// Whether a thread of the program is about to fork, forks or has just done so.
    pub(crate) fn is_forking(&self) -> bool {
        interleave();
        self.forking.load(Ordering::Relaxed) != 0
    }

    /// Events applied so far.
    pub(crate) fn event_count(&self) -> u32 {
        self.event_count.load(Ordering::Relaxed)
    }

    /// The run of the command that the helper carries off, or was the last to.
    pub(crate) fn carrying(&self) -> Option<usize> {
        let number = self.carrying.load(Ordering::Relaxed);
        number.checked_sub(1).map(|index| index as usize)
    }

    /// For the helper: says which run it carries off, the first being 1, or that it carries off none.
    pub(crate) fn set_carrying(&self, number: u32) {
        self.carrying.store(number, Ordering::Relaxed);
        interleave();
    }

    /// Notes that the event of a run which the helper carried off was read.
    pub(crate) fn note_carried(&self) {
        self.carried.fetch_add(1, Ordering::Relaxed);
    }

    /// For the helper: how many such events were read.
    pub(crate) fn carried(&self) -> u32 {
        self.carried.load(Ordering::Relaxed)
    }

    /// Makes planned moves stale.
    pub(crate) fn bump_event_count(&self) {
        self.event_count.fetch_add(1, Ordering::Relaxed);
        interleave();
    }

    /// Said by what the group shares.
    pub(crate) fn set_prepared(&self) {}

    /// What a forking thread asks.
    pub(crate) fn fork_asked(&self) -> u32 {
        interleave();
        self.asked.load(Ordering::Relaxed)
    }

    /// Lists VMAs.
    pub(crate) fn list_withheld(&self, token: u64, spans: &[(u64, u64)]) -> bool {
        let spans = spans.to_vec();
        *lock_model(&self.listed) = Listed { token, spans };
        true
    }

    /// For the program: what is listed.
    pub(crate) fn listed(&self) -> Listed {
        lock_model(&self.listed).clone()
    }

    /// No thread of the model has words of its own.
    pub(crate) fn fork_thread(&self) -> (u64, u64) {
        (0, 0)
    }

    /// How far the forking thread is.
    pub(crate) fn fork_step(&self) -> u32 {
        interleave();
        self.step.load(Ordering::Relaxed)
    }

    /// Tells the forking thread what to do next, or the supervisor how far it is.
    ///
    /// A program that is killed says that it has not forked, which Linux leaves the supervisor to find by the time:
    /// no answer that comes later takes that back.
    pub(crate) fn set_fork_step(&self, step: u32) {
        if step != GO || self.step.load(Ordering::Relaxed) == GIVEN {
            self.step.store(step, Ordering::Relaxed);
        }
        interleave();
    }

    /// Whether the helper has yet to answer.
    pub(crate) fn is_withholding(&self) -> bool {
        interleave();
        lock_model(&self.withhold).asked.is_some()
    }

    /// Asks the helper to withhold a range.
    pub(crate) fn withhold(&self, start: u64, length: u64, timeout: Duration) -> Result<(), Errno> {
        self.change_withheld((start, length), false, timeout)
    }

    /// Asks the helper to give a range to forked children again.
    pub(crate) fn give(&self, start: u64, length: u64, timeout: Duration) -> Result<(), Errno> {
        self.change_withheld((start, length), true, timeout)
    }

    fn change_withheld(
        &self,
        (start, length): (u64, u64),
        give: bool,
        timeout: Duration,
    ) -> Result<(), Errno> {
        const LOOKS: u32 = 32;
        {
            let mut request = lock_model(&self.withhold);
            if request.asked.is_some() {
                return Err(Errno::ETIMEDOUT);
            }
            request.asked = Some((PageRange::of_addresses(start, start + length), give));
            request.answer = None;
        }
        self.wake_helper();
        for _ in 0..LOOKS {
            time::sleep(timeout / LOOKS);
            if let Some(answer) = lock_model(&self.withhold).answer.take() {
                return answer;
            }
        }
        Err(Errno::ETIMEDOUT)
    }

    /// For the helper: withholds, or gives, what it is asked to.
    pub(crate) fn serve_withholding(&self, change: impl Fn(PageRange, bool) -> Result<(), Errno>) {
        let asked = lock_model(&self.withhold).asked;
        if let Some((range, give)) = asked {
            if !give {
                self.managed.store(true, Ordering::Relaxed);
                interleave();
            }
            let answer = match !give && self.is_forking() {
                true => Err(Errno::EAGAIN),
                false => {
                    dawdle();
                    change(range, give)
                }
            };
            let mut request = lock_model(&self.withhold);
            (request.asked, request.answer) = (None, Some(answer));
        }
    }

    /// Waits until a command other than `done` is done, at most `timeout`.
    pub(crate) fn wait_done(&self, posted: u32, timeout: Duration) -> bool {
        const LOOKS: u32 = 32;
        for _ in 0..LOOKS {
            if self.done.load(Ordering::Relaxed) == posted {
                return true;
            }
            time::sleep(timeout / LOOKS);
        }
        false
    }

    /// For the helper: the next command, with its number, and `None` at the end.
    pub(crate) fn next_command(
        &self,
        done: u32,
        change: impl Fn(PageRange, bool) -> Result<(), Errno>,
    ) -> Option<(u32, Command)> {
        *lock_model(&self.helper) = Some(shuttle::thread::current());
        loop {
            self.serve_withholding(&change);
            if self.closed.load(Ordering::Relaxed) {
                return None;
            }
            let posted = self.posted.load(Ordering::Relaxed);
            if posted != done {
                self.managed.store(true, Ordering::Relaxed);
                return Some((posted, lock_model(&self.command).clone()));
            }
            shuttle::thread::park();
        }
    }

    /// For the helper: notes that a command is done.
    pub(crate) fn finish(&self, posted: u32, outcome: Outcome) {
        *lock_model(&self.outcome) = outcome;
        self.done.store(posted, Ordering::Relaxed);
        interleave();
    }

    /// Ends the helper.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.wake_helper();
    }

    pub(crate) fn wake_helper(&self) {
        let helper = lock_model(&self.helper).clone();
        if let Some(helper) = helper {
            helper.unpark();
        }
    }
}

/// The supervisor's end of a channel.
#[derive(Default)]
pub(crate) struct Port {
    shared: Arc<SharedChannel>,
    posted: u32,
    outstanding: bool,
}

impl Port {
    /// The part that any thread may use.
    pub(crate) fn shared(&self) -> &Arc<SharedChannel> {
        &self.shared
    }

    /// The number of the last command.
    pub(crate) fn posted(&self) -> u32 {
        self.posted
    }

    /// Whether the last command is done.
    pub(crate) fn is_done(&self) -> bool {
        interleave();
        self.shared.done.load(Ordering::Relaxed) == self.posted
    }

    /// Posts a command.
    ///
    /// # Panics
    /// If the outcome of the one before was not taken.
    pub(crate) fn post(&mut self, event_count: u32, drops: &[DropRun], moves: &[MoveRun]) {
        assert!(!self.outstanding, "one command at a time");
        *lock_model(&self.shared.command) = Command {
            event_count,
            drops: drops.to_vec(),
            moves: moves.to_vec(),
        };
        self.shared.carrying.store(0, Ordering::Relaxed);
        self.posted += 1;
        self.outstanding = true;
        self.shared.posted.store(self.posted, Ordering::Relaxed);
        self.shared.wake_helper();
        interleave();
    }

    /// What became of the last command; `None` while it is not done.
    pub(crate) fn outcome(&mut self, _drops: usize, _moves: usize) -> Option<Outcome> {
        if !self.outstanding || !self.is_done() {
            return None;
        }
        self.outstanding = false;
        Some(lock_model(&self.shared.outcome).clone())
    }
}

/// Makes channels.
#[derive(Default)]
pub(crate) struct Ports;

impl Ports {
    /// A channel for a new address space.
    pub(crate) fn new_port(&self) -> io::Result<(Port, ChannelFile)> {
        if adversity::is_refused() {
            return Err(Errno::ENOMEM.into());
        }
        Ok((Port::default(), ()))
    }
}
