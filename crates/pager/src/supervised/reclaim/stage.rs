//! Bookkeeping of the stage's places.
//!
//! The stage itself is memory of the program. Places are allocated in a ring, so that pages staged
//! together are contiguous and freed together. A place is **empty**, **reserved** (for a page in
//! flight), **live** (holds the page of its owner) or **dead** (holds a page that is to be freed).

use crate::page::VirtualPage;
use crate::page_state::StageIndex;
use crate::replacement::List;
use std::collections::VecDeque;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Empty,
    /// For a victim that may be a sample of a list.
    Reserved(Option<List>),
    /// With the owner's page.
    Live(VirtualPage, Option<List>),
    Dead,
}

/// The places of one stage, guarded by a mutex of the address space.
#[derive(Debug)]
pub(crate) struct Stage {
    places: Vec<Place>,
    /// Where the search for an empty place starts.
    next: usize,
    /// Live places in order of arrival, and places that died since.
    arrivals: VecDeque<StageIndex>,
    /// Dead places that are in no command.
    dead: Vec<StageIndex>,
    /// Number of live places.
    live: usize,
}

impl Stage {
    /// An empty stage of `places` pages.
    pub(crate) fn new(places: usize) -> Stage {
        Stage {
            places: vec![Place::Empty; places],
            next: 0,
            arrivals: VecDeque::new(),
            dead: Vec::new(),
            live: 0,
        }
    }

    /// Reserves the next empty place of the ring for a victim that may be a sample of a list; `None` if
    /// there is none. Skips places that cannot be
    /// freed for a while, for example because they are pinned.
    pub(crate) fn reserve(&mut self, sample: Option<List>) -> Option<StageIndex> {
        let ring = (self.next..self.places.len()).chain(0..self.next);
        let index = ring
            .into_iter()
            .find(|index| self.places[*index] == Place::Empty)?;
        self.places[index] = Place::Reserved(sample);
        self.next = (index + 1) % self.places.len();
        Some(StageIndex(index as u32))
    }

    fn place(&mut self, index: StageIndex) -> &mut Place {
        &mut self.places[index.0 as usize]
    }

    /// The page of `owner` arrived at a reserved place.
    pub(crate) fn arrived(&mut self, index: StageIndex, owner: VirtualPage) {
        let place = self.place(index);
        let sample = match *place {
            Place::Reserved(sample) => sample,
            _ => None,
        };
        *place = Place::Live(owner, sample);
        self.live += 1;
        self.arrivals.push_back(index);
        if self.arrivals.len() > 2 * self.places.len() {
            self.prune_arrivals();
        }
    }

    /// Keeps the last arrival of each live place. `oldest` removes dead places from the queue, but may
    /// not be called for a long time.
    fn prune_arrivals(&mut self) {
        let mut wanted: Vec<bool> = self
            .places
            .iter()
            .map(|place| matches!(place, Place::Live(..)))
            .collect();
        let mut kept: VecDeque<StageIndex> = VecDeque::with_capacity(self.live);
        while let Some(index) = self.arrivals.pop_back() {
            if std::mem::take(&mut wanted[index.0 as usize]) {
                kept.push_front(index);
            }
        }
        self.arrivals = kept;
    }

    /// No page arrived at a reserved place.
    pub(crate) fn unused(&mut self, index: StageIndex) {
        *self.place(index) = Place::Empty;
    }

    /// A page that is not needed any more arrived at a reserved place.
    pub(crate) fn arrived_dead(&mut self, index: StageIndex) {
        *self.place(index) = Place::Dead;
        self.dead.push(index);
    }

    /// The number of consecutive empty places from `index` on, at most `most`.
    pub(crate) fn empty_from(&self, index: StageIndex, most: u32) -> u32 {
        let places = self.places[index.0 as usize..].iter().take(most as usize);
        places.take_while(|place| **place == Place::Empty).count() as u32
    }

