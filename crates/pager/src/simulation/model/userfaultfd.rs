//! A program's userfaultfd: its queues of messages, and its ioctls.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::model::memory::Memory as Program;
use crate::simulation::model::memory::{Frame, MemoryState, Registered, gather};
use crate::simulation::sync::{dawdle, stall};
use crate::simulation::trace::{short, trace};
use crate::supervised::kernel::{MESSAGES, Memory, Message};
use crate::sync::interleave;
use crate::time;
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

    /// [`Memory::read`] of at most `most` messages.
    pub fn read_at_most(&self, most: usize, messages: &mut Vec<Message>) -> Result<usize, Errno> {
        let mut read = 0;
        while read < most {
            // The kernel looks for each message anew.
            interleave();
            // It has no descriptor for a child's userfaultfd, and what was read before is all.
            if self.0.state().queues.is_fork_next() && adversity::is_fork_unread() {
                return if read > 0 {
                    Ok(read)
                } else {
                    Err(Errno::EMFILE)
                };
            }
            let Some(message) = self.0.state().queues.next_message() else {
                break;
            };
            messages.push(message);
            read += 1;
        }
        Ok(read)
    }

    /// Begins to change pages; refused while mappings change.
    pub fn begin(&self) -> Result<ChangingPages<'_>, Errno> {
        interleave();
        let mut state = self.0.state();
        if state.queues.changing > 0 {
            return Err(Errno::EAGAIN);
        }
        if state.gone {
            return Err(Errno::ESRCH);
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
        stall(Some(first));
        let changing = self.begin().map_err(|errno| stopped(0, errno))?;
        let range = PageRange {
            start: first,
            end: first.plus(pages),
        };
        {
            // All of it must be in one mapping, which is looked at first.
            let mut state = changing.0.state();
            state.prepare(first);
            let mapping = state.mapping(first);
            if mapping.is_none_or(|mapping| mapping.end < range.end) {
                return Err(stopped(0, Errno::ENOENT));
            }
        }
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
                    mapped.shared = false;
                    adversity::note_change(PageRange::around(page, 1));
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
            changing.0.state().queues.wake(range);
        }
        Ok(())
    }

    fn set_protection(
        &self,
        range: PageRange,
        registered: Registered,
        protect: bool,
    ) -> Result<(), Errno> {
        trace(|| format!("protect {protect} {registered:?} {}", short(range)));
        let changing = self.begin()?;
        interleave();
        let mut state = changing.0.state();
        // Gaps are passed over; a mapping that is not registered so ends it, or all where accesses are tracked.
        let mut result = Err(Errno::ENOENT);
        let is_tracking = registered == Registered::Tracked;
        if is_tracking
            && state
                .mapped(range)
                .any(|(_, page)| page.registered != registered)
        {
            return result;
        }
        for (_, page) in state.mapped(range) {
            if page.registered != registered {
                result = Err(Errno::ENOENT);
                break;
            }
            if page.frame.is_some() || !protect {
                page.protected = protect;
            }
            result = Ok(());
        }
        if !protect && result.is_ok() {
            state.queues.wake(range);
        }
        result
    }

    fn register_as(&self, range: PageRange, how: Registered) -> Result<(), Errno> {
        interleave();
        trace(|| format!("register {}", short(range)));
        let mut state = self.0.state();
        if state.gone {
            return Err(Errno::ENOMEM);
        }
        if adversity::is_refused() {
            return Err(Errno::ENOMEM);
        }
        let is_other = |before| {
            let modes = [before, how];
            modes.contains(&Registered::Protectable) && modes.contains(&Registered::Tracked)
        };
        if state
            .mapped(range)
            .any(|(_, page)| is_other(page.registered))
        {
            return Err(Errno::EBUSY);
        }
        // What is registered for more stays so.
        let changed = state.register(range, |before| match before {
            Registered::Protectable | Registered::Tracked => before,
            _ => how,
        });
        if changed.is_some() {
            Ok(())
        } else {
            Err(Errno::EINVAL)
        }
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
        self.set_protection(range, Registered::Protectable, true)
    }

    fn unprotect(&self, range: PageRange) -> Result<(), Errno> {
        self.set_protection(range, Registered::Protectable, false)
    }

    fn register(&self, range: PageRange) -> Result<(), Errno> {
        self.register_as(range, Registered::Missing)
    }

    fn register_protectable(&self, range: PageRange) -> Result<(), Errno> {
        self.register_as(range, Registered::Protectable)
    }

    fn register_tracked(&self, range: PageRange) -> Result<(), Errno> {
        self.register_as(range, Registered::Tracked)
    }

    fn track(&self, range: PageRange) -> Result<(), Errno> {
        self.set_protection(range, Registered::Tracked, true)
    }

    fn unregister(&self, range: PageRange) -> Result<(), Errno> {
        interleave();
        let mut state = self.0.state();
        if state.gone {
            return Err(Errno::ENOMEM);
        }
        let changed = state.register(range, |_| Registered::No);
        for part in changed.ok_or(Errno::EINVAL)? {
            for (_, page) in state.mapped(part) {
                page.protected = false;
            }
            state.queues.wake(part);
        }
        Ok(())
    }

    fn await_mmap_lock(&self, _: VirtualPage) -> Result<(), Errno> {
        interleave();
        loop {
            let state = self.0.state();
            if state.gone {
                return Err(Errno::ENOMEM);
            }
            if state.zapping == 0 || Bug::ZappingNotAwaited.is_back() {
                return Ok(());
            }
            drop(state);
            time::yield_now();
        }
    }

    fn is_registered(&self, range: PageRange) -> bool {
        interleave();
        let mut state = self.0.state();
        if state.queues.changing > 0 {
            return false;
        }
        state.prepare(range.start);
        let is_registered = |page: VirtualPage| state.pages[&page].registered != Registered::No;
        let mapping = state.mapping(range.start);
        mapping.is_some_and(|mapping| range.end <= mapping.end) && is_registered(range.start)
    }

    fn is_changing(&self) -> bool {
        interleave();
        self.0.state().queues.changing > 0
    }

    fn is_gone(&self) -> bool {
        self.0.state().gone
    }

    fn read(&self, messages: &mut Vec<Message>) -> Result<usize, Errno> {
        dawdle();
        self.read_at_most(MESSAGES, messages)
    }
}
