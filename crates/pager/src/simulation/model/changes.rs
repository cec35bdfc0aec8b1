//! Changes of mappings by the program: munmap, mremap, `madvise`, fork, exit.
//!
//! A change of registered memory is a step under `mmap_lock`; then its thread queues the event and waits
//! until it is read, and only then is the change over for the userfaultfd. `madvise` drops its pages last.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::model::memory::{
    Dropping, Expected, Frame, Mapped, Memory, MemoryState, Registered, Step, Unmapped,
};
use crate::simulation::model::userfaultfd::Userfaultfd;
use crate::simulation::sync::dawdle;
use crate::simulation::trace::{short, trace};
use crate::simulation::world::BEACON;
use crate::supervised::kernel::Message;
use crate::sync::interleave;
use crate::time;
use memfold_sys::Errno;
use std::sync::Arc;

impl Memory {
    /// Maps `pages` pages at the first of these places that is free.
    pub fn map(&self, places: impl Iterator<Item = VirtualPage>, pages: u64) -> Option<PageRange> {
        self.wait_while_stopped();
        let mut state = self.state();
        if state.gone {
            return None;
        }
        let ranges = places.map(|start| PageRange {
            start,
            end: start.plus(pages),
        });
        let range = { ranges }.find(|range| state.is_free(*range))?;
        state.map(range, false);
        Some(range)
    }

    /// Maps memory of the helper.
    pub fn map_own(&self, range: PageRange) {
        self.state().map(range, true);
    }

    /// munmap.
    pub fn unmap(&self, range: PageRange) {
        self.replace(range, false);
    }

    /// mmap over what is mapped there (`MAP_FIXED`).
    pub fn map_over(&self, range: PageRange) {
        self.replace(range, true);
    }

    fn replace(&self, range: PageRange, maps: bool) {
        let mut state = self.begin_change(range);
        let registered = state.unmap(range);
        if maps {
            state.map(range, false);
        }
        trace(|| format!("unmaps {}, maps anew {maps}", short(range)));
        state.queues.changing += u32::from(registered);
        drop(state);
        if registered {
            self.finish_change(Message::Unmap(range));
        }
    }

    /// `madvise(MADV_DONTNEED)`. Fails if anything is not mapped there.
    pub fn drop_pages(&self, range: PageRange) -> Result<(), Unmapped> {
        self.discard(range, true)
    }

    /// `madvise(MADV_FREE)`, by a kernel that has memory enough and frees nothing. Fails if anything is not mapped there.
    pub(crate) fn free_pages(&self, range: PageRange) -> Result<(), Unmapped> {
        self.discard(range, false)
    }

    /// A `madvise` that lets pages go, and drops them or not.
    fn discard(&self, range: PageRange, drops: bool) -> Result<(), Unmapped> {
        let mut state = self.begin_change(range);
        for page in range.start.0..range.end.0 {
            if let Some(expected) = state.expected.get_mut(&VirtualPage(page))
                && let Expected::Exactly(tag) = *expected
            {
                *expected = Expected::OrZero(tag);
            }
        }
        drop(state);
        // Each mapping has its own event, and gaps are passed over.
        let (mut next, mut result) = (range.start, Ok(()));
        while next < range.end {
            let mut state = self.begin_change(range);
            let Some((&start, mapped)) = state.pages.range(next..range.end).next() else {
                return Err(Unmapped);
            };
            if start > next {
                result = Err(Unmapped);
            }
            let registered = mapped.registered != Registered::No;
            let Some(mapping) = state.mapping(start) else {
                return Err(Unmapped);
            };
            let part = PageRange {
                start,
                end: mapping.end.min(range.end),
            };
            if !registered {
                // Without an event, `mmap_lock` is held throughout, and nothing is registered meanwhile.
                let pages = part.start.0..part.end.0;
                if drops {
                    pages.for_each(|page| state.drop_page(VirtualPage(page)));
                }
                next = part.end;
                continue;
            }
            state.queues.changing += 1;
            let number = state.next_drop;
            state.next_drop += 1;
            state.dropping.push(Dropping {
                number,
                range: part,
                is_locked: false,
            });
            drop(state);
            self.finish_change(Message::Remove(part));
            dawdle();
            let end = self.let_go_after_event(part, number, drops);
            self.state().dropping.retain(|drop| drop.number != number);
            next = end?;
        }
        result
    }

