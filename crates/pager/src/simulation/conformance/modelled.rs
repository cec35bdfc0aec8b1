//! A history on the model: which operations are possible when their turn comes, and what is seen after
//! each.
//!
//! The threads of programs are threads of shuttle's. One operation is over when each of them waits, as it
//! is on Linux.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::conformance::ask::ask;
use crate::simulation::conformance::facts::{Answer, Blocked, Facts, Step};
use crate::simulation::conformance::operation::{
    Call, FIRST_CHILD_THREAD, HELPER, Operation, PROCESSES, Pages, Request, THREADS, arena,
    first_thread_of, page, process_of,
};
use crate::simulation::model::helper::move_pages;
use crate::simulation::model::memory::{
    Dropping, Mapped, Memory, MemoryState, Registered, Unmapped,
};
use crate::simulation::model::{Inspector, Userfaultfd};
use crate::simulation::sync::lock_model;
use crate::simulation::{sync, time};
use crate::supervised::kernel::{MESSAGES, Memory as _, Message};
use memfold_sys::Errno;
use memfold_sys::channel::MoveRun;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::thread::{self, JoinHandle};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

/// The steps of a history on the model; the message if the model panics.
pub(crate) fn steps(history: &[Operation]) -> Result<Vec<Step>, String> {
    const MOST_STEPS: usize = 1_000_000;
    let mut config = Config::new();
    config.stack_size = 1 << 18;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
    config.silence_warnings = true;
    let steps = Arc::new(Mutex::new(Vec::new()));
    let (history, result) = (history.to_vec(), steps.clone());
    let run = move || {
        time::reset();
        sync::reset();
        let mut model = Model::new();
        for operation in &history {
            if let Some(operation) = model.possible(*operation) {
                let facts = model.perform(operation);
                lock_model(&result).push(Step { operation, facts });
            }
        }
        model.end();
    };
    let ran = catch_unwind(AssertUnwindSafe(|| {
        Runner::new(DriverLast::default(), config).run(run);
    }));
    match ran {
        Ok(()) => Ok(std::mem::take(&mut lock_model(&steps))),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(text.unwrap_or_else(|| "a panic".to_owned()))
        }
    }
}

/// Runs the first thread, which performs the operations, only when all others wait.
#[derive(Default)]
struct DriverLast {
    began: bool,
    random: u64,
}

impl Scheduler for DriverLast {
    fn new_execution(&mut self) -> Option<Schedule> {
        (!std::mem::replace(&mut self.began, true)).then(|| Schedule::new(0))
    }

    fn next_task(&mut self, runnable: &[&Task], _: Option<TaskId>, _: bool) -> Option<TaskId> {
        // Parked threads are offered, too: they may wake for no reason, but need not.
        let ready = runnable.iter().filter(|task| task.runnable());
        ready.map(|task| task.id()).max()
    }

    fn next_u64(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random
    }
}

/// What a thread is told, and what it answers.
#[derive(Default)]
struct Mailbox {
    call: Option<Call>,
    answer: Option<(Answer, Option<Arc<Memory>>)>,
    over: bool,
}

struct Thread {
    mailbox: Arc<Mutex<Mailbox>>,
    handle: JoinHandle<()>,
    /// What it does, until it has answered.
    told: Option<Call>,
}

impl Thread {
    fn is_busy(&self) -> bool {
        self.told.is_some()
    }

    /// What it is about to let go.
    fn drops(&self) -> Option<Pages> {
        match self.told {
            Some(Call::Drop(pages) | Call::Free(pages)) => Some(pages),
            _ => None,
        }
    }

    /// Whether what is read or left on a page depends on which call is first.
    fn races(&self, call: Call) -> bool {
        let access = |call| match call {
            Call::Read(page) => Some((page, false)),
            Call::Write(page, _) => Some((page, true)),
            _ => None,
        };
        let Some((other, other_write)) = access(call) else {
            return false;
        };
        let reaches = self.told.and_then(access);
        reaches.is_some_and(|(page, write)| page == other && (write || other_write))
    }
}

