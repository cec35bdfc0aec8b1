//! The helper's thread: executes commands, as `crates/agent/src/helper.rs` does.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::model::channel::{Command, SharedChannel};
use crate::simulation::model::memory::{Frame, Memory, Registered};
use crate::simulation::model::userfaultfd::Userfaultfd;
use crate::simulation::sync::dawdle;
use crate::simulation::trace::trace;
use crate::supervised::kernel::Memory as _;
use crate::sync::interleave;
use crate::time;
use memfold_sys::Errno;
use memfold_sys::channel::{DropRun, MoveRun};
use memfold_sys::port::Outcome;
use memfold_testing::Random;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One in `FORGOTTEN` moves goes further than the kernel tells.
const FORGOTTEN: usize = 4;

/// A helper.
pub(crate) struct Helper {
    memory: Arc<Memory>,
    userfaultfd: Userfaultfd,
    channel: Arc<SharedChannel>,
    /// Its TID.
    thread: u32,
    random: Random,
    /// Pages are carried off by `mremap`.
    carries: bool,
}

impl Helper {
    /// The helper of a program. `seed` decides what the kernel forgets to tell, which moves no pages if they are to be
    /// carried off.
    pub(crate) fn new(
        memory: Arc<Memory>,
        channel: Arc<SharedChannel>,
        thread: u32,
        (seed, carries): (u64, bool),
    ) -> Helper {
        Helper {
            userfaultfd: Userfaultfd(memory.clone()),
            memory,
            channel,
            thread,
            random: Random::new(seed),
            carries,
        }
    }

    /// Executes commands until the channel is closed, or this thread is killed.
    pub(crate) fn run(mut self) {
        let mut done = 0;
        let (channel, memory) = (self.channel.clone(), self.memory.clone());
        let change = |range, give| {
            let changed = match give {
                true => memory.give(range),
                false => memory.withhold(range),
            };
            changed.map_err(|_| Errno::ENOMEM)
        };
        while let Some((posted, command)) = channel.next_command(done, change) {
            self.execute(posted, command);
            done = posted;
            if memory.state().has_helper_ended {
                return;
            }
        }
    }

    fn execute(&mut self, posted: u32, command: Command) {
        let Command {
            event_count,
            mut drops,
            mut moves,
        } = command;
        for run in &mut drops {
            self.drop_run(run);
        }
        for run in moves.iter_mut().filter(|run| run.unshare != 0) {
            run.errno = 0;
            // While it waits for a page, it does not see the supervisor die.
            let guarded = self.memory.guarded.load(Ordering::Relaxed);
            assert!(guarded, "the helper of {} is not guarded", self.memory.pid);
            for step in 0..run.pages {
                let page = VirtualPage::containing(run.source).plus(u64::from(step));
                let refused = adversity::is_refused();
                if refused || self.memory.populate_write(page, self.thread).is_err() {
                    run.errno = Errno::ENOMEM.0;
                    break;
                }
            }
        }
        let channel = self.channel.clone();
        let stale = if self.carries {
            self.carry_runs(event_count, &mut moves);
            false
        } else {
            channel.helper_gate().enter();
            self.memory.stop_sometimes();
            let stale = channel.event_count() != event_count;
            for run in moves.iter_mut().filter(|run| run.unshare == 0 && !stale) {
                self.move_run(run);
                self.memory.stop_sometimes();
            }
            stale
        };
        let is_over = {
            let state = self.memory.state();
            state.gone || state.has_helper_ended
        };
        if is_over {
            // Killed in the gate.
            return;
        }
        trace(|| format!("has done command {posted}, stale {stale}"));
        let late = Bug::DoneOutsideGate.is_back();
        if late {
            channel.helper_gate().leave();
            dawdle();
        }
        channel.finish(
            posted,
            Outcome {
                stale,
                drops,
                moves,
            },
        );
        if !late {
            channel.helper_gate().leave();
        }
    }

    fn drop_run(&self, run: &mut DropRun) {
        run.errno = 0;
        let start = VirtualPage::containing(run.start);
        if self.carries && self.unregister(start, run.pages).is_err() {
            run.errno = Errno::ENOMEM.0;
            return;
        }
        for step in 0..run.pages {
            interleave();
            let page = start.plus(u64::from(step));
            // The page is pinned, and cannot be moved to the trash; the others of the run can.
            let is_pinned = !self.carries && adversity::is_refused();
            if let Some(mapped) = self.memory.state().pages.get_mut(&page) {
                if is_pinned && mapped.frame.is_some() {
                    run.errno = Errno::EBUSY.0;
                    continue;
                }
                mapped.frame = None;
                mapped.shared = false;
            }
        }
    }

    /// As `carry_runs` of the agent.
    fn carry_runs(&self, event_count: u32, moves: &mut [MoveRun]) {
        for (index, run) in moves.iter_mut().enumerate() {
            if run.unshare != 0 {
                continue;
            }
            self.enter();
            self.memory.stop_sometimes();
            if self.memory.ends_helper() {
                return;
            }
            run.moved = 0;
            let result = if self.channel.event_count() == event_count {
                self.channel.set_carrying(index as u32 + 1);
                let result = self.carry(run);
                if result.is_err() {
                    self.channel.set_carrying(0);
                }
                result
            } else {
                Err(Errno::ECANCELED)
            };
            run.errno = result.err().map_or(0, |errno| errno.0);
            self.memory.stop_sometimes();
        }
        self.enter();
    }

