//! Configuration and statistics of the remote tier.

use std::time::Duration;

use crate::tier::remote::backend::RemoteError;

/// The configuration of a remote tier.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RemoteConfig {
    /// The Zstandard level.
    pub level: i32,
    /// How long a load waits for a store that does not answer before it fails.
    pub patience: Duration,
    /// The interval at which the [time to live](Self::time_to_live) of all batches is renewed: a fraction of it.
    pub renew_every: Duration,
    /// The time to live of all batches.
    pub time_to_live: Duration,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            level: 1,
            patience: Duration::from_secs(60),
            renew_every: Duration::from_secs(15 * 60),
            time_to_live: Duration::from_secs(60 * 60),
        }
    }
}

/// Statistics of the remote tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RemoteUsage {
    /// Pages stored so far, acknowledged.
    pub pages_out: u64,
    /// Pages loaded so far, those from a copy in the file included.
    pub pages_in: u64,
    /// Tries of loads, removals and renewals that were repeated.
    pub retries: u64,
    /// Batches that the store did not acknowledge. Their pages stayed where they were.
    pub store_failures: u64,
    /// Loads that failed: the store did not answer in time, has lost the page, or returned other data.
    pub load_failures: u64,
    /// Pages loaded from their copy in the file, because the store had none or did not answer.
    pub copies_read: u64,
    /// Pages found lost when their time to live was to be renewed.
    pub lost_pages: u64,
    /// Loads that wait for the store now.
    pub waiting: u64,
    /// For how long the first of them has waited.
    pub waiting_for: Duration,
    /// Why the store is not used now or the loads wait.
    pub trouble: Option<RemoteError>,
}
