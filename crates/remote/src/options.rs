//! Options of a store.

use std::{fmt, sync::Arc, time::Duration};

use rustls::ClientConfig;
use zeroize::Zeroizing;

use crate::{address::StoreAddress, stream::tls_config};

/// Which store holds the pages, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Where the store is.
    pub address: StoreAddress,
    /// The user, where the store knows users.
    pub user: Option<String>,
    /// The password.
    pub password: Option<Password>,
    /// Certificates that the servers' are checked against, in PEM; without any, the host's.
    pub ca_certificates: Option<Vec<u8>>,
    /// Replicas that must have a page before it counts as stored, beside the primary.
    pub replicas: u32,
    /// How long the store keeps pages that are not renewed: at least twice [`patience`](Self::patience), and from
    /// 10 seconds to 31 days. Default: an hour.
    pub time_to_live: Duration,
    /// How long a program waits for a page before it is killed. Default: a minute.
    pub patience: Duration,
}

impl Options {
    /// The defaults for a store.
    pub fn new(address: StoreAddress) -> Self {
        Self {
            address,
            user: None,
            password: None,
            ca_certificates: None,
            replicas: 0,
            time_to_live: Duration::from_secs(3600),
            patience: Duration::from_secs(60),
        }
    }
}

/// A password, zeroed on drop and not printed.
#[derive(Clone)]
pub struct Password(Zeroizing<String>);

impl Password {
    /// The password with this text.
    pub fn new(text: String) -> Self {
        Self(Zeroizing::new(text))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(…)")
    }
}

/// What a connection needs.
pub(crate) struct Access {
    /// The settings of TLS, where it is spoken.
    pub(crate) tls: Option<Arc<ClientConfig>>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Password>,
}

impl Access {
    /// Fails if the certificates cannot be used, and says why.
    pub(crate) fn of(options: &Options) -> Result<Self, String> {
        let certificates = options.ca_certificates.as_deref();
        let tls = options.address.tls.then(|| tls_config(certificates));
        Ok(Self {
            tls: tls.transpose()?,
            user: options.user.clone(),
            password: options.password.clone(),
        })
    }
}