    /// Pages were faulted in at empty places (`mlockall`): they are to be freed.
    pub(crate) fn filled(&mut self, first: StageIndex, pages: u32) {
        for index in first.0..first.0 + pages {
            if *self.place(StageIndex(index)) == Place::Empty {
                self.arrived_dead(StageIndex(index));
            }
        }
    }

    /// The page of a live place is not needed any more.
    pub(crate) fn retire(&mut self, index: StageIndex) {
        let place = self.place(index);
        if matches!(place, Place::Live(..)) {
            *place = Place::Dead;
            self.live -= 1;
            self.dead.push(index);
        }
    }

    /// The owner of a live place.
    pub(crate) fn owner(&self, index: StageIndex) -> Option<VirtualPage> {
        match self.places[index.0 as usize] {
            Place::Live(owner, _) => Some(owner),
            _ => None,
        }
    }

    /// The page of a dead place is needed after all. `false` if it is about to be freed, or was not there.
    pub(crate) fn revive(&mut self, index: StageIndex, owner: VirtualPage) -> bool {
        let Some(at) = self.dead.iter().position(|dead| *dead == index) else {
            return false;
        };
        self.dead.swap_remove(at);
        *self.place(index) = Place::Reserved(None);
        self.arrived(index, owner);
        true
    }

    /// The owner of a live page moved to another address.
    pub(crate) fn rename(&mut self, index: StageIndex, owner: VirtualPage) {
        let place = self.place(index);
        if let Place::Live(_, sample) = *place {
            *place = Place::Live(owner, sample);
        }
    }

    /// The list of which the page at a live place is a sample.
    pub(crate) fn sample(&self, index: StageIndex) -> Option<List> {
        match self.places[index.0 as usize] {
            Place::Live(_, sample) => sample,
            _ => None,
        }
    }

    /// Number of live places.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Collects up to `count` of the oldest live pages into `out`. They stay live.
    pub(crate) fn oldest(&mut self, count: usize, out: &mut Vec<(StageIndex, VirtualPage)>) {
        out.clear();
        while out.len() < count {
            let Some(index) = self.arrivals.pop_front() else {
                break;
            };
            if let Place::Live(owner, _) = self.places[index.0 as usize] {
                out.push((index, owner));
            }
        }
        // They stay the oldest until they are retired.
        for (index, _) in out.iter().rev() {
            self.arrivals.push_front(*index);
        }
    }

    /// Takes up to `runs` runs of dead places to be freed, as (first, pages).
    pub(crate) fn take_dead(&mut self, runs: usize) -> Vec<(StageIndex, u32)> {
        self.dead.sort_unstable();
        let mut taken: Vec<(StageIndex, u32)> = Vec::new();
        let mut used = 0;
        for index in &self.dead {
            let full = taken.len() == runs;
            match taken.last_mut() {
                Some((first, pages)) if first.0 + *pages == index.0 => *pages += 1,
                _ if full => break,
                _ => taken.push((*index, 1)),
            }
            used += 1;
        }
        self.dead.drain(..used);
        taken
    }

    /// A run taken by [`Stage::take_dead`] was freed.
    pub(crate) fn dropped(&mut self, first: StageIndex, pages: u32) {
        for index in first.0..first.0 + pages {
            self.places[index as usize] = Place::Empty;
        }
    }