    /// Enters the gate, unless this thread is inside.
    fn enter(&self) {
        if !self.channel.helper_gate().is_inside() {
            self.channel.helper_gate().enter();
        }
    }

    fn carry(&self, run: &mut MoveRun) -> Result<(), Errno> {
        let source = VirtualPage::containing(run.source);
        let target = VirtualPage::containing(run.target);
        let mut pages = run.pages;
        if (0..pages).any(|step| adversity::is_locked(source.plus(u64::from(step)))) {
            return Err(Errno::EINVAL);
        }
        self.unregister(target, pages)?;
        let of = |start: VirtualPage, pages| PageRange {
            start,
            end: start.plus(u64::from(pages)),
        };
        while !self.userfaultfd.is_registered(of(source, pages)) {
            pages /= 2;
            if pages == 0 {
                return Err(Errno::EAGAIN);
            }
        }
        // Mappings may change now.
        dawdle();
        self.await_change();
        let read_before = self.channel.carried();
        let raised = self.memory.carry_off(of(source, pages), target)?;
        let is_inside = self.channel.helper_gate().is_inside();
        self.enter();
        let is_read = self.channel.carried() != read_before || Bug::CarriedUnreported.is_back();
        let is_told = !is_inside && is_read;
        assert!(
            is_told == raised || self.memory.state().gone,
            "an event of the helper's own mremap: {raised}, as it is told: {is_told}"
        );
        if !raised {
            return Err(Errno::EFAULT);
        }
        run.moved = pages;
        Ok(())
    }

    fn await_change(&self) {
        const LOOKS: usize = 60;
        for _ in 0..LOOKS {
            if !adversity::is_helper_late() || self.memory.state().queues.changing > 0 {
                return;
            }
            time::yield_now();
        }
    }

    fn unregister(&self, start: VirtualPage, pages: u32) -> Result<(), Errno> {
        if adversity::is_refused() {
            return Err(Errno::ENOMEM);
        }
        self.userfaultfd.unregister(PageRange {
            start,
            end: start.plus(u64::from(pages)),
        })
    }

    fn move_run(&mut self, run: &mut MoveRun) {
        let forgets = self.random.below(FORGOTTEN) == 0;
        move_pages(&self.userfaultfd, run);
        if forgets && run.moved > 0 {
            dawdle();
            // The kernel moved some pages, lost count, and found the mappings changing at the next try.
            let told = self.random.below(run.moved as usize) as u32;
            let is_unseen = run.moved < run.pages && run.errno == Errno::ENOENT.0;
            if is_unseen || self.userfaultfd.begin().is_err() {
                run.moved = told;
                run.errno = Errno::EAGAIN.0;
            }
        }
    }
}

/// Moves pages until one is refused.
pub(crate) fn move_pages(userfaultfd: &Userfaultfd, run: &mut MoveRun) {
    (run.moved, run.errno) = (0, 0);
    let changing = match userfaultfd.begin() {
        Ok(changing) => changing,
        Err(errno) => {
            run.errno = errno.0;
            return;
        }
    };
    while run.moved < run.pages {
        interleave();
        let step = u64::from(run.moved);
        let source = VirtualPage::containing(run.source).plus(step);
        let target = VirtualPage::containing(run.target).plus(step);
        if let Err(errno) = move_page(changing.0, source, target) {
            run.errno = errno.0;
            break;
        }
        run.moved += 1;
        adversity::note_change(PageRange::around(source, 1));
        trace(|| format!("moves page {:#x} to the stage at {:#x}", source.0, target.0));
    }
}

/// Moves one page (`UFFDIO_MOVE`).
fn move_page(memory: &Memory, source: VirtualPage, target: VirtualPage) -> Result<(), Errno> {
    let mut state = memory.state();
    state.prepare(target);
    // Both mappings are looked at before any page.
    if !state.pages.contains_key(&source) {
        return Err(Errno::ENOENT);
    }
    if adversity::is_locked(source) {
        return Err(Errno::EINVAL);
    }
    let place = state.pages.get(&target).ok_or(Errno::ENOENT)?;
    if place.registered == Registered::No {
        return Err(Errno::EINVAL);
    }
    if place.frame.is_some() {
        return Err(Errno::EEXIST);
    }
    let page = state.pages.get_mut(&source).ok_or(Errno::ENOENT)?;
    if page.frame.is_none() {
        return Err(Errno::ENOENT);
    }
    if page.shared || adversity::is_refused() {
        return Err(Errno::EBUSY);
    }
    let frame: Option<Frame> = page.frame.take();
    page.protected = false;
    if let Some(place) = state.pages.get_mut(&target) {
        place.frame = frame;
    }
    Ok(())
}
