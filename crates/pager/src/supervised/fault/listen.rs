//! The fault handlers: one thread per CPU, each listening to the address spaces whose threads fault on
//! its CPU.
//!
//! Waking a thread on another CPU costs an IPI and possibly an idle exit, more than the rest of a
//! fault. So an address space is registered only with the handlers of the CPUs that its faults come
//! from. A handler samples the CPU of the faulting thread: often at first and after a sample from
//! another CPU, rarely while samples agree.
//!
//! A handler may wait for one program: for its changes of mappings to end, or for a page in the swap
//! file. So that the other programs of the CPU do not wait along, the governor replaces a handler that
//! takes long: a new thread serves its epoll, and the old one ends once it is done with that program.

use crate::supervised::events::read::Reader;
use crate::supervised::fault::handler::{Listener, serve_space};
use crate::supervised::fault::service::FaultService;
use crate::supervised::group::Group;
use crate::supervised::kernel::Ports;
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use memfold_sys::epoll::Epoll;
use memfold_sys::thread;
use std::io::{self, PipeReader};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// Smallest and largest distance between two samples, in faults. Larger saves reads of `/proc` and
/// follows a migrated thread later.
const SAMPLE_NEAREST: u32 = 2;
const SAMPLE_FARTHEST: u32 = 512;
/// Consecutive samples from other CPUs after which a handler stops listening. More tolerates migrations
/// and wakes more handlers per fault.
const MISSES_TO_LEAVE: u32 = 4;
/// Milliseconds after which a busy handler is replaced. Longer makes other programs wait for longer;
/// shorter starts threads for pages that come from a slow disk.
const REPLACED_AFTER: u32 = 20;
/// Most replaced threads that still run. More lets more programs at once make a handler wait.
const MOST_REPLACED: u32 = 64;
/// The epoll token of the stop pipe, which is no address space's ID.
const STOP: u64 = u64::MAX;

/// The handlers of a group. Shared by the handler threads, the acceptor and the governor.
pub(crate) struct Handlers {
    group: Arc<Group>,
    cpus: Vec<CpuHandler>,
    /// Number of replaced threads that still run. Relaxed: only a bound.
    replaced: AtomicU32,
    /// Reads the messages of the group's programs.
    pub reader: Reader,
    /// Hangs up when the group stops, which wakes the handlers.
    _stop: PipeReader,
}

/// The handler of one CPU.
struct CpuHandler {
    cpu: usize,
    epoll: Epoll,
    turn: AtomicU64,
}

/// What `turn` of a [`CpuHandler`] holds: the number of the thread whose turn it is (threads with smaller
/// ones were replaced), and the time at which it began with what was ready, in milliseconds since the
/// supervisor's start, plus one; 0 while it waits for faults. Changed as a whole, by compare-and-swap:
/// Relaxed, as nothing else depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    thread: u32,
    busy_since: u32,
}

impl Turn {
    fn packed(self) -> u64 {
        u64::from(self.thread) << 32 | u64::from(self.busy_since)
    }

    fn unpacked(turn: u64) -> Turn {
        Turn {
            thread: (turn >> 32) as u32,
            busy_since: turn as u32,
        }
    }

    /// Whether the thread has been busy for too long at a time.
    fn is_overdue(self, now: u32) -> bool {
        self.busy_since != 0 && now.wrapping_sub(self.busy_since) > REPLACED_AFTER
    }
}

impl CpuHandler {
    fn new(cpu: usize) -> io::Result<CpuHandler> {
        Ok(CpuHandler {
            cpu,
            epoll: Epoll::new()?,
            turn: AtomicU64::new(0),
        })
    }

    fn turn(&self) -> Turn {
        Turn::unpacked(self.turn.load(Ordering::Relaxed))
    }

    fn replace(&self, before: Turn, after: Turn) -> bool {
        let (before, after) = (before.packed(), after.packed());
        self.turn
            .compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// Notes since when a thread is busy. `false` if it was replaced.
    fn note(&self, thread: u32, busy_since: u32) -> bool {
        let before = self.turn();
        // Only the governor changes it meanwhile, to replace the thread.
        before.thread == thread && self.replace(before, Turn { thread, busy_since })
    }
}

impl Handlers {
    /// The group's handlers. To stop them, set `stopping` of the group and drop the other end of
    /// `stop`.
    pub(crate) fn new(
        group: Arc<Group>,
        ports: Arc<Ports>,
        stop: PipeReader,
    ) -> io::Result<Handlers> {
        let cpus = thread::allowed_cpus().into_iter();
        let cpus: Vec<CpuHandler> = cpus.map(CpuHandler::new).collect::<io::Result<_>>()?;
        for handler in &cpus {
            handler.epoll.add(stop.as_fd(), STOP)?;
        }
        Ok(Handlers {
            reader: Reader::new(group.clone(), ports),
            group,
            cpus,
            replaced: AtomicU32::new(0),
            _stop: stop,
        })
    }

    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        (0..self.cpus.len()).try_for_each(|number| {
            let turns = self.start_thread(number, 0)?;
            // Received by the thread that was just started.
            let _ = turns.send(());
            Ok(())
        })
    }

