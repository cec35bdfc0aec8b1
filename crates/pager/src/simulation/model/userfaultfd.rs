//! A program's userfaultfd: its queues of messages, and its ioctls.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::model::memory::Memory as Program;
use crate::simulation::model::memory::{Frame, MemoryState, Registered, gather, this_thread};
use crate::simulation::trace::{short, trace};
use crate::supervised::kernel::{MESSAGES, Memory, Message};
use crate::sync::interleave;
use memfold_swap::Page;
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use shuttle::thread::Thread;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

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
            sleeper: this_thread(),
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

    fn wake(&mut self, range: PageRange) {
        let in_range = |fault: &mut FaultEntry| (range.start..range.end).contains(&fault.page);
        let woken = self.faults.extract_if(.., in_range);
        self.woken.extend(woken.map(|fault| fault.sleeper));
    }

    /// Queues an event of the calling thread.
    pub fn post(&mut self, event: Message) -> u64 {
        self.next += 1;
        self.events.push_back((self.next, event, this_thread()));
        self.alert();
        self.next
    }

    /// The address space ends: its helper waits no longer.
    pub fn end(&mut self) {
        let faults = self.faults.drain(..);
        self.woken.extend(faults.map(|fault| fault.sleeper));
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

    /// Whether a message can be read, and is listened for.
    pub fn has_work(&self) -> bool {
        !self.listeners.is_empty() && self.is_readable()
    }

    fn is_readable(&self) -> bool {
        !self.events.is_empty() || self.faults.iter().any(|fault| !fault.read)
    }
}

/// A program's userfaultfd.
pub struct Userfaultfd(pub Arc<Program>);

impl std::fmt::Debug for Userfaultfd {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "userfaultfd of process {}", self.0.pid)
    }
}

impl Userfaultfd {
    /// Another descriptor of it.
    pub fn try_clone(&self) -> io::Result<Userfaultfd> {
        Ok(Userfaultfd(self.0.clone()))
    }

    /// Begins to change pages; refused while mappings change.
    pub fn begin(&self) -> Result<ChangingPages<'_>, Errno> {
        interleave();
        let mut state = self.0.state();
        if state.gone {
            return Err(Errno::ESRCH);
        }
        if state.queues.changing > 0 {
            return Err(Errno::EAGAIN);
        }
        state.queues.changing_pages += 1;
        Ok(ChangingPages(&self.0))
    }

    /// Fills missing pages in order, each in one step.
    fn fill(
        &self,
        first: VirtualPage,
        pages: u64,
        frame: impl Fn(u64) -> Frame,
        wakes: bool,
    ) -> Result<(), Partial> {
        let stopped = |step: u64, errno| Partial {
            done: step * PAGE_SIZE as u64,
            errno: if step > 0 { Errno::EAGAIN } else { errno },
        };
        let changing = self.begin().map_err(|errno| stopped(0, errno))?;
        for step in 0..pages {
            interleave();
            let page = first.plus(step);
            let mut state = changing.0.state();
            let MemoryState { pages, queues, .. } = &mut *state;
            let errno = match pages.get_mut(&page) {
                None => Errno::ENOENT,
                Some(mapped) if mapped.registered == Registered::No => Errno::ENOENT,
                Some(mapped) if mapped.frame.is_some() => Errno::EEXIST,
                Some(mapped) => {
                    mapped.frame = Some(frame(step));
                    mapped.protected = false;
                    continue;
                }
            };
            if step > 0 && wakes {
                queues.wake(PageRange {
                    start: first,
                    end: page,
                });
            }
            drop(state);
            trace(|| format!("filling {:#x} stops after {step}: {errno}", first.0));
            return Err(stopped(step, errno));
        }
        interleave();
        trace(|| format!("filled {:#x}, {pages} pages", first.0));
        if wakes {
            let range = PageRange {
                start: first,
                end: first.plus(pages),
            };
            changing.0.state().queues.wake(range);
        }
        Ok(())
    }

    fn set_protection(&self, range: PageRange, protect: bool) -> Result<(), Errno> {
        trace(|| format!("protect {protect} {}", short(range)));
        let changing = self.begin()?;
        interleave();
        let mut state = changing.0.state();
        let protectable = |state: &MemoryState| {
            let mut pages = state.pages.range(range.start..range.end);
            pages.all(|(_, page)| page.registered == Registered::Protectable)
        };
        let mapped = state.pages.range(range.start..range.end).count() as u64;
        let whole = mapped == range.pages() && protectable(&state);
        for (_, page) in state.mapped(range) {
            if page.registered != Registered::Protectable {
                break;
            }
            if page.frame.is_some() || !protect {
                page.protected = protect;
            }
        }
        if !protect {
            state.queues.wake(range);
        }
        if whole { Ok(()) } else { Err(Errno::ENOENT) }
    }

    fn register_as(&self, range: PageRange, how: Registered) -> Result<(), Errno> {
        interleave();
        trace(|| format!("register {}", short(range)));
        let mut state = self.0.state();
        if state.gone {
            return Err(Errno::ESRCH);
        }
        let mut any = false;
        for (_, page) in state.mapped(range) {
            page.registered = how;
            any = true;
        }
        if any { Ok(()) } else { Err(Errno::EINVAL) }
    }
}

