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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        TierKey,
        sync::lock,
        tier::{
            Tier,
            remote::{
                Batch, BatchId, RemoteBackend, RemoteConfig, RemoteError, RemoteTier, Removal,
            },
        },
    };
    use std::time::Duration;

    /// A store that answers with a longer record than it was given.
    struct Hostile;

    impl RemoteBackend for Hostile {
        fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
            batches.iter().map(|_| Ok(())).collect()
        }

        fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
            let bytes = |place: &Place| match place.index {
                1 => 256 << 10,
                _ => 1000,
            };
            let record = |place| Ok(Some(vec![0; bytes(place)]));
            places.iter().map(record).collect()
        }

        fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
            removals.iter().map(|_| Ok(())).collect()
        }

        fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
            batches.iter().map(|_| Ok(true)).collect()
        }

        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn sleep(&self, _: Duration) {}
    }

    #[test]
    fn records_take_no_more_than_they_must() {
        let key = TierKey::new([9; 32]);
        let tier = RemoteTier::new(Box::new(Hostile), &key, RemoteConfig::default());
        for number in 0..RECORDS as u64 {
            let batch = BatchId::from_raw(number);
            let locations = [0, 1].map(|index| Place { batch, index }.location(1000));
            tier.prefetch(&locations);
        }
        let ahead = lock(&tier.ahead);
        let bytes: usize = ahead.records.values().map(Vec::len).sum();
        assert_eq!(bytes, RECORDS * 1000);
    }
}