    /// Starts a thread, which waits for its turn, or ends if the sender is dropped.
    fn start_thread(self: &Arc<Self>, number: usize, thread: u32) -> io::Result<Sender<()>> {
        let (handlers, service) = (self.clone(), FaultService::new(self.group.clone())?);
        let (turns, turn) = channel();
        std::thread::Builder::new()
            .name(format!("fault-{}", self.cpus[number].cpu))
            .spawn(move || {
                if turn.recv().is_ok() {
                    handlers.run((number, thread), service);
                }
            })?;
        Ok(turns)
    }

    /// Milliseconds since the supervisor's start, plus one, never 0.
    fn now(&self) -> u32 {
        (self.group.resources.milliseconds() as u32)
            .wrapping_add(1)
            .max(1)
    }

    /// Replaces the handlers that have been busy for too long. Called by the governor. Where no thread can
    /// be started, the old one goes on, and a later tick tries again.
    pub(crate) fn replace_busy(self: &Arc<Self>) {
        let now = self.now();
        for (number, handler) in self.cpus.iter().enumerate() {
            let before = handler.turn();
            if !before.is_overdue(now) || self.replaced.load(Ordering::Relaxed) >= MOST_REPLACED {
                continue;
            }
            let thread = before.thread + 1;
            let Ok(turns) = self.start_thread(number, thread) else {
                continue;
            };
            let busy_since = 0;
            // Unless the old one is done by now, in which case the new one ends.
            if handler.replace(before, Turn { thread, busy_since }) {
                self.replaced.fetch_add(1, Ordering::Relaxed);
                // Received by the thread that was just started.
                let _ = turns.send(());
            }
        }
    }

    /// Listens to an address space, first on the CPU on which its main thread ran last. A failure is logged once; the
    /// governor retries if the address space belongs to the group.
    pub(crate) fn listen(&self, space: &AddressSpace) -> io::Result<()> {
        let cpu = space
            .attached()
            .and_then(|attached| attached.inspector.last_cpu(attached.inspector.pid() as u32));
        let number = cpu.and_then(|cpu| self.number_of(cpu)).unwrap_or(0);
        let mut armed = lock(&space.listeners);
        if armed.listening.is_empty() {
            let descriptor = space.uffd().as_fd();
            if let Err(error) = self.cpus[number].epoll.add_arrivals(descriptor, space.id) {
                space.unlistened.store(true, Ordering::Relaxed);
                if !space.warned_unlistened.swap(true, Ordering::Relaxed) {
                    log::warn!(
                        "cannot listen for the faults of a program ({error}): it waits until that is possible; raise \
                         ulimit -n or fs.epoll.max_user_watches if this comes again"
                    );
                }
                return Err(error);
            }
            armed.listening.push((number, 0));
        }
        Ok(())
    }

    /// Re-arms the edge-triggered epoll, so that unread messages are reported again. A fork event that
    /// cannot be read (EMFILE) stays unread, and the kernel does not report when a read of several
    /// messages stopped there.
    pub(crate) fn remind(&self, space: &AddressSpace) {
        for (number, _) in &lock(&space.listeners).listening {
            // Fails only if the address space is gone.
            let _ = self.cpus[*number]
                .epoll
                .remind(space.uffd().as_fd(), space.id);
        }
    }

    /// Stops listening to a program whose gate is not available, as its helper was stopped inside or another
    /// thread reads its messages, until the governor's next
    /// [`Handlers::listen`], so that the other programs on this CPU do not wait for it.
    fn set_aside(&self, space: &AddressSpace) {
        self.forget(space);
        space.unlistened.store(true, Ordering::Relaxed);
    }

    /// Stops listening.
    pub(crate) fn forget(&self, space: &AddressSpace) {
        for (number, _) in lock(&space.listeners).listening.drain(..) {
            // Fails only if it is not registered.
            let _ = self.cpus[number].epoll.remove(space.uffd().as_fd());
        }
    }

    fn number_of(&self, cpu: usize) -> Option<usize> {
        self.cpus.iter().position(|handler| handler.cpu == cpu)
    }

