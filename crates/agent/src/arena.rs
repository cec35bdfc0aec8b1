//! The library's own memory in the program: beacon, helper stack, channel, stage and trash.
//!
//! ```text
//! | guard | beacon | guard | fork stack | guard | stack | channel | guard | stage ............ | trash | guard |
//! ```
//! All but the beacon and the fork stack is kept from forked children. The fork stack is what a thread runs on
//! while it forks where forks are prepared, and its child until its helper is there. The beacon is one page that is registered
//! with the program's userfaultfd as soon as anything is, and every fork wipes it: a forked child reads
//! it, the supervisor fills it with the number of the child's address space, and so both know
//! which of the supervisor's address spaces this child is. Where forks are prepared, it stays missing: the forking thread
//! reads it, to ask the supervisor for leave.

use crate::system;
use memfold_sys::channel::CHANNEL_BYTES;
use memfold_sys::hello::{STAGE_PAGES, TRASH_PAGES};
use memfold_sys::{Errno, PAGE_SIZE};

const GUARD: usize = PAGE_SIZE;
const STACK: usize = 8 * PAGE_SIZE;
/// A signal's frame with all of the CPU's state is a few pages, and there may be one within one.
const FORK_STACK: usize = 16 * PAGE_SIZE;

/// Where it lies in an arena.
const FORK_STACK_AT: usize = GUARD + PAGE_SIZE + GUARD;

/// Where the parts lie. Addresses.
#[derive(Clone, Copy, Default)]
pub struct Arena {
    pub start: usize,
    pub length: usize,
    pub beacon: usize,
    /// End of the stack of a forking thread.
    pub fork_stack_top: usize,
    pub stack_top: usize,
    /// Where the channel is mapped to. Reserved, so that there is room for it when it comes.
    pub channel: usize,
    pub stage: usize,
    pub trash: usize,
}

impl Arena {
    /// Maps a new arena. A child that inherited a beacon keeps using that one.
    pub fn map(inherited_beacon: Option<usize>) -> Result<Arena, Errno> {
        let stage_bytes = STAGE_PAGES * PAGE_SIZE;
        let trash_bytes = TRASH_PAGES * PAGE_SIZE;
        let before_stage = FORK_STACK_AT + FORK_STACK + GUARD + STACK + CHANNEL_BYTES + GUARD;
        let length = before_stage + stage_bytes + trash_bytes + GUARD;
        let start = system::reserve(length)?;
        let beacon = start + GUARD;
        let fork_stack = start + FORK_STACK_AT;
        let stack = fork_stack + FORK_STACK + GUARD;
        let stage = start + before_stage;
        let trash = stage + stage_bytes;
        let arena = Arena {
            start,
            length,
            beacon: inherited_beacon.unwrap_or(beacon),
            fork_stack_top: fork_stack + FORK_STACK,
            stack_top: stack + STACK,
            channel: stack + STACK,
            stage,
            trash,
        };
        if let Err(errno) = arena.prepare(stack, inherited_beacon.is_some()) {
            system::unmap(start, length);
            return Err(errno);
        }
        Ok(arena)
    }

    fn prepare(&self, stack: usize, beacon_inherited: bool) -> Result<(), Errno> {
        let fork_stack = self.start + FORK_STACK_AT;
        system::keep_from_dumps(self.start, self.length)?;
        if beacon_inherited {
            system::keep_from_children(self.start, FORK_STACK_AT)?;
        } else {
            system::open_up(self.beacon, PAGE_SIZE)?;
            // A process that reads all of the program's memory faults the beacon in, too.
            system::wipe_in_children(self.beacon, PAGE_SIZE)?;
            system::keep_from_children(self.start, GUARD)?;
            system::keep_from_children(fork_stack - GUARD, GUARD)?;
        }
        let rest = fork_stack + FORK_STACK;
        system::keep_from_children(rest, self.start + self.length - rest)?;
        system::open_up(fork_stack, FORK_STACK)?;
        // While the stage is not registered (its helper was stopped and relieved), nothing but the kernel
        // itself could fill it.
        system::forbid_huge(self.start, self.length);
        system::forbid_merging(self.start, self.length);
        system::open_up(stack, STACK)?;
        system::open_up(self.stage, (STAGE_PAGES + TRASH_PAGES) * PAGE_SIZE)
    }

    /// Seals what the supervisor reads by `/proc/PID/mem`: a file of a FUSE server mapped there instead
    /// would make the read wait for that server. Sealed mappings cannot be unmapped, so the helper seals
    /// them once it runs. (An inherited beacon is sealed already, and sealing it again does nothing.)
    ///
    /// A stage to which pages are carried off by `mremap` must be open to that.
    pub fn seal(&self, is_stage_replaced: bool) -> Result<(), Errno> {
        if !is_stage_replaced {
            system::seal(self.stage, (STAGE_PAGES + TRASH_PAGES) * PAGE_SIZE)?;
        }
        system::seal(self.beacon, PAGE_SIZE)
    }

    /// Unmaps the fork stack that a child inherited and does not need any more.
    pub fn unmap_inherited_stack(top: usize) {
        system::unmap(top - FORK_STACK, FORK_STACK);
    }

    /// Forgets an arena whose helper never came to run.
    pub fn unmap(&self) {
        system::unmap(self.start, self.length);
    }
}
