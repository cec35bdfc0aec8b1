//! The queues of messages of one userfaultfd.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::trace::trace;
use crate::supervised::kernel::Message;
use shuttle::thread::{self, Thread};
use std::collections::VecDeque;

/// Faults and events of one userfaultfd.
#[derive(Default)]
pub struct Queues {
    /// Changes in progress, or with an unread event (`mmap_changing`).
    pub changing: u32,
    /// Ioctls under way that change pages; no change of the mappings begins meanwhile
    /// (`map_changing_lock`).
    pub changing_pages: u32,
    faults: Vec<FaultEntry>,
    events: VecDeque<(u64, Message, Thread)>,
    /// The events that were read, until their threads go on.
    read: Vec<u64>,
    next: u64,
    /// Threads that serve it.
    listeners: Vec<Listener>,
    /// Threads to wake at the end of the step.
    woken: Vec<Thread>,
}

/// A thread that waits for messages with edge-triggered epoll: it is told of what has come since it was told last, and of
/// what it left unread only by more that comes, or by a reminder.
struct Listener {
    thread: Thread,
    /// It is to be told.
    is_told: bool,
}

struct FaultEntry {
    number: u64,
    page: VirtualPage,
    write: bool,
    protected: bool,
    thread: u32,
    read: bool,
    sleeper: Thread,
}

impl Queues {
    /// Queues a fault of the calling thread.
    pub fn fault(&mut self, page: VirtualPage, write: bool, protected: bool, thread: u32) -> u64 {
        self.next += 1;
        self.faults.push(FaultEntry {
            number: self.next,
            page,
            write,
            protected,
            thread,
            read: false,
            sleeper: thread::current(),
        });
        self.alert();
        self.next
    }

    /// Whether the thread of a fault still waits.
    pub fn waits(&self, number: u64) -> bool {
        self.faults.iter().any(|fault| fault.number == number)
    }

    /// Pages whose threads wait.
    pub fn waiting(&self) -> Vec<VirtualPage> {
        self.faults.iter().map(|fault| fault.page).collect()
    }

    /// The threads that wait for a page.
    pub fn faulting(&self) -> Vec<u32> {
        self.faults.iter().map(|fault| fault.thread).collect()
    }

    /// Faults that were not read yet, and events.
    pub fn unread(&self) -> (usize, usize) {
        let faults = self.faults.iter().filter(|fault| !fault.read).count();
        (faults, self.events.len())
    }

    /// Wakes the threads that wait for pages of a range.
    pub fn wake(&mut self, range: PageRange) {
        let in_range = |fault: &mut FaultEntry| range.contains(fault.page);
        let woken = self.faults.extract_if(.., in_range);
        self.woken.extend(woken.map(|fault| fault.sleeper));
    }

    /// Queues an event of the calling thread.
    pub fn post(&mut self, event: Message) -> u64 {
        self.next += 1;
        self.events.push_back((self.next, event, thread::current()));
        self.alert();
        self.next
    }

    /// The address space ends: no thread waits any longer, and no event is there to read.
    pub fn end(&mut self) {
        let faults = self.faults.drain(..).map(|fault| fault.sleeper);
        let events = self.events.drain(..).map(|(.., sleeper)| sleeper);
        self.woken.extend(faults.chain(events));
        self.alert();
    }

    /// Whether an event was read.
    pub fn was_read(&self, number: u64) -> bool {
        self.read.contains(&number)
    }

    /// Tells the threads that serve this userfaultfd.
    pub fn alert(&mut self) {
        for listener in &mut self.listeners {
            listener.is_told = true;
            self.woken.push(listener.thread.clone());
        }
    }

    /// Tells them of what is unread (`EPOLL_CTL_MOD`).
    pub fn remind(&mut self) {
        if self.is_readable() {
            self.alert();
        }
    }

    /// The threads that the step woke.
    pub fn take_woken(&mut self) -> Vec<Thread> {
        std::mem::take(&mut self.woken)
    }

    /// Adds a thread that serves it, unless it does, and tells it of what is unread.
    pub fn listen(&mut self, thread: Thread) {
        let mut listeners = self.listeners.iter();
        if listeners.any(|listener| listener.thread.id() == thread.id()) {
            return;
        }
        let is_told = self.is_readable();
        if is_told {
            self.woken.push(thread.clone());
        }
        self.listeners.push(Listener { thread, is_told });
    }

    /// No thread serves it.
    pub fn forget(&mut self) {
        self.listeners.clear();
    }

    /// Reads the next message: faults come before events.
    pub fn next_message(&mut self) -> Option<Message> {
        if let Some(fault) = self.faults.iter_mut().find(|fault| !fault.read) {
            fault.read = true;
            adversity::note_fault(fault.page);
            return Some(Message::Fault {
                page: fault.page,
                write: fault.write,
                protected: fault.protected,
                thread: fault.thread,
            });
        }
        let (number, event, sleeper) = self.events.pop_front()?;
        self.read.push(number);
        self.woken.push(sleeper);
        trace(|| format!("reads event {event:x?}"));
        Some(event)
    }

    /// Whether the next message is that of a fork.
    pub fn is_fork_next(&self) -> bool {
        let is_fork = |(_, event, _): &(u64, Message, Thread)| matches!(event, Message::Fork(_));
        self.faults.iter().all(|fault| fault.read) && self.events.front().is_some_and(is_fork)
    }

    /// Whether the event of a move to one of these pages is unread.
    pub fn is_move_unread(&self, is_target: impl Fn(VirtualPage) -> bool) -> bool {
        let mut events = self.events.iter();
        events.any(|(_, event, _)| matches!(event, Message::Remap { to, .. } if is_target(*to)))
    }

    /// Whether the calling thread is told that a message can be read (`epoll_wait`), once.
    pub fn take_told(&mut self) -> bool {
        let own = thread::current().id();
        let mut listeners = self.listeners.iter_mut();
        let told = listeners.find(|listener| listener.thread.id() == own);
        told.is_some_and(|listener| std::mem::take(&mut listener.is_told)) && self.is_readable()
    }

    fn is_readable(&self) -> bool {
        !self.events.is_empty() || self.faults.iter().any(|fault| !fault.read)
    }
}
