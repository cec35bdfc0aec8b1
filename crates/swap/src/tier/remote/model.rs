//! A store in memory with a clock of its own, which fails as a test demands.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use crate::{
    sync::{Mutex, lock},
    tier::remote::backend::{Batch, BatchId, Place, RemoteBackend, RemoteError, Removal},
};

/// A fault of a [`ModelStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelFault {
    /// Batches do not arrive.
    PutLost,
    /// Batches arrive, but their acknowledgement does not.
    PutUnacknowledged,
    /// There is no room.
    Full,
    /// Batches arrive at too few replicas.
    TooFewReplicas,
    /// Gets are not answered.
    GetUnavailable,
    /// What is got is damaged in one bit.
    GetForged,
    /// What is got is what lay at another place.
    GetReplayed,
    /// Removals do not arrive.
    RemoveLost,
    /// Removals take place, but their acknowledgement does not arrive.
    RemoveUnacknowledged,
    /// Renewals do not arrive.
    RenewLost,
}

#[derive(Debug, Default)]
struct State {
    now: Duration,
    suspended: Duration,
    time_to_live: Option<Duration>,
    batches: BTreeMap<u64, Stored>,
    /// How many calls to come fail so.
    faults: HashMap<ModelFault, u64>,
    happened: u64,
    /// A record that was stored once.
    old: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Stored {
    records: BTreeMap<u8, Vec<u8>>,
    expires: Option<Duration>,
}

/// A store in memory. Clones are the same store.
#[derive(Debug, Clone, Default)]
pub struct ModelStore(Arc<Mutex<State>>);

impl ModelStore {
    /// An empty store, which forgets what is not renewed within `time_to_live`.
    pub fn new(time_to_live: Option<Duration>) -> Self {
        let store = Self::default();
        lock(&store.0).time_to_live = time_to_live;
        store
    }

    /// Makes the next `times` calls that it concerns fail.
    pub fn arm(&self, fault: ModelFault, times: u64) {
        lock(&self.0).faults.insert(fault, times);
    }

    /// Cancels pending faults.
    pub fn disarm(&self) {
        lock(&self.0).faults.clear();
    }

    /// Faults so far.
    pub fn happened(&self) -> u64 {
        lock(&self.0).happened
    }

    /// Lets time pass.
    pub fn pass(&self, time: Duration) {
        lock(&self.0).pass(time);
    }

    /// Lets time pass in which the store's client is suspended.
    pub fn suspend(&self, time: Duration) {
        let mut state = lock(&self.0);
        state.suspended += time;
        state.pass(Duration::ZERO);
    }

    /// Loses everything, as a server that restarts empty.
    pub fn flush(&self) {
        lock(&self.0).batches.clear();
    }

    /// Loses one batch, the one with this index among those it has. Returns whether there was one.
    pub fn evict(&self, index: usize) -> bool {
        let mut state = lock(&self.0);
        let number = match state.batches.len() {
            0 => None,
            count => state.batches.keys().nth(index % count).copied(),
        };
        number.is_some_and(|number| state.batches.remove(&number).is_some())
    }

    /// Records in the store.
    pub fn records(&self) -> usize {
        let state = lock(&self.0);
        state.batches.values().map(|one| one.records.len()).sum()
    }
}

impl State {
    fn strikes(&mut self, fault: ModelFault) -> bool {
        let Some(left) = self.faults.get_mut(&fault).filter(|left| **left > 0) else {
            return false;
        };
        *left -= 1;
        self.happened += 1;
        true
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now + self.suspended;
        let lives = |one: &Stored| one.expires.is_none_or(|expires| now < expires);
        self.batches.retain(|_, one| lives(one));
    }

    fn expires(&self) -> Option<Duration> {
        self.time_to_live
            .map(|lives| self.now + self.suspended + lives)
    }

    fn put(&mut self, batch: &Batch) -> Result<(), RemoteError> {
        const LATE: RemoteError = RemoteError::Unavailable("no answer in time");
        if self.strikes(ModelFault::Full) {
            return Err(RemoteError::Full);
        }
        if self.strikes(ModelFault::PutLost) {
            return Err(LATE);
        }
        let number = batch.id.into_raw();
        assert!(batch.records.len() <= 64 && !batch.records.is_empty());
        let records = (0..).zip(batch.records.iter().cloned()).collect();
        let expires = self.expires();
        let before = self.batches.insert(number, Stored { records, expires });
        assert!(before.is_none(), "batch {number} was stored before");
        if self.old.is_none() {
            self.old = batch.records.first().cloned();
        }
        if self.strikes(ModelFault::TooFewReplicas) {
            return Err(RemoteError::TooFewReplicas);
        }
        if self.strikes(ModelFault::PutUnacknowledged) {
            return Err(LATE);
        }
        Ok(())
    }

    fn get(&mut self, place: Place) -> Result<Option<Vec<u8>>, RemoteError> {
        if self.strikes(ModelFault::GetUnavailable) {
            return Err(RemoteError::Unavailable("no answer in time"));
        }
        let stored = self.batches.get(&place.batch.into_raw());
        let record = stored.and_then(|stored| stored.records.get(&place.index).cloned());
        let Some(mut record) = record else {
            return Ok(None);
        };
        if self.strikes(ModelFault::GetForged) {
            let middle = record.len() / 2;
            record[middle] ^= 1;
        }
        if self.strikes(ModelFault::GetReplayed) {
            record = self.old.clone().expect("something was stored");
        }
        Ok(Some(record))
    }

    fn remove(&mut self, removal: Removal) -> Result<(), RemoteError> {
        const LATE: RemoteError = RemoteError::Unavailable("no answer in time");
        if self.strikes(ModelFault::RemoveLost) {
            return Err(LATE);
        }
        let number = removal.batch.into_raw();
        match removal.pages {
            None => drop(self.batches.remove(&number)),
            Some(pages) => {
                if let Some(stored) = self.batches.get_mut(&number) {
                    stored.records.retain(|index, _| pages >> index & 1 == 0);
                }
            }
        }
        if self.strikes(ModelFault::RemoveUnacknowledged) {
            return Err(LATE);
        }
        Ok(())
    }

    fn renew(&mut self, batch: BatchId) -> Result<bool, RemoteError> {
        if self.strikes(ModelFault::RenewLost) {
            return Err(RemoteError::Unavailable("no answer in time"));
        }
        let expires = self.expires();
        let stored = self.batches.get_mut(&batch.into_raw());
        Ok(stored.is_some_and(|stored| {
            stored.expires = expires;
            true
        }))
    }
}

impl RemoteBackend for ModelStore {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        let mut state = lock(&self.0);
        batches.iter().map(|batch| state.put(batch)).collect()
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        let mut state = lock(&self.0);
        places.iter().map(|place| state.get(*place)).collect()
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        let mut state = lock(&self.0);
        removals.iter().map(|one| state.remove(*one)).collect()
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        let mut state = lock(&self.0);
        batches.iter().map(|batch| state.renew(*batch)).collect()
    }

    fn now(&self) -> Duration {
        lock(&self.0).now
    }

    fn time_of_store(&self) -> Duration {
        let state = lock(&self.0);
        state.now + state.suspended
    }

    fn sleep(&self, duration: Duration) {
        lock(&self.0).pass(duration);
    }
}
