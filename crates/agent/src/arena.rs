//! The library's own memory in the program: beacon, helper stack, channel, stage and trash.
//!
//! ```text
//! | guard | beacon | guard | stack | channel | guard | stage ............ | trash | guard |
//! ```
//! All but the beacon is kept from forked children. The beacon is one page that is registered
//! with the program's userfaultfd as soon as anything is, and stays missing: a forked child reads
//! it, the supervisor fills it with the number of the child's address space, and so both know
//! which of the supervisor's address spaces this child is.

use crate::system;
use memfold_sys::channel::CHANNEL_BYTES;
use memfold_sys::hello::{STAGE_PAGES, TRASH_PAGES};
use memfold_sys::{Errno, PAGE_SIZE};

const GUARD: usize = PAGE_SIZE;
const STACK: usize = 8 * PAGE_SIZE;

/// Where the parts lie. Addresses.
#[derive(Clone, Copy, Default)]
pub struct Arena {
    pub start: usize,
    pub length: usize,
    pub beacon: usize,
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
        let before_stage = GUARD + PAGE_SIZE + GUARD + STACK + CHANNEL_BYTES + GUARD;
        let length = before_stage + stage_bytes + trash_bytes + GUARD;
        let start = system::reserve(length)?;
        let beacon = start + GUARD;
        let stack = beacon + PAGE_SIZE + GUARD;
        let stage = start + before_stage;
        let trash = stage + stage_bytes;
        let arena = Arena {
            start,
            length,
            beacon: inherited_beacon.unwrap_or(beacon),
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
        system::keep_from_dumps(self.start, self.length)?;
        if beacon_inherited {
            system::keep_from_children(self.start, self.length)?;
        } else {
            system::open_up(self.beacon, PAGE_SIZE)?;
            // A process that reads all of the program's memory faults the beacon in, too.
            system::wipe_in_children(self.beacon, PAGE_SIZE)?;
            system::keep_from_children(self.start, GUARD)?;
            let rest = self.beacon + PAGE_SIZE;
            system::keep_from_children(rest, self.start + self.length - rest)?;
        }
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
    pub fn seal(&self) -> Result<(), Errno> {
        system::seal(self.stage, (STAGE_PAGES + TRASH_PAGES) * PAGE_SIZE)?;
        system::seal(self.beacon, PAGE_SIZE)
    }

    /// Forgets an arena whose helper never came to run.
    pub fn unmap(&self) {
        system::unmap(self.start, self.length);
    }
}
