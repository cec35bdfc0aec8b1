//! What can be wrong with a store, before a program depends on it.

use crate::address::StoreAddress;

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No server can be reached.
    #[error(
        "cannot connect to the store {address}: {reason}; check that it runs, and that no firewall is \
         between"
    )]
    Unreachable {
        /// The store.
        address: StoreAddress,
        /// What the last server that was tried failed with.
        reason: String,
    },
    /// The server refuses the user or the password.
    #[error("the store {address} refuses the user or password")]
    Refused {
        /// The store.
        address: StoreAddress,
    },
    /// The certificates of the authorities cannot be used.
    #[error(
        "the authorities that the servers of {address} are checked against cannot be read: {reason}; give \
         certificates in PEM"
    )]
    Authorities {
        /// The store.
        address: StoreAddress,
        /// What is wrong with them.
        reason: String,
    },
    /// There is a user, and no password.
    #[error(
        "the user {user} of the store {address} has no password; without one, it would be the default user's connection"
    )]
    NoPassword {
        /// The store.
        address: StoreAddress,
        /// The user.
        user: String,
    },
    /// A page could not be written, read, renewed and removed.
    #[error(
        "the store {address} cannot hold pages: {reason}; the user needs HSET, HMGET, HDEL, PEXPIRE, UNLINK, \
         MULTI, EXEC, WAIT, ROLE, INFO, PING, ASKING, CLUSTER SLOTS and CLUSTER INFO, on the keys memfold:* \
         (docs/remote.md has the line for ACL)"
    )]
    Unusable {
        /// The store.
        address: StoreAddress,
        /// What failed.
        reason: String,
    },
    /// A primary has fewer replicas than were asked for.
    #[error(
        "the server {server} has {found} replicas, fewer than the {wanted} that must have each page; no page \
         could be sent there"
    )]
    TooFewReplicas {
        /// The primary.
        server: String,
        /// Its replicas.
        found: u32,
        /// Replicas asked for.
        wanted: u32,
    },
    /// The address names several primaries that are no cluster.
    #[error(
        "{first} and {other} of the store {address} are two primaries and no cluster, and pages would be looked for on the \
         wrong one; name one of them with its replicas, or make them a cluster"
    )]
    NoCluster {
        /// The store.
        address: StoreAddress,
        /// A primary.
        first: String,
        /// Another one.
        other: String,
    },
    /// The time to live is not longer than what a program waits, or out of range.
    #[error(
        "the time to live of pages must be at least twice the timeout, after which a program is killed, and from \
         10 seconds to 31 days"
    )]
    TimeToLive,
    /// No random numbers, or no thread.
    #[error("cannot prepare the remote tier: {0}")]
    Own(#[from] std::io::Error),
}
