//! Programs: threads that do the steps of a history and check each page that they read.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::history::{AREA_PAGES, AREAS, Step, places};
use crate::simulation::model::SharedChannel;
use crate::simulation::model::memory::{BEACON as BEACON_TAG, Mapped, Memory, Registered};
use crate::simulation::sync::dawdle;
use crate::simulation::world::{BEACON, World, named};
use crate::sync::interleave;
use crate::time;
use memfold_sys::channel::fork_step::{FORKED, GIVEN, GO, LISTED, NOT_FORKED};
use memfold_sys::channel::{ASK_FORK, GRANTED};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One thread of a program.
pub(crate) struct ProgramThread {
    world: Arc<World>,
    memory: Arc<Memory>,
    areas: [Option<PageRange>; AREAS],
    /// Where it maps areas.
    places: Vec<VirtualPage>,
    /// Its TID.
    thread: u32,
    written: u64,
}

impl ProgramThread {
    /// A thread without areas.
    pub(crate) fn new(
        world: Arc<World>,
        memory: Arc<Memory>,
        places: Vec<VirtualPage>,
    ) -> ProgramThread {
        ProgramThread {
            places,
            thread: world.next_thread(),
            world,
            memory,
            areas: [None; AREAS],
            written: 0,
        }
    }

    /// Does the steps, then checks all its pages.
    pub(crate) fn run(mut self, steps: &[Step]) {
        steps.iter().for_each(|step| self.step(step));
        for area in 0..AREAS {
            self.check(area);
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Map(area, pages) => {
                if self.areas[area].is_none() {
                    self.areas[area] = self.memory.map(self.places.iter().copied(), pages);
                }
            }
            Step::Write(area, page) => self.write(area, page),
            Step::Read(area, page) => self.read(area, page),
            Step::Poke(number) => {
                if let Some(page) = self.any_page(number) {
                    self.written += 1;
                    // Another thread may have unmapped it.
                    let _ = self.memory.write(page, self.thread, self.tag());
                }
            }
            Step::Peek(number) => {
                if let Some(page) = self.any_page(number) {
                    let _ = self.memory.read(page, self.thread);
                }
            }
            Step::AwaitPageOut(number) => self.await_page_out(number),
            Step::Pause(looks) => (0..looks).for_each(|_| time::yield_now()),
            Step::Rest(area) => self.rest(area),
            Step::Fill(area) => (0..AREA_PAGES).for_each(|page| self.write(area, page)),
            Step::Check(area) => self.check(area),
            Step::Drop(area, first) => {
                if let Some(range) = self.areas[area] {
                    let start = range.start.plus(first.min(range.pages() - 1));
                    // Another thread may have unmapped some.
                    let _ = self.memory.drop_pages(PageRange { start, ..range });
                }
            }
            Step::Free(area) => {
                if let Some(range) = self.areas[area] {
                    let _ = self.memory.free_pages(range);
                }
            }
            Step::Unmap(area) => {
                if let Some(range) = self.areas[area].take() {
                    self.memory.unmap(range);
                }
            }
            Step::MapOver(area) => {
                if let Some(range) = self.areas[area] {
                    self.memory.map_over(range);
                }
            }
            Step::Move(area, stays) => self.relocate(area, stays),
            Step::Away(area) => self.move_away_and_back(area),
            Step::MoveOver(area, other) => self.move_over(area, other),
            Step::Fork(ref child) => self.fork(child.clone()),
            Step::LateWrite(area, other) => self.late_write(area, other),
            Step::Connect => self.world.connect(&self.memory),
            Step::Kill => self.world.kill(&self.memory),
        }
    }

    fn page(&self, area: usize, page: u64) -> Option<VirtualPage> {
        let range = self.areas[area]?;
        (page < range.pages()).then(|| range.start.plus(page))
    }

    /// Contents that no other write has.
    fn tag(&self) -> u64 {
        u64::from(self.thread) << 32 | self.written
    }

    /// One of the pages of all threads.
    fn any_page(&self, number: u64) -> Option<VirtualPage> {
        let state = self.memory.state();
        let count = state.expected.len();
        let number = (number as usize).checked_rem(count)?;
        state.expected.keys().nth(number).copied()
    }

