//! What the remote tier asks of a store on other machines.

use std::time::Duration;

use crate::entry::Location;

/// Pages of a batch, and bits of a mask of them.
pub(crate) const BATCH_PAGES: usize = 64;

const INDEX_BITS: u32 = BATCH_PAGES.trailing_zeros();
/// Bytes of the unit in which a location holds the size of a record.
pub(super) const UNIT: usize = 32;
const UNITS_BITS: u32 = 8;
const PLACE_BITS: u32 = Location::BITS - UNITS_BITS;

/// The number of a batch: the store keeps it under one key. Never reused in a run, so that what is
/// late, such as a removal that timed out, cannot meet another batch's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(u64);

impl BatchId {
    /// The number after the last.
    pub(super) const END: u64 = 1 << (PLACE_BITS - INDEX_BITS);

    /// The batch with this number.
    ///
    /// # Panics
    ///
    /// If there can be none: it is 2^38 or above.
    pub const fn from_raw(number: u64) -> Self {
        assert!(number < Self::END, "no batch has this number");
        Self(number)
    }

    /// The number.
    pub const fn into_raw(self) -> u64 {
        self.0
    }
}

/// A page's place in the store: a batch, and an index in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The batch.
    pub batch: BatchId,
    /// The page's index in it, below 64.
    pub index: u8,
}

impl Place {
    /// The location of a record of `bytes` bytes here.
    pub(super) fn location(self, bytes: usize) -> Location {
        let place = self.batch.0 << INDEX_BITS | u64::from(self.index);
        Location::from_raw(place << UNITS_BITS | bytes.div_ceil(UNIT) as u64)
    }

    /// The place that a location names.
    pub(super) fn of(location: Location) -> Self {
        let place = location.into_raw() >> UNITS_BITS;
        Self {
            batch: BatchId(place >> INDEX_BITS),
            index: (place % BATCH_PAGES as u64) as u8,
        }
    }
}

/// Units of the record at a location.
pub(super) fn units(location: Location) -> usize {
    (location.into_raw() & ((1 << UNITS_BITS) - 1)) as usize
}

/// A batch of encrypted pages to be stored.
#[derive(Debug)]
pub struct Batch {
    /// Its number.
    pub id: BatchId,
    /// At most 64 records, by their index.
    pub records: Vec<Vec<u8>>,
}

/// Pages to be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// Their batch.
    pub batch: BatchId,
    /// A bit for each of them, by index; `None` for the whole batch.
    pub pages: Option<u64>,
}

/// Why the store did not do what it was asked to. All of it may have happened nevertheless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// It cannot be reached, did not answer in time, or cannot answer now.
    #[error("{0}")]
    Unavailable(&'static str),
    /// It has no room.
    #[error("it has no room")]
    Full,
    /// It refuses the user, the password or the command.
    #[error("it refuses the user, the password or a command")]
    Refused,
    /// Fewer replicas than were asked for have it.
    #[error("too few replicas acknowledged in time")]
    TooFewReplicas,
}

impl RemoteError {
    /// The same as a word that lives as long as the program.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Unavailable(reason) => reason,
            Self::Full => "the store has no room",
            Self::Refused => "the store refuses the user, the password or a command",
            Self::TooFewReplicas => "too few replicas acknowledged in time",
        }
    }
}

/// A store on other machines, and a clock. Each call ends in a bounded time, and tries once; the tier
/// tries again. Outcomes are those of the arguments, in order.
pub trait RemoteBackend: Send + Sync {
    /// Stores each batch, with a time to live. It is stored once the store and as many replicas as
    /// were asked for have acknowledged it.
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>>;

    /// Gets records; `None` if the store has none there.
    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>>;

    /// Removes records: from the store, and from as many replicas as were asked for. To remove what is not
    /// there is no error.
    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>>;

    /// Renews the time to live of batches; `false` for one that the store no longer has.
    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>>;

    /// The time since some moment, without those in which this machine is suspended: what a load waits for
    /// the store is counted in it.
    fn now(&self) -> Duration;

    /// The time since some moment. It goes on while this machine is suspended, as times to live do in the
    /// store.
    fn time_of_store(&self) -> Duration {
        self.now()
    }

    /// Sleeps.
    fn sleep(&self, duration: Duration);
}
