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
    listeners: Vec<Thread>,
    /// Threads to wake at the end of the step.
    woken: Vec<Thread>,
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

    /// Wakes the threads that serve this userfaultfd.
    pub fn alert(&mut self) {
        self.woken.extend(self.listeners.iter().cloned());
    }

    /// The threads that the step woke.
    pub fn take_woken(&mut self) -> Vec<Thread> {
        std::mem::take(&mut self.woken)
    }

    /// Adds a thread that serves it.
    pub fn listen(&mut self, thread: Thread) {
        self.listeners.push(thread);
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

    /// Whether a message can be read, and is listened for.
    pub fn has_work(&self) -> bool {
        !self.listeners.is_empty() && self.is_readable()
    }

    fn is_readable(&self) -> bool {
        !self.events.is_empty() || self.faults.iter().any(|fault| !fault.read)
    }
}
