//! Pages of a swap space in Valkey or Redis.
//!
//! [`RemoteStore::open`] connects to one server or a cluster, checks that it can hold pages, and makes
//! the [`RemoteTier`] that a [`SwapSpace`](memfold_swap::SwapSpace) takes.
//!
//! ```no_run
//! use memfold_remote::{Options, RemoteStore};
//! use memfold_swap::{SwapConfig, SwapSpace};
//! use zsmalloc::HeapSource;
//!
//! let store = RemoteStore::open(&Options::new("valkey://127.0.0.1:7000".parse()?))?;
//! let mut space = SwapSpace::new(HeapSource::new(), SwapConfig::default())?;
//! space.add_tier(Box::new(store.tier()))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `address` | addresses, as users write them |
//! | `connect` | the checks before a program depends on the store |
//! | `store` | which command goes to which server, and what the answers mean |
//! | `topology` | which server has which hash slots |
//! | `node` | connections to one server |
//! | `stream` | their bytes, through TLS too, by a deadline |
//! | `names` | looking up addresses, by a deadline |
//! | `answer` | taking answers apart, within what was asked for |
//! | `failure` | what errors mean |
//! | `threads` | starting threads that take no signals |
//! | `keeper` | the thread that removes, renews and warns |
//! | `warnings` | a logger for programs that have none |
//!
//! A store is not trusted: what it returns is refused if it is not what was stored, and it reads
//! nothing but the number and the sizes of pages, and when they are used. It can lose pages and keep
//! programs waiting. Each call ends by a deadline, and no answer takes more memory than what was asked for.

mod address;
mod answer;
mod connect;
mod deadline;
mod failure;
/// Entry points of the fuzz targets, which tests also run on `fuzz/corpus`.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod keeper;
mod names;
mod node;
mod open_error;
mod options;
mod store;
mod stream;
mod threads;
mod topology;
mod warnings;

use std::{fmt, sync::Arc, time::Duration};

use memfold_swap::{RemoteConfig, RemoteTier, TierKey};

use keeper::Keeper;
use store::Store;

pub use address::{Server, StoreAddress, StoreAddressError};
pub use open_error::OpenError;
pub use options::{Options, Password};
pub use warnings::show_warnings;

/// The Zstandard level. Higher sends less and takes more CPU time.
const LEVEL: i32 = 1;
/// Renewals in a time to live. More bear a longer cut before pages are forgotten.
const RENEWALS: u32 = 4;
/// The least and the most of [`Options::time_to_live`].
const SHORTEST_LIFE: Duration = Duration::from_secs(10);
const LONGEST_LIFE: Duration = Duration::from_secs(31 * 24 * 3600);
/// The longest that a clean end waits for the store to remove what is left.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// A store that is open. When it is dropped, all pages are removed from it.
pub struct RemoteStore {
    tier: Arc<RemoteTier>,
    /// Stopped before the last removal.
    keeper: Option<Keeper>,
}

impl RemoteStore {
    /// Connects to a store and checks it. Starts a thread.
    ///
    /// # Errors
    ///
    /// See [`OpenError`]. Nothing is left in the store then, unless it refuses removals: that expires.
    pub fn open(options: &Options) -> Result<Self, OpenError> {
        let least = options.patience.saturating_mul(2).max(SHORTEST_LIFE);
        if !(least..=LONGEST_LIFE).contains(&options.time_to_live) {
            return Err(OpenError::TimeToLive);
        }
        if let (Some(user), None) = (&options.user, &options.password) {
            return Err(OpenError::NoPassword {
                address: options.address.clone(),
                user: user.clone(),
            });
        }
        warn_if_readable(&options.address);
        let mut random = [0; 48];
        getrandom::fill(&mut random).map_err(std::io::Error::from)?;
        let (key, run) = random.split_at(32);
        let run: String = run.iter().map(|byte| format!("{byte:02x}")).collect();
        let key = TierKey::new(key.try_into().expect("32 bytes were split off"));
        let store = Store::new(options, run)?;
        store.check(options)?;
        let mut config = RemoteConfig::default();
        config.level = LEVEL;
        config.patience = options.patience;
        config.renew_every = options.time_to_live / RENEWALS;
        config.time_to_live = options.time_to_live;
        let tier = Arc::new(RemoteTier::new(Box::new(store), &key, config));
        let name = options.address.to_string();
        let keeper = Keeper::start(Arc::clone(&tier), name, options.patience)?;
        Ok(Self {
            tier,
            keeper: Some(keeper),
        })
    }

    /// The tier for a space.
    pub fn tier(&self) -> Arc<RemoteTier> {
        Arc::clone(&self.tier)
    }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        drop(self.keeper.take());
        if !self.tier.clear(LAST_WAIT) {
            log::warn!(
                "the store, or a replica of it, does not answer, so pages may be left there; it forgets them \
                 when their time to live is over"
            );
        }
    }
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStore")
            .field("tier", &self.tier)
            .finish_non_exhaustive()
    }
}

/// Warns of an address where others may read what is sent.
fn warn_if_readable(address: &StoreAddress) {
    let is_here = |host: &str| host == "localhost" || host.starts_with("127.") || host == "::1";
    if !address.tls && !address.servers.iter().all(|server| is_here(&server.host)) {
        log::warn!(
            "valkey:// is not encrypted: pages are, but others on the network can read the password, and delete pages; \
             use valkeys:// there"
        );
    }
}