    fn rest(&self, area: usize) {
        const LOOKS: usize = 40;
        let managed = |page| {
            let state = self.memory.state();
            let mapped: Option<&Mapped> = state.pages.get(&page);
            mapped.is_none_or(|mapped| mapped.registered != Registered::No)
        };
        for _ in 0..LOOKS {
            if self.page(area, 0).is_none_or(managed) {
                return;
            }
            time::yield_now();
        }
    }

    fn await_page_out(&self, number: u64) {
        const LOOKS: usize = 400;
        for _ in 0..LOOKS {
            let Some(page) = self.any_page(number) else {
                return;
            };
            let is_out = {
                let state = self.memory.state();
                let mapped = state.pages.get(&page);
                mapped.is_some_and(|mapped| {
                    mapped.registered != Registered::No && mapped.frame.is_none()
                })
            };
            if is_out {
                return;
            }
            time::yield_now();
        }
    }

    fn read(&self, area: usize, page: u64) {
        if let Some(page) = self.page(area, page) {
            let read = self.memory.read(page, self.thread);
            self.memory.must_be_mapped(read);
        }
    }

    fn check(&self, area: usize) {
        (0..AREA_PAGES).for_each(|page| self.read(area, page));
    }

    fn write(&mut self, area: usize, page: u64) {
        if let Some(page) = self.page(area, page) {
            self.written += 1;
            let written = self.memory.write(page, self.thread, self.tag());
            self.memory.must_be_mapped(written);
        }
    }

    /// A write by the kernel to the first page of an area, after all of another area was written.
    fn late_write(&mut self, area: usize, other: usize) {
        let Some(page) = self.page(area, 0) else {
            return;
        };
        // Its reference does not keep the page from being moved, as a pin would.
        let frame = self.memory.reference(page);
        (0..AREA_PAGES).for_each(|page| self.write(other, page));
        self.written += 1;
        self.memory.write_late(page, frame, self.tag());
    }

    fn relocate(&mut self, area: usize, stays: bool) {
        let Some(from) = self.areas[area] else {
            return;
        };
        let places = self.places.iter().copied();
        let Some(to) = self.memory.remap_to_free(from, places, stays) else {
            return;
        };
        if stays {
            self.memory.unmap(from);
        }
        self.areas[area] = Some(from.moved(from.start, to));
    }

    fn move_away_and_back(&mut self, area: usize) {
        let before = self.areas[area];
        self.relocate(area, false);
        let (Some(before), Some(after)) = (before, self.areas[area]) else {
            return;
        };
        let place = [before.start].into_iter();
        if let Some(back) = self.memory.remap_to_free(after, place, false) {
            self.areas[area] = Some(after.moved(after.start, back));
        }
    }

    /// Moves an area over another one that has at least as many pages.
    fn move_over(&mut self, area: usize, other: usize) {
        let (Some(from), Some(over)) = (self.areas[area], self.areas[other]) else {
            return;
        };
        if area == other || from.pages() > over.pages() {
            return;
        }
        self.areas[area] = None;
        let target = from.moved(from.start, over.start);
        if target != over {
            // The rest of the area that is moved over stays mapped; it is given up first.
            self.memory.unmap(PageRange {
                start: target.end,
                ..over
            });
        }
        self.memory.remap(from, over.start, false);
        self.areas[other] = Some(target);
    }

    fn fork(&mut self, steps: Vec<Step>) {
        if self.world.prepares_forks() {
            self.fork_prepared(steps);
            return;
        }
        self.await_carried();
        let channel = self.world.channel_of(&self.memory);
        let raise = |by: i32| {
            if let Some(channel) = &channel {
                channel.forking.fetch_add(by as u32, Ordering::Relaxed);
            }
        };
        raise(1);
        if let Some(channel) = &channel {
            channel.helper_gate().wait_open();
        }
        let memory = self.memory.fork(self.world.next_process());
        raise(-1);
        let child = self.child(&memory);
        let world = self.world.clone();
        let thread = named("child", move || {
            let number = child.thread;
            // As the library's fork handler does, before anything else.
            let _ = memory.read(BEACON, number);
            child.run(&steps);
            check_everything(&memory, number);
            world.exit(&memory);
        });
        self.world.keep(thread);
    }

    /// Where the helper is late, waits until it has carried a run off and the event is unread.
    fn await_carried(&self) {
        const LOOKS: usize = 400;
        for _ in 0..LOOKS {
            let state = self.memory.state();
            let is_own = |page| state.pages.get(&page).is_some_and(|mapped| mapped.own);
            if !adversity::is_helper_late() || state.queues.is_move_unread(is_own) {
                return;
            }
            drop(state);
            time::yield_now();
        }
    }