    /// Serves a CPU's faults until the group stops, or this thread is replaced.
    fn run(&self, (number, thread): (usize, u32), mut service: FaultService) {
        let handler = &self.cpus[number];
        // Failure costs latency only.
        let _ = thread::pin_to(handler.cpu);
        thread::set_nice(-10);
        thread::set_timer_slack(1000);
        let mut ready = Vec::new();
        let mut is_replaced = false;
        while !is_replaced && !self.group.stopping.load(Ordering::Relaxed) {
            if handler.epoll.wait(&mut ready, None).is_err() {
                crate::time::sleep(Duration::from_millis(1));
            }
            is_replaced = !handler.note(thread, self.now());
            for token in &ready {
                let Some(space) = self.group.space(*token) else {
                    continue;
                };
                if is_replaced {
                    // The new thread serves it.
                    self.remind(&space);
                    continue;
                }
                let mut listener = NumberedHandler {
                    handlers: self,
                    number,
                };
                serve_space(&space, &mut service, &self.reader, &mut listener);
                is_replaced = handler.turn().thread != thread;
            }
            is_replaced |= !handler.note(thread, 0);
        }
        if is_replaced {
            self.replaced.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Samples the CPU of a faulting thread, and updates which handlers listen.
    fn sample(&self, number: usize, space: &AddressSpace, thread: u32) {
        let mut armed = lock(&space.listeners);
        if armed.until_sample > 0 {
            armed.until_sample -= 1;
            return;
        }
        let Some(attached) = space.attached() else {
            return;
        };
        let Some(cpu) = attached.inspector.last_cpu(thread) else {
            return;
        };
        let Some(home) = self.number_of(cpu) else {
            return;
        };
        let descriptor = space.uffd().as_fd();
        let as_expected = home == number;
        armed.distance = if as_expected {
            (armed.distance * 2).clamp(SAMPLE_NEAREST, SAMPLE_FARTHEST)
        } else {
            SAMPLE_NEAREST
        };
        armed.until_sample = armed.distance;
        if !armed
            .listening
            .iter()
            .any(|(listener, _)| *listener == home)
            && self.cpus[home]
                .epoll
                .add_arrivals(descriptor, space.id)
                .is_ok()
        {
            armed.listening.push((home, 0));
        }
        for (listener, misses) in &mut armed.listening {
            *misses = if *listener == home { 0 } else { *misses + 1 };
        }
        // Misses are consecutive, so the handler of the last hit never leaves.
        let somebody_hits = armed.listening.iter().any(|(_, misses)| *misses == 0);
        if armed.listening.len() > 1 && somebody_hits {
            armed.listening.retain(|(listener, misses)| {
                let stays = *misses < MISSES_TO_LEAVE;
                if !stays {
                    // Fails only if it is not registered.
                    let _ = self.cpus[*listener].epoll.remove(descriptor);
                }
                stays
            });
        }
    }
}

/// One of the handler threads.
struct NumberedHandler<'a> {
    handlers: &'a Handlers,
    number: usize,
}

impl Listener for NumberedHandler<'_> {
    fn listen(&mut self, child: &AddressSpace) {
        // On failure the governor retries.
        let _ = self.handlers.listen(child);
    }

    fn set_aside(&mut self, space: &AddressSpace) {
        self.handlers.set_aside(space);
    }

    fn note_fault(&mut self, space: &AddressSpace, thread: u32) {
        self.handlers.sample(self.number, space, thread);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handler() -> CpuHandler {
        CpuHandler::new(0).expect("an epoll")
    }

    #[test]
    fn a_thread_is_replaced_only_while_it_is_busy() {
        let handler = handler();
        assert!(handler.note(0, 100));
        let busy = handler.turn();
        assert!(!busy.is_overdue(100 + REPLACED_AFTER));
        assert!(busy.is_overdue(101 + REPLACED_AFTER));
        // It is done before the new one has its turn.
        assert!(handler.note(0, 0));
        let turn = Turn {
            thread: 1,
            busy_since: 0,
        };
        assert!(!handler.replace(busy, turn));
        assert!(!handler.turn().is_overdue(5000), "it waits");
        // It is not done.
        assert!(handler.note(0, 300));
        assert!(handler.replace(handler.turn(), turn));
        assert!(!handler.note(0, 0), "it was replaced");
        assert!(handler.note(1, 400));
        assert_eq!(handler.turn().busy_since, 400);
    }

    #[test]
    fn the_clock_may_wrap() {
        let turn = Turn {
            thread: 7,
            busy_since: u32::MAX - 5,
        };
        assert_eq!(Turn::unpacked(turn.packed()), turn);
        assert!(!turn.is_overdue(3));
        assert!(turn.is_overdue(REPLACED_AFTER));
    }
}