    /// What `madvise` lets go once its event was read, of what is mapped there by then: returns where it goes on.
    fn let_go_after_event(
        &self,
        part: PageRange,
        number: u32,
        drops: bool,
    ) -> Result<VirtualPage, Unmapped> {
        interleave();
        let mut state = self.state();
        let mut calls = state.dropping.iter_mut();
        if let Some(call) = calls.find(|call| call.number == number) {
            call.is_locked = true;
        }
        let mapping = state.mapping(part.start).ok_or(Unmapped)?;
        let end = mapping.end.min(part.end);
        if !drops {
            return Ok(end);
        }
        // No mapping changes before all pages are dropped, one by one.
        state.zapping += 1;
        drop(state);
        for page in part.start.0..end.0 {
            interleave();
            self.state().drop_page(VirtualPage(page));
        }
        self.state().zapping -= 1;
        Ok(end)
    }

    /// mremap to a fixed place, over what is mapped there. With `stays`, the mapping stays behind, empty
    /// (`MREMAP_DONTUNMAP`).
    pub fn remap(&self, from: PageRange, to: VirtualPage, stays: bool) {
        let state = self.begin_change(from);
        self.remap_in(state, from, to, stays);
    }

    /// mremap to the first of these places that is free.
    pub fn remap_to_free(
        &self,
        from: PageRange,
        mut places: impl Iterator<Item = VirtualPage>,
        stays: bool,
    ) -> Option<VirtualPage> {
        let state = self.begin_change(from);
        let to = places.find(|to| state.is_free(from.moved(from.start, *to)))?;
        self.remap_in(state, from, to, stays);
        Some(to)
    }

    fn remap_in(&self, mut state: Step<'_>, from: PageRange, to: VirtualPage, stays: bool) {
        let target = from.moved(from.start, to);
        let over = state.unmap(target);
        let registered = state.is_registered(from);
        // Each event to come is a change in progress of its own.
        let echo = registered && !stays;
        for (_, mapped) in state.mapped(from) {
            mapped.astray |= mapped.withheld && !registered;
        }
        state.queues.changing += u32::from(over) + u32::from(registered) + u32::from(echo);
        state.remap(from, to, stays);
        adversity::note_change(from);
        adversity::note_change(from.moved(from.start, to));
        trace(|| format!("moves {} to {:#x}, stays {stays}", short(from), to.0));
        drop(state);
        if over {
            self.finish_change(Message::Unmap(target));
        }
        if registered {
            self.finish_change(Message::Remap { from, to });
        }
        if echo {
            self.finish_change(Message::Unmap(from));
        }
    }

    /// The helper's mremap of a range over places of the stage, with `MREMAP_DONTUNMAP`. Returns whether that raised an
    /// event. What is not registered any more is left where it is: Linux takes it without an event, and the program is
    /// stopped (docs/limits.md).
    pub fn carry_off(&self, from: PageRange, to: VirtualPage) -> Result<bool, Errno> {
        let mut state = self.begin_change(from);
        let is_one = state
            .mapping(from.start)
            .is_some_and(|mapping| mapping.end >= from.end);
        if !is_one {
            return Err(Errno::EFAULT);
        }
        if !state.is_registered(from) {
            return Ok(false);
        }
        // What is there then is a copy of the source's mapping.
        state.set_apart(from.moved(from.start, to));
        let pages = (from.start.0..from.end.0).map(VirtualPage);
        for (step, source) in pages.enumerate() {
            let Some(mapped) = state.pages.get_mut(&source) else {
                continue;
            };
            let (frame, registered) = (mapped.frame.take(), mapped.registered);
            (mapped.protected, mapped.shared) = (false, false);
            if let Some(place) = state.pages.get_mut(&to.plus(step as u64)) {
                (place.frame, place.registered) = (frame, registered);
            }
        }
        state.queues.changing += 1;
        adversity::note_change(from);
        trace(|| format!("carries {} off to {:#x}", short(from), to.0));
        drop(state);
        self.finish_change(Message::Remap { from, to });
        Ok(true)
    }