    /// The only thread of a forked child, with the areas of this one.
    fn child(&self, memory: &Arc<Memory>) -> ProgramThread {
        let places = places(adversity::is_high()).collect();
        ProgramThread {
            areas: self.areas,
            ..ProgramThread::new(self.world.clone(), memory.clone(), places)
        }
    }

    /// As the library does where the kernel reports no forks.
    fn fork_prepared(&mut self, steps: Vec<Step>) {
        let Some(channel) = self.world.channel_of(&self.memory) else {
            return;
        };
        channel.forking.fetch_add(1, Ordering::Relaxed);
        interleave();
        if channel.managed.load(Ordering::Relaxed) {
            // One thread at a time.
            while channel.turn.swap(true, Ordering::Relaxed) {
                time::yield_now();
            }
            self.ask_and_fork(&channel, steps);
            channel.turn.store(false, Ordering::Relaxed);
        } else {
            self.clone_child(None, steps);
        }
        channel.forking.fetch_sub(1, Ordering::Relaxed);
    }

    /// Asks for leave, gives what is withheld, forks, and withholds it again.
    fn ask_and_fork(&self, channel: &SharedChannel, steps: Vec<Step>) {
        channel.asked.store(ASK_FORK, Ordering::Relaxed);
        let Ok(answer) = self.memory.read(BEACON, self.thread) else {
            // Killed. What the supervisor finds by the time, the model says.
            channel.set_fork_step(NOT_FORKED);
            return;
        };
        channel.asked.store(0, Ordering::Relaxed);
        if answer != BEACON_TAG | GRANTED {
            // Something cannot be stored: the fork fails.
            let _ = self.memory.drop_pages(PageRange::around(BEACON, 1));
            return;
        }
        let ranges = || {
            let listed = channel.listed();
            let spans = listed.spans.iter();
            let ranges = spans.map(|(start, end)| PageRange::of_addresses(*start, *end));
            (listed.token, ranges.collect::<Vec<_>>())
        };
        let given = loop {
            dawdle();
            for range in ranges().1 {
                // What was unmapped since was not registered.
                let _ = self.memory.give(range);
            }
            channel.set_fork_step(GIVEN);
            while channel.fork_step() == GIVEN {
                if self.memory.state().gone {
                    channel.set_fork_step(NOT_FORKED);
                    return;
                }
                time::yield_now();
            }
            match channel.fork_step() {
                GO => break true,
                LISTED => {}
                _ => break false,
            }
        };
        let (token, ranges) = ranges();
        if given {
            self.clone_child(Some(token), steps);
        }
        for range in ranges {
            let _ = self.memory.keep(range);
        }
        channel.set_fork_step(if given { FORKED } else { NOT_FORKED });
        let _ = self.memory.drop_pages(PageRange::around(BEACON, 1));
    }

    /// The fork itself. The child begins at once.
    fn clone_child(&self, token: Option<u64>, steps: Vec<Step>) {
        let memory = self
            .memory
            .fork_unreported(self.world.next_process(), token.is_some());
        let child = self.child(&memory);
        let world = self.world.clone();
        let thread = named("child", move || {
            let is_admitted = match token {
                Some(token) => world.arrive(token, &memory),
                None => {
                    world.introduce(&memory);
                    true
                }
            };
            if !is_admitted {
                // It stops, which is right only if its parent was killed meanwhile.
                assert!(memory.may_be_killed(), "a child is not admitted");
                world.exit(&memory);
                return;
            }
            if let Some(channel) = world.channel_of(&memory) {
                if token.is_some() {
                    // A copy of what its parent's library has noted.
                    channel.managed.store(true, Ordering::Relaxed);
                }
                for (start, end) in channel.listed().spans {
                    let _ = memory.keep(PageRange::of_addresses(start, end));
                }
            }
            let number = child.thread;
            child.run(&steps);
            check_everything(&memory, number);
            world.exit(&memory);
        });
        self.world.keep(thread);
    }
}

/// Reads all pages of a forked child: what the other threads of its parent had is its own, too.
fn check_everything(memory: &Memory, thread: u32) {
    let pages: Vec<_> = memory.state().expected.keys().copied().collect();
    for page in pages {
        let read = memory.read(page, thread);
        memory.must_be_mapped(read);
    }
}