struct Process {
    memory: Arc<Memory>,
    has_userfaultfd: bool,
    is_gone: bool,
}

impl Process {
    fn uffd(&self) -> Userfaultfd {
        Userfaultfd(self.memory.clone())
    }
}

struct Model {
    processes: [Option<Process>; PROCESSES],
    threads: [Option<Thread>; THREADS],
    /// A child whose fork is under way, with whether its userfaultfd was read.
    forking: Option<(usize, bool)>,
}

impl Model {
    fn new() -> Model {
        let mut model = Model {
            processes: [const { None }; PROCESSES],
            threads: [const { None }; THREADS],
            forking: None,
        };
        model.start(0, Arc::new(Memory::new(0)), true);
        for thread in 1..FIRST_CHILD_THREAD {
            model.start_thread(thread);
        }
        model
    }

    fn start(&mut self, process: usize, memory: Arc<Memory>, has_userfaultfd: bool) {
        self.processes[process] = Some(Process {
            memory,
            has_userfaultfd,
            is_gone: false,
        });
    }

    fn start_thread(&mut self, number: usize) {
        let memory = self.memory(process_of(number)).clone();
        let mailbox = Arc::new(Mutex::new(Mailbox::default()));
        let its = mailbox.clone();
        let handle = thread::spawn(move || {
            while !lock_model(&its).over {
                let call = lock_model(&its).call.take();
                match call {
                    Some(call) => {
                        let answer = obey(&memory, number as u32, call);
                        lock_model(&its).answer = Some(answer);
                    }
                    None => thread::park(),
                }
            }
        });
        self.threads[number] = Some(Thread {
            mailbox,
            handle,
            told: None,
        });
    }

    fn memory(&self, process: usize) -> &Arc<Memory> {
        &self.processes[process].as_ref().expect("a process").memory
    }

    /// The operation as it can be performed now, if it can.
    fn possible(&self, operation: Operation) -> Option<Operation> {
        match operation {
            Operation::By(thread, call) => {
                let process = self.processes[process_of(thread)].as_ref()?;
                let is_idle = |thread: &Thread| !thread.is_busy();
                let can = thread == HELPER || self.threads[thread].as_ref().is_some_and(is_idle);
                // Threads that are woken together run in any order.
                let mut others = self.threads.iter().flatten();
                let can = can && !process.is_gone && !others.any(|other| other.races(call));
                let can = can && !self.reaches_dropped(process, call);
                let call = can.then(|| self.possible_call(process, call))?;
                call.map(|call| Operation::By(thread, call))
            }
            Operation::To(number, request) => {
                let process = self.processes[number].as_ref()?;
                let request = match request {
                    _ if !process.has_userfaultfd => return None,
                    Request::Receive(also_event) => {
                        let state = process.memory.state();
                        let (faults, events) = state.queues.unread();
                        // A `madvise` that goes on then comes to the next mapping.
                        let mut drops = { self.threads.iter().flatten() }.filter_map(Thread::drops);
                        let can_go_on = drops.all(|pages| is_sure(&state, pages, |_, _| true));
                        let also_event = if can_go_on { also_event } else { 0 };
                        // Where an event is read, its thread may queue the next one or be slower.
                        match (faults, events, also_event) {
                            (0, _, 0) => return None,
                            (faults, 1.., 0) => Request::Receive(faults),
                            (faults, 1.., _) => Request::Receive(faults + 1),
                            (0, 0, 1 | 2) => return None,
                            (_, 0, _) => Request::Receive(MESSAGES),
                        }
                    }
                    // Looking at what is gone fails in several ways, and memfold takes all for one.
                    Request::CopyOut(_) | Request::MappingAround(_) if process.is_gone => {
                        return None;
                    }
                    Request::CopyIn(pages, _) => {
                        is_sure(&process.memory.state(), pages, |_, _| true).then_some(request)?
                    }
                    request => request,
                };
                Some(Operation::To(number, request))
            }
            Operation::Exit(number) => {
                let process = self.processes[number].as_ref()?;
                let mut threads = self.threads.iter().enumerate();
                let waits = threads.any(|(thread, state)| {
                    let is_its = process_of(thread) == number;
                    let is_busy = state.as_ref().is_some_and(Thread::is_busy);
                    let faults = process.memory.state().queues.faulting();
                    is_its && is_busy && !faults.contains(&(thread as u32))
                });
                (!process.is_gone && !waits).then_some(operation)
            }
        }
    }