    /// Keeps a range from forked children, and marks it, as the helper does.
    pub fn withhold(&self, range: PageRange) -> Result<(), Unmapped> {
        let kept = self.keep(range);
        if kept.is_err() && Bug::WithheldUnmarked.is_back() {
            return kept;
        }
        let marked = self.mark(range);
        kept.and(marked)
    }

    /// Keeps a range from forked children (`MADV_DONTFORK`). Gaps are passed over.
    pub fn keep(&self, range: PageRange) -> Result<(), Unmapped> {
        self.advise(range, |(_, marked)| (true, marked))
    }

    /// Gives a range to forked children (`MADV_DOFORK`).
    pub fn give(&self, range: PageRange) -> Result<(), Unmapped> {
        self.advise(range, |(_, marked)| (false, marked))
    }

    /// Marks a range (`MADV_RANDOM`).
    pub fn mark(&self, range: PageRange) -> Result<(), Unmapped> {
        self.advise(range, |(withheld, _)| (withheld, true))
    }

    /// Changes whether mappings are withheld, and whether they are marked.
    fn advise(
        &self,
        range: PageRange,
        advice: impl Fn((bool, bool)) -> (bool, bool),
    ) -> Result<(), Unmapped> {
        let mut state = self.begin_change(range);
        let (mut next, mut pages) = (range.start, 0);
        while let Some((&page, mapped)) = state.pages.range(next..range.end).next() {
            let before = (mapped.withheld, mapped.marked);
            let mapping = state.mapping(page).ok_or(Unmapped)?;
            let part = mapping.intersection(range);
            next = part.end;
            pages += part.pages();
            let after = advice(before);
            if after == before {
                continue;
            }
            state.split(mapping, part);
            for (_, mapped) in state.mapped(part) {
                (mapped.withheld, mapped.marked) = after;
            }
            trace(|| format!("withheld and marked, {after:?}: {}", short(part)));
        }
        drop(state);
        interleave();
        match pages == range.pages() {
            true => Ok(()),
            false => Err(Unmapped),
        }
    }

    /// fork where the userfaultfd asks for no event: the child's memory is not registered. If it is prepared, the child
    /// has all that its parent had.
    pub fn fork_unreported(&self, pid: i32, is_prepared: bool) -> Arc<Memory> {
        let child = self.fork_with(pid, (false, is_prepared));
        {
            let mut copy = child.state();
            for mapped in copy.pages.values_mut() {
                mapped.registered = Registered::No;
                mapped.protected = false;
            }
            copy.forget_zero_pages();
        }
        child
    }

    /// fork: a child that shares all pages. It has no thread before the event is read.
    pub fn fork(&self, pid: i32) -> Arc<Memory> {
        self.fork_with(pid, (true, true))
    }

    fn fork_with(&self, pid: i32, (is_reported, has_all): (bool, bool)) -> Arc<Memory> {
        let child = Arc::new(Memory::of_child(self, pid));
        let everything = PageRange {
            start: VirtualPage(0),
            end: VirtualPage(u64::MAX),
        };
        let mut state = self.begin_change(everything);
        // The helper's memory is withheld (`MADV_DONTFORK`), but for the beacon, which is empty in the child.
        let is_copied = |page: VirtualPage, mapped: &Mapped| {
            !mapped.withheld && (!mapped.own || page == BEACON)
        };
        {
            let mut copy = child.state();
            for (page, mapped) in state.mapped(everything) {
                if is_copied(page, mapped) {
                    mapped.shared = matches!(mapped.frame, Some(Frame::Page(_)));
                    copy.pages.insert(page, mapped.clone());
                }
            }
            copy.forget_zero_pages();
            if let Some(beacon) = copy.pages.get_mut(&BEACON) {
                beacon.frame = None;
            }
            copy.expected = state.expected.clone();
            let MemoryState {
                expected, pages, ..
            } = &mut *copy;
            let is_astray = |page: &VirtualPage| {
                let mapped = state.pages.get(page);
                mapped.is_some_and(|mapped| mapped.withheld && mapped.astray)
            };
            expected.retain(|page, _| pages.contains_key(page) || (has_all && !is_astray(page)));
            copy.areas = state.areas;
        }
        // Of what is not copied, no userfaultfd is made for the child.
        let registered = is_reported && child.state().is_registered(everything);
        state.queues.changing += u32::from(registered);
        trace(|| format!("forks {pid}"));
        drop(state);
        if registered {
            self.finish_change(Message::Fork(Userfaultfd(child.clone())));
        }
        if self.state().gone {
            // A parent that is killed meanwhile has no child.
            child.exit();
        }
        child
    }