    /// A run taken by [`Stage::take_dead`] was not freed completely, and waits again.
    pub(crate) fn not_dropped(&mut self, first: StageIndex, pages: u32) {
        self.dead.extend((first.0..first.0 + pages).map(StageIndex));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserve_all(stage: &mut Stage) {
        let places = std::iter::from_fn(|| stage.reserve(None)).count();
        assert_eq!(places, stage.places.len());
    }

    #[test]
    fn a_page_goes_through_the_stage() {
        let mut stage = Stage::new(8);
        for place in 0..3 {
            assert_eq!(stage.reserve(None), Some(StageIndex(place)));
        }
        stage.arrived(StageIndex(0), VirtualPage(100));
        stage.unused(StageIndex(1));
        stage.arrived(StageIndex(2), VirtualPage(102));
        let mut oldest = Vec::new();
        stage.oldest(10, &mut oldest);
        assert_eq!(
            oldest,
            [
                (StageIndex(0), VirtualPage(100)),
                (StageIndex(2), VirtualPage(102))
            ]
        );
        stage.rename(StageIndex(2), VirtualPage(7));
        stage.retire(StageIndex(0));
        stage.retire(StageIndex(0));
        assert_eq!(stage.live(), 1);
        stage.oldest(10, &mut oldest);
        assert_eq!(oldest, [(StageIndex(2), VirtualPage(7))]);
        assert_eq!(stage.take_dead(4), [(StageIndex(0), 1)]);
        stage.not_dropped(StageIndex(0), 1);
        assert_eq!(stage.take_dead(4), [(StageIndex(0), 1)]);
        stage.dropped(StageIndex(0), 1);
    }

    #[test]
    fn arrivals_do_not_pile_up() {
        let mut stage = Stage::new(4);
        reserve_all(&mut stage);
        stage.arrived(StageIndex(3), VirtualPage(3));
        for page in 0..100 {
            let index = StageIndex(page % 3);
            stage.arrived(index, VirtualPage(u64::from(page)));
            stage.retire(index);
            assert!(stage.arrivals.len() <= 8);
        }
        let mut oldest = Vec::new();
        stage.oldest(9, &mut oldest);
        assert_eq!(oldest, [(StageIndex(3), VirtualPage(3))]);
    }

    #[test]
    fn the_ring_never_hands_out_a_used_place() {
        let mut stage = Stage::new(8);
        reserve_all(&mut stage);
        stage.arrived(StageIndex(0), VirtualPage(1));
        assert!(stage.reserve(None).is_none());
        stage.retire(StageIndex(0));
        assert!(stage.reserve(None).is_none());
        for (first, pages) in stage.take_dead(1) {
            stage.dropped(first, pages);
        }
        assert_eq!(stage.reserve(None), Some(StageIndex(0)));
    }

    #[test]
    fn a_place_that_cannot_be_freed_is_skipped() {
        let mut stage = Stage::new(4);
        reserve_all(&mut stage);
        for place in 0..4 {
            stage.arrived_dead(StageIndex(place));
        }
        stage.take_dead(1);
        stage.not_dropped(StageIndex(0), 1);
        stage.dropped(StageIndex(1), 3);
        for place in [1, 2, 3] {
            assert_eq!(stage.reserve(None), Some(StageIndex(place)));
        }
        assert!(stage.reserve(None).is_none());
    }

    #[test]
    fn pages_faulted_in_at_empty_places_are_freed() {
        let mut stage = Stage::new(8);
        assert_eq!(stage.reserve(None), Some(StageIndex(0)));
        assert_eq!(stage.reserve(None), Some(StageIndex(1)));
        stage.arrived(StageIndex(0), VirtualPage(1));
        assert_eq!(stage.empty_from(StageIndex(0), 8), 0);
        assert_eq!(stage.empty_from(StageIndex(3), 2), 2);
        assert_eq!(stage.empty_from(StageIndex(3), 99), 5);
        stage.filled(StageIndex(1), 3);
        assert_eq!(stage.take_dead(4), [(StageIndex(2), 2)]);
        assert_eq!(stage.live(), 1);
    }

    #[test]
    fn dead_places_are_taken_in_runs() {
        let mut stage = Stage::new(8);
        reserve_all(&mut stage);
        for index in [5, 1, 2, 0, 7] {
            stage.arrived_dead(StageIndex(index));
        }
        assert_eq!(stage.take_dead(2), [(StageIndex(0), 3), (StageIndex(5), 1)]);
        assert_eq!(stage.take_dead(2), [(StageIndex(7), 1)]);
    }
}
