//! The records of all blocks, by number, and those that are free.

use std::sync::OnceLock;

use crate::{
    block_record::BlockRecord,
    error::StoreError,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
        lock,
    },
};

/// Records of the first segment. Each later one holds as many as all before it.
const FIRST: u32 = 256;
const SEGMENTS: usize = 24;
const MOST: u32 = FIRST << (SEGMENTS - 1);
/// The end of the list of free records.
const NONE: u32 = u32::MAX;

const _: () = assert!(MOST < NONE);

#[derive(Debug)]
struct FreeRecords {
    /// The first free record; each has the number of the next.
    first: u32,
    /// The first record never used.
    next: u32,
}

/// The records. Look-ups take no lock. Records are reused, and never given back.
#[derive(Debug)]
pub(super) struct BlockRecords {
    segments: [OnceLock<Box<[BlockRecord]>>; SEGMENTS],
    free: Mutex<FreeRecords>,
    heap_bytes: AtomicU64,
}

/// The segment of a record, the first record in it, and their number.
fn segment_of(id: u32) -> (usize, u32, u32) {
    let segment = (u32::BITS - (id / FIRST).leading_zeros()) as usize;
    let first = if segment == 0 {
        0
    } else {
        FIRST << (segment - 1)
    };
    (segment, first, first.max(FIRST))
}

impl BlockRecords {
    pub(super) fn new() -> Self {
        Self {
            segments: [const { OnceLock::new() }; SEGMENTS],
            free: Mutex::new(FreeRecords {
                first: NONE,
                next: 0,
            }),
            heap_bytes: AtomicU64::new(0),
        }
    }

    /// The record of that number, if it was ever used.
    pub(super) fn get(&self, id: u32) -> Option<&BlockRecord> {
        let (segment, first, _) = segment_of(id);
        self.segments
            .get(segment)?
            .get()?
            .get((id - first) as usize)
    }

    /// Takes a closed record.
    pub(super) fn take(&self) -> Result<(u32, &BlockRecord), StoreError> {
        let mut free = lock(&self.free);
        if let Some(record) = self.get(free.first).filter(|_| free.first != NONE) {
            let id = std::mem::replace(&mut free.first, record.note());
            return Ok((id, record));
        }
        let id = free.next;
        if id >= MOST {
            return Err(StoreError::NoSlots);
        }
        let (segment, _, records) = segment_of(id);
        let segment = &self.segments[segment];
        if segment.get().is_none() {
            let mut made = Vec::new();
            made.try_reserve_exact(records as usize)
                .map_err(|_| StoreError::NoMemory)?;
            made.extend((0..records).map(|_| BlockRecord::new()));
            let bytes = made.len() * size_of::<BlockRecord>();
            self.heap_bytes.fetch_add(bytes as u64, Relaxed);
            // Segments are made under the lock.
            let _ = segment.set(made.into_boxed_slice());
        }
        free.next = id + 1;
        Ok((id, self.get(id).expect("its segment was made")))
    }

    /// Gives back a closed record.
    pub(super) fn give_back(&self, id: u32, record: &BlockRecord) {
        let mut free = lock(&self.free);
        record.set_note(free.first);
        free.first = id;
    }

    pub(super) fn heap_bytes(&self) -> u64 {
        self.heap_bytes.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_record_has_one_place() {
        let mut expected = (0, 0);
        for id in 0..FIRST * 16 {
            let (segment, first, records) = segment_of(id);
            let place = (segment, id - first);
            assert_eq!(place, expected, "record {id}");
            assert!(place.1 < records);
            expected = if place.1 + 1 == records {
                (segment + 1, 0)
            } else {
                (segment, place.1 + 1)
            };
        }
        assert_eq!(segment_of(MOST - 1).0, SEGMENTS - 1);
    }

    #[test]
    fn records_are_reused() {
        let records = BlockRecords::new();
        assert!(records.get(0).is_none());
        let ids: Vec<u32> = (0..600).map(|_| records.take().unwrap().0).collect();
        assert_eq!(ids, (0..600).collect::<Vec<_>>());
        for id in [3, 599, 0] {
            records.give_back(id, records.get(id).unwrap());
        }
        let again: Vec<u32> = (0..4).map(|_| records.take().unwrap().0).collect();
        assert_eq!(again, [0, 599, 3, 600]);
        assert!(records.get(u32::MAX).is_none());
    }
}