    /// The last thread is gone.
    pub fn exit(&self) {
        interleave();
        let mut state = self.state();
        state.gone = true;
        state.pages.clear();
        state.expected.clear();
        state.queues.end();
    }

    /// Takes `mmap_lock` for a change, once no ioctl is changing pages.
    fn begin_change(&self, range: PageRange) -> Step<'_> {
        loop {
            self.wait_while_stopped();
            let state = self.state();
            let busy = state.queues.changing_pages > 0 && state.is_registered(range);
            if !busy && state.zapping == 0 {
                return state;
            }
            drop(state);
            time::yield_now();
        }
    }

    /// Queues an event, and waits until it is read.
    fn finish_change(&self, event: Message) {
        // `mmap_lock` is released; others may change and queue before this.
        dawdle();
        if !matches!(event, Message::Fork(_)) {
            (0..adversity::delay_event()).for_each(|_| time::yield_now());
        }
        let mut state = self.state();
        if state.gone {
            // A killed thread takes its event back before others can see it.
            drop(state);
        } else {
            trace(|| format!("posts {event:x?}"));
            let number = state.queues.post(event);
            drop(state);
            self.wait(|state| state.gone || state.queues.was_read(number));
        }
        dawdle();
        self.state().queues.changing -= 1;
        trace(|| "has changed".to_owned());
    }
}

impl MemoryState {
    /// Whether any page of a range is registered.
    pub fn is_registered(&self, range: PageRange) -> bool {
        let mut pages = self.pages.range(range.start..range.end);
        pages.any(|(_, page)| page.registered != Registered::No)
    }

    /// `madvise` drops a page.
    fn drop_page(&mut self, page: VirtualPage) {
        trace(|| format!("drops {:#x}", page.0));
        if let Some(mapped) = self.pages.get_mut(&page) {
            mapped.frame = None;
            mapped.protected = false;
            mapped.shared = false;
        }
        match self.expected.get_mut(&page) {
            // It may have been moved to the stage, which is as if it was written afterwards.
            Some(Expected::WrittenOrZero(_)) | None => {}
            Some(expected) => *expected = Expected::Exactly(0),
        }
    }

    /// In a forked child: page tables of mappings without an `anon_vma` were not copied, unless pages may be
    /// protected there.
    fn forget_zero_pages(&mut self) {
        for mapped in self.pages.values_mut() {
            let is_copied = matches!(
                mapped.registered,
                Registered::Protectable | Registered::Tracked
            );
            if !mapped.prepared && !is_copied {
                mapped.frame = None;
            }
        }
    }

    /// Unmaps a range; returns whether it was registered.
    fn unmap(&mut self, range: PageRange) -> bool {
        let registered = self.is_registered(range);
        for page in range.start.0..range.end.0 {
            self.pages.remove(&VirtualPage(page));
            self.expected.remove(&VirtualPage(page));
        }
        registered
    }

    fn remap(&mut self, from: PageRange, to: VirtualPage, stays: bool) {
        self.areas += 1;
        let area = self.areas;
        let whole = self.mapping(from.start) == Some(from);
        for step in 0..from.pages() {
            let (source, target) = (from.start.plus(step), to.plus(step));
            let Some(mapped) = self.pages.remove(&source) else {
                continue;
            };
            if stays {
                // The mapping is not split.
                let empty = Mapped {
                    frame: None::<Frame>,
                    protected: false,
                    shared: false,
                    prepared: mapped.prepared && !whole,
                    ..mapped.clone()
                };
                self.pages.insert(source, empty);
            }
            self.pages.insert(target, Mapped { area, ..mapped });
            if let Some(expected) = self.expected.remove(&source) {
                self.expected.insert(target, expected);
                if stays {
                    self.expected.insert(source, Expected::Exactly(0));
                }
            }
        }
    }
}
