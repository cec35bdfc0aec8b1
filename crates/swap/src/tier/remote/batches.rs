//! The batches in the store.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use crate::{
    entry::Location,
    tier::remote::backend::{BatchId, Place, Removal},
};

/// The most abandoned batches remembered. More leave less to the time to live.
const ABANDONED: usize = 1 << 16;

/// Batches for which their table keeps room beside four times those it has. More takes more memory after
/// many have gone.
const MOST_SPARE: usize = 1024;

/// A copy of a page in the file: its location and annex word.
pub(super) type FileCopy = (Location, u64);

#[derive(Debug)]
struct Record {
    /// A bit for each page that is in use.
    live: u64,
    /// A bit for each page that is freed and not yet removed from the store.
    freed: u64,
    /// A bit for each page with a copy in `copies`, those in use among them; none if no copies are kept.
    copied: u64,
    copies: Box<[FileCopy]>,
    /// The store no longer has it.
    is_lost: bool,
    /// When the store has forgotten it by itself if no page is in use, in seconds.
    expires: u32,
}

impl Record {
    fn has_expired(&self, now: Duration) -> bool {
        self.live == 0 && now.as_secs() > self.expires.into()
    }

    fn copy(&self, index: u8) -> Option<FileCopy> {
        let bit = 1 << index;
        let before = (self.copied & (bit - 1)).count_ones();
        let has = self.copied & bit != 0;
        has.then(|| self.copies[before as usize])
    }

    /// Forgets the copies of pages that are no longer in use, once these are half of them.
    fn shrink_copies(&mut self) {
        let kept = self.copied & self.live;
        if self.copied == 0 || kept.count_ones() > self.copied.count_ones() / 2 {
            return;
        }
        let indices = (0..u64::BITS as u8).filter(|index| kept >> index & 1 == 1);
        let copies = indices.filter_map(|index| self.copy(index)).collect();
        (self.copies, self.copied) = (copies, kept);
    }

    fn heap_bytes(&self) -> usize {
        size_of_val(&*self.copies)
    }
}

/// What is known of each batch in the store.
#[derive(Debug, Default)]
pub(super) struct Batches {
    next: u64,
    records: HashMap<u64, Record>,
    /// Bytes of the copies' lists.
    copies_bytes: usize,
    /// Batches with something to remove, each once.
    to_remove: VecDeque<u64>,
    /// The last abandoned batches. Each may still arrive after it was removed, so it is removed once
    /// more at the end.
    abandoned: VecDeque<u64>,
    /// Batches that were numbered, and neither added nor abandoned yet.
    sending: usize,
    /// All were forgotten at the end, while slots may still be released and batches be under way.
    is_over: bool,
    /// Batches that were under way then, and may be in the store.
    late: Vec<u64>,
}

fn seconds(time: Duration) -> u32 {
    time.as_secs().try_into().unwrap_or(u32::MAX)
}

fn whole(number: u64) -> Removal {
    Removal {
        batch: BatchId::from_raw(number),
        pages: None,
    }
}

impl Batches {
    /// A new number, for a batch that must be [added](Self::add) or [abandoned](Self::abandon). `None` if all
    /// were used, and once all batches are forgotten.
    pub(super) fn number(&mut self) -> Option<BatchId> {
        if self.is_over || self.next == BatchId::END {
            return None;
        }
        self.next += 1;
        self.sending += 1;
        Some(BatchId::from_raw(self.next - 1))
    }

    /// Notes an acknowledged batch of `pages` pages. `false` once all are forgotten: it is removed, too.
    pub(super) fn add(&mut self, batch: BatchId, pages: usize, copies: Box<[FileCopy]>) -> bool {
        if self.has_arrived_late(batch) {
            return false;
        }
        let live = u64::MAX >> (u64::BITS as usize - pages);
        let record = Record {
            live,
            freed: 0,
            copied: if copies.is_empty() { 0 } else { live },
            copies,
            is_lost: false,
            expires: u32::MAX,
        };
        self.copies_bytes += record.heap_bytes();
        self.records.insert(batch.into_raw(), record);
        true
    }