    /// Whether a call accesses what a `madvise` has dropped that waits for a later mapping's event: Linux
    /// flushes TLBs at its end, and until then another thread may reach the old page.
    fn reaches_dropped(&self, process: &Process, call: Call) -> bool {
        let (Call::Read(number) | Call::Write(number, _)) = call else {
            return false;
        };
        let accessed = page(number);
        let awaited = process.memory.state().dropping.clone();
        let mut drops = { self.threads.iter().flatten() }.filter_map(Thread::drops);
        drops.any(|pages| {
            let range = pages.range();
            let is_behind =
                |part: &Dropping| range.contains(part.range.start) && accessed < part.range.start;
            range.contains(accessed) && awaited.iter().any(is_behind)
        })
    }

    fn possible_call(&self, process: &Process, call: Call) -> Option<Call> {
        let state = process.memory.state();
        match call {
            Call::Map(pages) => state.is_free(pages.range()).then_some(call),
            Call::Remap(from, to, _) => {
                let to = Pages(to, from.1).range();
                let apart = from.range().intersection(to).is_empty();
                let inside = to.intersection(arena()) == to;
                // Linux refuses to move parts of several mappings; no program of the simulation tries.
                let mut pages = state.pages.range(from.range().start..from.range().end);
                let first = pages.next()?.1.clone();
                let alike = 1 + pages
                    .filter(|(_, page)| page.kind() == first.kind())
                    .count() as u64;
                (apart && inside && alike == from.1).then_some(call)
            }
            Call::Move(from, to) => {
                // The helper takes a page at the target for moved where it can not know, if nothing is at the source
                // or mappings change: the places of its stage are empty.
                let is_there = |page: VirtualPage| {
                    let mapped = state.pages.get(&page);
                    mapped.is_some_and(|mapped| mapped.frame.is_some())
                };
                let is_calm = state.queues.changing == 0;
                let mut steps = (0..from.1).map(|step| (page(from.0 + step), page(to + step)));
                let can = steps.all(|(from, to)| is_there(from) && is_calm || !is_there(to));
                can.then_some(call)
            }
            Call::Drop(pages) | Call::Free(pages) => {
                is_sure(&state, pages, |_, _| true).then_some(call)
            }
            Call::Fork(_) | Call::ForkUnreported(_) => {
                let child = (1..PROCESSES).find(|child| self.processes[*child].is_none())?;
                let everything = Pages::of(arena());
                // Zero pages are copied if any part of a mapping was ever written.
                let is_sure = is_sure(&state, everything, |one, next| {
                    one.prepared != next.prepared
                });
                let fork = match call {
                    Call::Fork(_) => Call::Fork(child),
                    _ => Call::ForkUnreported(child),
                };
                { self.forking.is_none() && is_sure }.then_some(fork)
            }
            call => Some(call),
        }
    }

