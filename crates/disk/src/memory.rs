//! What a disk's blocks are kept in, and the limit on it.

use crate::block_map::BlockMap;
use crate::discard::{Discarder, Leaves};
use crate::error::{DiskError, NewDiskError};
use crate::packing::{Host, Packer, RoomFinder};
use crate::room::{HugePages, Reserved, Room, used_bytes};
use crate::swap_file::SwapFile;
use memfold_swap::{RemoteTier, Scratch, StoreError, SwapSpace, TierKind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zsmalloc::PageSource;

/// Bytes written back to the file for one step of a writer that finds no room.
const WRITE_BACK_BYTES: u64 = 1 << 20;

/// Most bytes below the limit that writes leave to packing, which stores blocks before it frees what they
/// were in.
const PACKING_BYTES: u64 = 1 << 20;

/// Bytes that a new leaf of the map may take with its share of a new region, and the swap tables of its
/// blocks.
pub(crate) const LEAF_BYTES: u64 = 1 << 15;

/// The memory of a disk.
pub(crate) struct Memory<S: PageSource + 'static> {
    pub(crate) space: Arc<SwapSpace<S>>,
    pub(crate) map: Arc<BlockMap>,
    pub(crate) discarder: Discarder<S>,
    pub(crate) file: Option<SwapFile>,
    /// The store on other machines, if writers wait for it.
    pub(crate) remote: Option<Arc<RemoteTier>>,
    /// If blocks are packed.
    packer: Option<Packer<S>>,
    room_finder: RoomFinder,
    room: Arc<Room>,
}

impl<S: PageSource + 'static> Memory<S> {
    /// Memory of at most `limit` bytes for `blocks` blocks.
    pub(crate) fn new(
        space: SwapSpace<S>,
        file: Option<SwapFile>,
        blocks: u64,
        limit: u64,
    ) -> Result<Self, NewDiskError> {
        let space = Arc::new(space);
        let discarder = Discarder::new(space.clone()).map_err(|_| NewDiskError::Thread)?;
        let (map, room) = (Arc::new(BlockMap::new(blocks)), Arc::new(Room::new(limit)));
        space.limit_huge_pages(Box::new(HugePages {
            room: room.clone(),
            space: Arc::downgrade(&space),
            map: map.clone(),
            discarded: discarder.backlog().clone(),
        }));
        Ok(Memory {
            map,
            discarder,
            space,
            file,
            remote: None,
            packer: None,
            room_finder: RoomFinder::default(),
            room,
        })
    }

    /// Packs from now on.
    pub(crate) fn pack(&mut self, period: Duration, host: impl Host) -> Result<(), NewDiskError> {
        let packer = Packer::start(self.space.clone(), self.limit(), period, host);
        self.packer = Some(packer.map_err(|_| NewDiskError::Thread)?);
        self.room.hold_back((self.limit() / 16).min(PACKING_BYTES));
        Ok(())
    }

    /// Bytes in use: pool, tables and map, with leaves that are not freed yet.
    pub(crate) fn used_bytes(&self) -> u64 {
        used_bytes(&self.space, &self.map, self.discarder.backlog())
    }

    /// Has leaves that were taken out of the map freed later.
    pub(crate) fn discard(&self, leaves: Leaves) {
        let count = leaves.len() as i64;
        // For a moment they count twice, rather than not at all.
        self.discarder.discard(leaves);
        self.map.note_leaves(-count);
    }

    /// Frees leaves without slots that were taken out of the map.
    pub(crate) fn free_leaves(&self, leaves: Leaves) {
        let count = leaves.len() as i64;
        drop(leaves);
        self.map.note_leaves(-count);
    }

    /// Most bytes in use.
    pub(crate) fn limit(&self) -> u64 {
        self.room.limit()
    }

    /// Reserves room for `bytes` more, if there is room now.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Option<Reserved<'_>> {
        self.room.reserve(bytes, || self.used_bytes())
    }

    /// Whether there is room for `bytes` more now.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.room.fits(bytes, self.used_bytes())
    }

    /// Whether blocks may be in a file or a store, which are waited for.
    pub(crate) fn may_wait(&self) -> bool {
        self.file.is_some() || self.remote.is_some()
    }

    /// Reserves room for `bytes` more, however badly they compress, beside the `held` ones that this thread has reserved
    /// already. What other requests have reserved and do not use is waited for. Discarded blocks are freed, blocks are
    /// written back to the file or the store, and packed if the disk does that, until there is room. A swapoff,
    /// during which the file takes none, is waited for, and so is a store that does not answer.
    pub(crate) fn reserve(
        &self,
        bytes: u64,
        held: u64,
        scratch: &mut Scratch,
    ) -> Result<Reserved<'_>, DiskError> {
        if let Some(reserved) = self.try_reserve(bytes) {
            return Ok(reserved);
        }
        let after_others = || {
            self.room
                .reserve_after_others(bytes, held, || self.used_bytes())
        };
        if let Some(reserved) = after_others() {
            return Ok(reserved);
        }
        if self.discarder.flush()
            && let Some(reserved) = self.try_reserve(bytes)
        {
            return Ok(reserved);
        }
        if let Some(packer) = &self.packer {
            packer.note_wanted();
        }
        let mut waits_since = None;
        loop {
            let changes = self.file.as_ref().map(SwapFile::changes);
            let report = self.space.write_back(WRITE_BACK_BYTES.max(bytes), scratch);
            self.space.compact(|| true);
            self.space.trim();
            if let Some(reserved) = after_others() {
                return Ok(reserved);
            }
            // With several servers, one may take pages while another fails.
            if report.bytes_before > 0 {
                waits_since = None;
                continue;
            }
            let file = self.file.as_ref().zip(changes);
            if !file.is_some_and(|(file, changes)| file.waits_for_swap_off(changes))
                && !self.packs_for(bytes, scratch)
                && !self.waits_for_store(report.store_error, &mut waits_since)
            {
                return Err(DiskError::NoSpace);
            }
        }
    }
}

impl<S: PageSource + 'static> Memory<S> {
    /// Waits for a store that took no pages by this error, and may take them soon. Whether to try again. A file that was
    /// switched off refuses what the store did not take before.
    fn waits_for_store(&self, error: Option<StoreError>, since: &mut Option<Instant>) -> bool {
        let is_remote = match error {
            Some(StoreError::Tier { tier, .. }) => match tier {
                TierKind::Remote => true,
                TierKind::File => self.file.as_ref().is_some_and(SwapFile::is_closed),
                _ => false,
            },
            _ => false,
        };
        let remote = self.remote.as_ref().filter(|_| is_remote);
        let since = since.get_or_insert_with(Instant::now);
        remote.is_some_and(|remote| remote.wait_for_stores(since.elapsed()))
    }

    /// Makes room for `bytes` by packing. Whether there is.
    fn packs_for(&self, bytes: u64, scratch: &mut Scratch) -> bool {
        let has_room = || self.try_reserve(bytes).is_some();
        let Some(packer) = &self.packer else {
            return false;
        };
        let found = self.room_finder.find(&self.space, scratch, has_room);
        if !found {
            packer.note_refused();
        }
        found
    }
}