/// While it lives, no change of the mappings begins.
pub struct ChangingPages<'a>(pub &'a Program);

impl Drop for ChangingPages<'_> {
    fn drop(&mut self) {
        self.0.state().queues.changing_pages -= 1;
    }
}

impl Memory for Userfaultfd {
    fn copy_in(&self, page: VirtualPage, source: &[u8], pages: u64) -> Result<(), Partial> {
        let contents = |step: u64| {
            let start = step as usize * PAGE_SIZE;
            Frame::of(gather(&source[start..start + PAGE_SIZE]))
        };
        self.fill(page, pages, contents, true)
    }

    fn put_page(&self, page: VirtualPage, contents: &Page) -> Result<(), Partial> {
        self.fill(page, 1, |_| Frame::of(gather(contents)), false)
    }

    fn zero(&self, page: VirtualPage) -> Result<(), Partial> {
        self.fill(page, 1, |_| Frame::Zero, true)
    }

    fn wake(&self, range: PageRange) -> Result<(), Errno> {
        interleave();
        trace(|| format!("wakes {}", short(range)));
        self.0.state().queues.wake(range);
        Ok(())
    }

    fn protect(&self, range: PageRange) -> Result<(), Errno> {
        self.set_protection(range, true)
    }

    fn unprotect(&self, range: PageRange) -> Result<(), Errno> {
        self.set_protection(range, false)
    }

    fn register(&self, range: PageRange) -> Result<(), Errno> {
        self.register_as(range, Registered::Missing)
    }

    fn register_protectable(&self, range: PageRange) -> Result<(), Errno> {
        self.register_as(range, Registered::Protectable)
    }

    fn unregister(&self, range: PageRange) -> Result<(), Errno> {
        interleave();
        let mut state = self.0.state();
        for (_, page) in state.mapped(range) {
            page.registered = Registered::No;
            page.protected = false;
        }
        state.queues.wake(range);
        Ok(())
    }

    fn is_registered(&self, range: PageRange) -> bool {
        interleave();
        let state = self.0.state();
        let mut pages = state.pages.range(range.start..range.end);
        let Some((_, first)) = pages.next() else {
            return false;
        };
        let alike = |page: &super::memory::Mapped| {
            page.area == first.area && page.registered == first.registered
        };
        let count = 1 + pages.filter(|(_, page)| alike(page)).count() as u64;
        state.queues.changing == 0 && first.registered != Registered::No && count == range.pages()
    }

    fn is_changing(&self) -> bool {
        interleave();
        self.0.state().queues.changing > 0
    }

    fn is_gone(&self) -> bool {
        self.0.state().gone
    }

    fn read(&self, messages: &mut Vec<Message>) -> Result<usize, Errno> {
        let mut read = 0;
        while read < MESSAGES {
            // The kernel looks for each message anew.
            interleave();
            let mut state = self.0.state();
            let queues = &mut state.queues;
            if let Some(fault) = queues.faults.iter_mut().find(|fault| !fault.read) {
                fault.read = true;
                messages.push(Message::Fault {
                    page: fault.page,
                    write: fault.write,
                    protected: fault.protected,
                    thread: fault.thread,
                });
            } else if let Some((number, event, sleeper)) = queues.events.pop_front() {
                queues.read.push(number);
                queues.woken.push(sleeper);
                trace(|| format!("reads event {event:x?}"));
                messages.push(event);
            } else {
                break;
            }
            read += 1;
        }
        Ok(read)
    }
}