    fn perform(&mut self, operation: Operation) -> Facts {
        let mut facts = Facts::default();
        match operation {
            Operation::By(HELPER, Call::Move(from, to)) => {
                let uffd = self.processes[0].as_ref().expect("a process").uffd();
                let mut run = MoveRun {
                    source: from.range().start.address(),
                    target: page(to).address(),
                    pages: from.1 as u32,
                    ..MoveRun::default()
                };
                move_pages(&uffd, &mut run);
                facts.say_answer(HELPER, Answer::Moved(run.moved, Errno(run.errno)));
            }
            Operation::By(thread, call) => {
                if let Call::Fork(child) | Call::ForkUnreported(child) = call {
                    self.forking = Some((child, false));
                }
                let thread = self.threads[thread].as_mut().expect("a thread");
                thread.told = Some(call);
                lock_model(&thread.mailbox).call = Some(call);
                thread.handle.thread().unpark();
            }
            Operation::To(process, request) => self.ask(process, request, &mut facts),
            Operation::Exit(number) => {
                let process = self.processes[number].as_mut().expect("a process");
                process.is_gone = true;
                process.memory.exit();
            }
        }
        self.settle(&mut facts);
        for (number, process) in self.processes.iter().enumerate() {
            let Some(process) = process else { continue };
            let what = |what: &str| format!("process {number}, {what}");
            if process.has_userfaultfd {
                facts.say(what("gone"), process.uffd().is_gone());
                facts.say(what("changing"), process.uffd().is_changing());
            }
            if !process.is_gone {
                facts.look(number, &Inspector(process.memory.clone()), arena());
            }
        }
        facts
    }

    /// Lets all threads run until they wait.
    fn settle(&mut self, facts: &mut Facts) {
        thread::yield_now();
        for number in 1..THREADS {
            let process = self.processes[process_of(number)].as_ref();
            let Some(thread) = self.threads[number]
                .as_mut()
                .filter(|thread| thread.is_busy())
            else {
                continue;
            };
            let process = process.expect("a thread's process");
            let answer = lock_model(&thread.mailbox).answer.take();
            if answer.is_some() || process.is_gone {
                thread.told = None;
            }
            match answer {
                _ if process.is_gone => {}
                Some((answer, child)) => {
                    facts.say_answer(number, answer);
                    if let Some(memory) = child {
                        let (child, read) = self.forking.take().expect("one fork at a time");
                        self.start(child, memory, read);
                        self.start_thread(first_thread_of(child));
                    }
                }
                None => {
                    let faults = process.memory.state().queues.faulting();
                    let blocked = match faults.contains(&(number as u32)) {
                        true => Blocked::Fault,
                        false => Blocked::Event,
                    };
                    facts.say_blocked(number, blocked);
                }
            }
        }
    }

    fn ask(&mut self, number: usize, request: Request, facts: &mut Facts) {
        let process = self.processes[number].as_ref().expect("a process");
        let (uffd, inspector) = (process.uffd(), Inspector(process.memory.clone()));
        match request {
            Request::IsRegistered(pages) => {
                let might = !uffd.is_changing() && is_registered_alike(&process.memory, pages);
                match uffd.is_registered(pages.range()) {
                    // It depends on whether neighbours were merged.
                    false if might => facts.leave_open("result"),
                    is_registered => facts.say("result", is_registered),
                }
            }
            Request::Receive(most) => {
                let mut messages = Vec::new();
                let read = uffd.read_at_most(most, &mut messages);
                facts.say("result", read);
                facts.say_messages(&messages, |thread| thread as usize);
                if messages
                    .iter()
                    .any(|message| matches!(message, Message::Fork(_)))
                    && let Some((_, is_read)) = &mut self.forking
                {
                    *is_read = true;
                }
            }
            request => ask(&uffd, &inspector, request, facts),
        }
    }

    /// Ends all threads, so that shuttle does not take those that wait for a deadlock.
    fn end(mut self) {
        let everything = PageRange {
            start: VirtualPage(0),
            end: VirtualPage(u64::MAX),
        };
        for _ in 0..THREADS * MESSAGES {
            for process in self.processes.iter().flatten() {
                let uffd = process.uffd();
                let _ = uffd.read(&mut Vec::new());
                let _ = uffd.unregister(everything);
                let _ = uffd.wake(everything);
            }
            self.settle(&mut Facts::default());
        }
        for thread in self.threads.iter().flatten() {
            lock_model(&thread.mailbox).over = true;
            thread.handle.thread().unpark();
        }
        for thread in self.threads.into_iter().flatten() {
            thread.handle.join().expect("a thread of the model");
        }
    }
}