    fn has_arrived_late(&mut self, batch: BatchId) -> bool {
        self.sending -= 1;
        if self.is_over {
            self.late.push(batch.into_raw());
        }
        self.is_over
    }

    /// Notes a batch that may be in the store, until it `expires`, although it was not acknowledged.
    pub(super) fn abandon(&mut self, batch: BatchId, expires: Duration) {
        if self.has_arrived_late(batch) {
            return;
        }
        let record = Record {
            live: 0,
            freed: u64::MAX,
            copied: 0,
            copies: Box::default(),
            is_lost: false,
            expires: seconds(expires),
        };
        self.records.insert(batch.into_raw(), record);
        self.to_remove.push_back(batch.into_raw());
        if self.abandoned.len() == ABANDONED {
            self.abandoned.pop_front();
        }
        self.abandoned.push_back(batch.into_raw());
    }

    /// The copy of a page in the file, if one is kept.
    pub(super) fn copy(&self, place: Place) -> Option<FileCopy> {
        self.records.get(&place.batch.into_raw())?.copy(place.index)
    }

    /// Frees a page, which is removed from the store later; if it is the last of its batch, this `expires`
    /// there by itself. Returns its copy in the file. No effect once all are forgotten.
    ///
    /// # Panics
    ///
    /// If there is no such page: an entry was invalid.
    pub(super) fn free(&mut self, place: Place, expires: Duration) -> Option<FileCopy> {
        let number = place.batch.into_raw();
        let bit = 1 << place.index;
        if self.is_over {
            return None;
        }
        let record = self
            .records
            .get_mut(&number)
            .filter(|record| record.live & bit != 0)
            .unwrap_or_else(|| panic!("page {place:?} of the remote tier is not in use"));
        record.live &= !bit;
        if record.live == 0 {
            record.expires = seconds(expires);
        }
        if record.freed == 0 {
            self.to_remove.push_back(number);
        }
        record.freed |= bit;
        let copy = record.copy(place.index);
        self.copies_bytes -= record.heap_bytes();
        record.shrink_copies();
        self.copies_bytes += record.heap_bytes();
        copy
    }

    /// Takes up to `most` removals. Each must be [confirmed](Self::removed) or
    /// [returned](Self::not_removed).
    pub(super) fn removals(&mut self, most: usize) -> Vec<Removal> {
        let most = most.min(self.to_remove.len());
        let removal = |number: u64| {
            let record = self.records.get(&number)?;
            Some(Removal {
                batch: BatchId::from_raw(number),
                pages: (record.live != 0).then_some(record.freed),
            })
        };
        self.to_remove.drain(..most).filter_map(removal).collect()
    }

    /// Notes that the store has removed it.
    pub(super) fn removed(&mut self, removal: Removal) {
        let number = removal.batch.into_raw();
        let Some(pages) = removal.pages else {
            self.forget(number);
            return;
        };
        if let Some(record) = self.records.get_mut(&number) {
            record.freed &= !pages;
            if record.freed != 0 || record.live == 0 {
                self.to_remove.push_back(number);
            }
        }
    }

    /// Forgets a batch of which no page is in use.
    fn forget(&mut self, number: u64) {
        if let Some(record) = self.records.remove(&number) {
            self.copies_bytes -= record.heap_bytes();
        }
        if self.records.capacity() > MOST_SPARE + 4 * self.records.len() {
            self.records.shrink_to(2 * self.records.len());
        }
    }

    /// Notes that the store may not have removed it.
    pub(super) fn not_removed(&mut self, removal: Removal) {
        self.to_remove.push_back(removal.batch.into_raw());
    }

    /// Looks at `count` batches with something to remove, and forgets those that the store has forgotten.
    pub(super) fn forget_expired(&mut self, count: usize, now: Duration) {
        for _ in 0..count.min(self.to_remove.len()) {
            let Some(number) = self.to_remove.pop_front() else {
                return;
            };
            match self.records.get(&number) {
                Some(record) if !record.has_expired(now) => self.to_remove.push_back(number),
                _ => self.forget(number),
            }
        }
    }

