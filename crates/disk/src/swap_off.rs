//! Bringing all blocks back from the swap file.

use crate::error::SwapOffError;
use crate::memory::Memory;
use crate::swap_file::SwapFile;
use memfold_swap::{CLUSTER_SLOTS, PAGE_SIZE, Scratch, TierKind};
use zsmalloc::PageSource;

/// Most bytes that a step of an evacuation adds to the pool: those of a cluster.
const STEP_BYTES: u64 = (CLUSTER_SLOTS * PAGE_SIZE) as u64;

/// See [`Disk::swap_off`](crate::Disk::swap_off).
pub(crate) fn swap_off<S: PageSource + 'static>(memory: &Memory<S>) -> Result<u64, SwapOffError> {
    let file = memory.file.as_ref().ok_or(SwapOffError::NoFile)?;
    let _guard = file.lock();
    memory.discarder.flush();
    let before = memory.space.pages_in(TierKind::File);
    let was_open = file.close();
    let outcome = evacuate(memory, file);
    file.end_closing(was_open && outcome.is_err());
    outcome.map(|()| before)
}

fn evacuate<S: PageSource + 'static>(
    memory: &Memory<S>,
    file: &SwapFile,
) -> Result<(), SwapOffError> {
    let in_file = || memory.space.pages_in(TierKind::File);
    if in_file() == 0 {
        return Ok(());
    }
    let most = memory.limit() - memory.limit() / 8;
    let has_room = || memory.used_bytes() + STEP_BYTES <= most && !file.ends();
    // What a step adds must not be given to writers meanwhile.
    let Some(_step) = memory.try_reserve(STEP_BYTES) else {
        return Err(SwapOffError::NoRoom { blocks: in_file() });
    };
    let mut scratch = Scratch::new();
    let mut more = u64::MAX;
    loop {
        let report = memory
            .space
            .evacuate(TierKind::File, &mut scratch, has_room);
        let left = in_file();
        if left == 0 {
            return Ok(());
        }
        // Writes in flight when the file was closed may leave blocks behind: try again while that helps.
        if !report.finished || left >= more {
            return Err(match report.failed {
                0 => SwapOffError::NoRoom { blocks: left },
                _ => SwapOffError::Unreadable { blocks: left },
            });
        }
        more = left;
    }
}