/// Whether no mappings meet in a range that Linux may have merged, and where that `matters`: the number of
/// events depends on it, or whether a copy is refused.
fn is_sure(state: &MemoryState, pages: Pages, matters: impl Fn(&Mapped, &Mapped) -> bool) -> bool {
    let inside = pages.0..(pages.0 + pages.1).saturating_sub(1);
    { inside }.all(|number| {
        let pages = [page(number), page(number + 1)].map(|page| state.pages.get(&page));
        let [Some(one), Some(next)] = pages else {
            return true;
        };
        let attributes = |page: &Mapped| (page.registered, page.withheld, page.marked);
        let is_apart = attributes(one) != attributes(next);
        one.area == next.area || is_apart || !matters(one, next)
    })
}

/// Whether all of a range is mapped and registered in one way, in however many mappings.
fn is_registered_alike(memory: &Memory, pages: Pages) -> bool {
    let state = memory.state();
    let mut mapped = state.pages.range(pages.range().start..pages.range().end);
    let Some((_, first)) = mapped.next() else {
        return false;
    };
    let alike = mapped.filter(|(_, page)| page.registered == first.registered);
    first.registered != Registered::No && 1 + alike.count() as u64 == pages.1
}

/// What a thread of a program does, and the child if it forks.
fn obey(memory: &Arc<Memory>, thread: u32, call: Call) -> (Answer, Option<Arc<Memory>>) {
    let done = |result: Result<(), _>| match result {
        Ok(()) => Answer::Done,
        Err(Unmapped) => Answer::Unmapped,
    };
    let advised = |result: Result<(), _>| match result {
        Ok(()) => Answer::Done,
        Err(Unmapped) => Answer::Failed(Errno::ENOMEM),
    };
    let answer = match call {
        Call::Map(pages) => {
            let mut state = memory.state();
            state.map(pages.range(), false);
            // What a page must hold is known to Linux here.
            state.expected.clear();
            Answer::Done
        }
        Call::Read(number) => match memory.read(page(number), thread) {
            Ok(contents) => Answer::Contents(contents),
            Err(_) => Answer::Unmapped,
        },
        Call::Write(number, tag) => done(memory.write(page(number), thread, tag)),
        Call::Populate(number) => match memory.populate_write(page(number), thread) {
            Ok(()) => Answer::Done,
            Err(_) => Answer::Failed(Errno::ENOMEM),
        },
        Call::Drop(pages) => advised(memory.drop_pages(pages.range())),
        Call::Unmap(pages) => {
            memory.unmap(pages.range());
            Answer::Done
        }
        Call::Remap(from, to, stays) => {
            memory.remap(from.range(), page(to), stays);
            Answer::Done
        }
        Call::Keep(pages) => advised(memory.keep(pages.range())),
        Call::Give(pages) => advised(memory.give(pages.range())),
        Call::Mark(pages) => advised(memory.mark(pages.range())),
        Call::Free(pages) => advised(memory.free_pages(pages.range())),
        Call::ForkUnreported(child) => {
            return (
                Answer::Forked,
                Some(memory.fork_unreported(child as i32, false)),
            );
        }
        Call::Fork(child) => return (Answer::Forked, Some(memory.fork(child as i32))),
        Call::Carry(from, to) => match memory.carry_off(from.range(), page(to)) {
            Ok(_) => Answer::Done,
            Err(errno) => Answer::Failed(errno),
        },
        Call::Move(..) => unreachable!("the helper's"),
    };
    (answer, None)
}
