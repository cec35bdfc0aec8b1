//! A program's userfaultfd: its queues of messages, and its ioctls.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::model::memory::Memory as Program;
use crate::simulation::model::memory::{Frame, MemoryState, Registered, gather};
use crate::simulation::sync::stall;
use crate::simulation::trace::{short, trace};
use crate::supervised::kernel::{MESSAGES, Memory, Message};
use crate::sync::interleave;
use memfold_swap::Page;
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use std::io;
use std::sync::Arc;

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
        stall();
        let changing = self.begin().map_err(|errno| stopped(0, errno))?;
        for step in 0..pages {
            interleave();
            let page = first.plus(step);
            let refused = adversity::is_refused();
            let mut state = changing.0.state();
            let MemoryState { pages, queues, .. } = &mut *state;
            let errno = match pages.get_mut(&page) {
                _ if refused => Errno::ENOMEM,
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
        if adversity::is_refused() {
            return Err(Errno::ENOMEM);
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
        stall();
        let mut read = 0;
        while read < MESSAGES {
            // The kernel looks for each message anew.
            interleave();
            let Some(message) = self.0.state().queues.next_message() else {
                break;
            };
            messages.push(message);
            read += 1;
        }
        Ok(read)
    }
}
