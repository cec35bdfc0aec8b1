//! Storing pages: a slot is reserved, a tier takes the page, and the entry is published.

use zsmalloc::PageSource;

use crate::{
    allocator::Leaving,
    counters::thread_number,
    entry::{Position, TierKind},
    error::StoreError,
    group::Group,
    page::Page,
    scratch::Scratch,
    slot::Slot,
    space::SwapSpace,
    stored_bytes::StoredBytes,
    tier::Placed,
};

/// The tiers to which a new page is offered, in order.
pub(crate) const STORE_ORDER: [TierKind; 3] = [
    TierKind::SameFilled,
    TierKind::Compressed,
    TierKind::Uncompressed,
];

impl<S: PageSource> SwapSpace<S> {
    /// Stores a copy of `page` and returns its slot, with a count of 1. The caller may then drop
    /// its own copy.
    ///
    /// # Errors
    ///
    /// If there is no room for the page. Nothing of it is kept then.
    pub fn store(&self, page: &Page, scratch: &mut Scratch) -> Result<Slot, StoreError> {
        self.store_for(self.groups.root(), page, scratch)
    }

    /// Like [`store`](Self::store), for a group.
    ///
    /// # Errors
    ///
    /// As [`store`](Self::store).
    pub fn store_for(
        &self,
        group: &Group,
        page: &Page,
        scratch: &mut Scratch,
    ) -> Result<Slot, StoreError> {
        let mut reserved = None;
        self.reserve(group, 1, |slot| reserved = Some(slot))?;
        let slot = reserved.expect("a successful reservation gives a slot");
        let mut bytes = StoredBytes::default();
        self.store_in(slot, page, scratch, &mut bytes)?;
        self.note_stored(group, &bytes);
        Ok(slot)
    }

    /// Stores a batch of pages, in consecutive slots as far as possible, and appends the outcome
    /// for each page to `out`, in order.
    pub fn store_batch(
        &self,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Slot, StoreError>>,
    ) {
        self.store_batch_for(self.groups.root(), pages, scratch, out);
    }

    /// Like [`store_batch`](Self::store_batch), for a group.
    pub fn store_batch_for(
        &self,
        group: &Group,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Slot, StoreError>>,
    ) {
        let mut slots = Vec::with_capacity(pages.len());
        let mut bytes = StoredBytes::default();
        let mut rest = pages;
        while !rest.is_empty() {
            slots.clear();
            if let Err(error) = self.reserve(group, rest.len(), |slot| slots.push(slot)) {
                out.extend(rest.iter().map(|_| Err(error)));
                break;
            }
            let (now, later) = rest.split_at(slots.len());
            for (&slot, page) in slots.iter().zip(now) {
                out.push(
                    self.store_in(slot, page, scratch, &mut bytes)
                        .map(|()| slot),
                );
            }
            rest = later;
        }
        self.note_stored(group, &bytes);
    }

    /// Accounts for stored pages, before their slots are returned.
    fn note_stored(&self, group: &Group, stored: &StoredBytes) {
        for (tier, pages, bytes) in stored.tiers() {
            self.counters.stored(tier, pages, bytes);
        }
        stored.charge(group);
    }

    /// Reserves a part of the slots for `wanted` pages. Those of an error are all counted as not stored.
    fn reserve(
        &self,
        group: &Group,
        wanted: usize,
        take: impl FnMut(Slot),
    ) -> Result<(), StoreError> {
        match self.allocator.reserve(group, thread_number(), wanted, take) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.counters.stores_failed(wanted as u64);
                Err(error)
            }
        }
    }

    fn store_in(
        &self,
        slot: Slot,
        page: &Page,
        scratch: &mut Scratch,
        stored: &mut StoredBytes,
    ) -> Result<(), StoreError> {
        match self.place(slot, page, scratch) {
            Ok(position) => {
                let bytes = self.tier(position.tier).bytes(position.location);
                self.table.entry(slot).publish(slot, position);
                stored.add(position.tier, bytes);
                Ok(())
            }
            Err(error) => {
                self.table.entry(slot).cancel(slot);
                let mut leaving = Leaving::default();
                self.allocator.freed(slot.cluster(), 1, &mut leaving);
                self.allocator.give_back(leaving);
                self.counters.stores_failed(1);
                Err(error)
            }
        }
    }

    /// Stores a page in a tier. If the pool has no room, outside of memory, if there is such a tier.
    fn place(
        &self,
        slot: Slot,
        page: &Page,
        scratch: &mut Scratch,
    ) -> Result<Position, StoreError> {
        let mut no_room = None;
        for kind in STORE_ORDER {
            match self.offer(kind, slot, page, scratch) {
                Ok(Some(position)) => return Ok(position),
                Ok(None) => {}
                Err(error @ StoreError::Pool(_)) => no_room = Some(error),
                Err(error) => return Err(error),
            }
        }
        match no_room {
            Some(error) => self.place_outside(slot, page, scratch, error),
            None => Err(StoreError::NoTier),
        }
    }

    /// Stores a page, for which the pool has no room, outside of memory.
    #[cold]
    fn place_outside(
        &self,
        slot: Slot,
        page: &Page,
        scratch: &mut Scratch,
        mut no_room: StoreError,
    ) -> Result<Position, StoreError> {
        for kind in self.outside {
            match self.offer(kind, slot, page, scratch) {
                Ok(Some(position)) => return Ok(position),
                Ok(None) => {}
                Err(error) => {
                    let has_next = kind == self.outside[0] && self.has(self.outside[1]);
                    if !has_next && !matches!(error, StoreError::Pool(_)) {
                        return Err(error);
                    }
                    no_room = error;
                }
            }
        }
        Err(no_room)
    }

    /// Offers a page to a tier. `None` if there is no such tier, or if it declines the page.
    #[inline]
    fn offer(
        &self,
        kind: TierKind,
        slot: Slot,
        page: &Page,
        scratch: &mut Scratch,
    ) -> Result<Option<Position>, StoreError> {
        let Some(tier) = &self.tiers[kind.index()] else {
            return Ok(None);
        };
        let location = match tier.store(slot, page, scratch)? {
            Placed::Declined => return Ok(None),
            Placed::At(location) => location,
            Placed::WithAnnex(location, word) => self.keep_annex(slot, kind, location, word)?,
        };
        Ok(Some(Position {
            tier: kind,
            location,
        }))
    }
}
