//! Records that were fetched before their pages are loaded.

use std::collections::{HashMap, VecDeque};

use crate::tier::remote::backend::Place;

/// The most records kept. More keep what several threads fetch and take more memory, up to 4 KiB each.
const RECORDS: usize = 512;

/// Encrypted records. None is ever outdated, because no place is used twice.
#[derive(Default)]
pub(super) struct Ahead {
    records: HashMap<Place, Vec<u8>>,
    /// In order of arrival, with some that were taken.
    order: VecDeque<Place>,
}

impl Ahead {
    pub(super) fn insert(&mut self, place: Place, record: Vec<u8>) {
        while self.order.len() >= RECORDS {
            if let Some(oldest) = self.order.pop_front() {
                self.records.remove(&oldest);
            }
        }
        if self.records.insert(place, record).is_none() {
            self.order.push_back(place);
        }
    }

    pub(super) fn has(&self, place: Place) -> bool {
        self.records.contains_key(&place)
    }

    pub(super) fn take(&mut self, place: Place) -> Option<Vec<u8>> {
        let record = self.records.remove(&place)?;
        if self.records.is_empty() {
            self.order.clear();
        }
        Some(record)
    }
}