    /// Bytes of the heap that this takes.
    pub(super) fn heap_bytes(&self) -> usize {
        // A table has a byte more for each entry.
        let entry = size_of::<(u64, Record)>() + 1;
        let queues = self.to_remove.capacity() + self.abandoned.capacity();
        self.records.capacity() * entry + queues * size_of::<u64>() + self.copies_bytes
    }

    /// Batches with something to remove.
    pub(super) fn left_to_remove(&self) -> usize {
        self.to_remove.len()
    }

    /// All batches in use.
    pub(super) fn in_use(&self) -> Vec<BatchId> {
        let live = self.records.iter().filter(|(_, record)| record.live != 0);
        live.map(|(number, _)| BatchId::from_raw(*number)).collect()
    }

    /// Notes that the store no longer has a batch. Returns how many pages are lost by that which were not before.
    pub(super) fn note_lost(&mut self, batch: BatchId) -> u64 {
        match self.records.get_mut(&batch.into_raw()) {
            Some(record) if !record.is_lost => {
                record.is_lost = true;
                record.live.count_ones().into()
            }
            _ => 0,
        }
    }

    /// Forgets all batches, which are to be removed whole.
    pub(super) fn take_all(&mut self) -> Vec<Removal> {
        self.is_over = true;
        self.copies_bytes = 0;
        self.to_remove.clear();
        let records = self.records.drain().map(|(number, _)| number);
        let mut all: Vec<_> = records.chain(self.abandoned.drain(..)).collect();
        all.sort_unstable();
        all.dedup();
        all.into_iter().map(whole).collect()
    }

    /// Takes those that arrived after all were forgotten; `None` if there are none and none is under way.
    pub(super) fn take_late(&mut self) -> Option<Vec<Removal>> {
        let late: Vec<_> = self.late.drain(..).map(whole).collect();
        (!late.is_empty() || self.sending > 0).then_some(late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "minutes: a hundred thousand pages")]
    fn copies_of_freed_pages_take_no_memory() {
        let mut batches = Batches::default();
        let copy = |index: u8| (Location::from_raw(index.into()), 100 + u64::from(index));
        let ids: Vec<_> = (0..1700)
            .map(|_| {
                let id = batches.number().unwrap();
                assert!(batches.add(id, 64, (0..64).map(copy).collect()));
                id
            })
            .collect();
        let full = batches.heap_bytes();
        assert!(full >= ids.len() * 64 * size_of::<FileCopy>());
        for (kept, &batch) in ids.iter().enumerate() {
            for index in (0..64).filter(|index| usize::from(*index) != kept % 64) {
                let place = Place { batch, index };
                assert_eq!(batches.copy(place), Some(copy(index)));
                assert_eq!(batches.free(place, Duration::ZERO), Some(copy(index)));
            }
            let index = (kept % 64) as u8;
            assert_eq!(batches.copy(Place { batch, index }), Some(copy(index)));
        }
        let left = batches.heap_bytes();
        assert!(left <= 128 * ids.len(), "{left}");
        for (kept, &batch) in ids.iter().enumerate() {
            let index = (kept % 64) as u8;
            assert_eq!(
                batches.free(Place { batch, index }, Duration::ZERO),
                Some(copy(index))
            );
        }
        let removals = batches.removals(usize::MAX);
        removals.into_iter().for_each(|one| batches.removed(one));
        assert_eq!(batches.copies_bytes, 0);
        assert!(batches.heap_bytes() < full / 16);
    }

    #[test]
    fn what_is_under_way_at_the_end_is_waited_for_and_removed() {
        let mut batches = Batches::default();
        let mut number = || batches.number().expect("a number");
        let (early, late, lost) = (number(), number(), number());
        assert!(batches.add(early, 3, Box::default()));
        let all = batches.take_all();
        assert_eq!(all, [whole(early.into_raw())]);
        assert_eq!(batches.number(), None);
        assert_eq!(batches.take_late(), Some(Vec::new()));
        assert!(!batches.add(late, 3, Box::default()));
        assert_eq!(batches.take_late(), Some(vec![whole(late.into_raw())]));
        batches.abandon(lost, Duration::ZERO);
        assert_eq!(batches.take_late(), Some(vec![whole(lost.into_raw())]));
        assert_eq!(batches.take_late(), None);
    }
}
