//! Addresses of stores, as users write them.

use std::{fmt, str::FromStr};

/// The port of Valkey and Redis.
const PORT: u16 = 6379;

/// A server of a store.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Server {
    /// Name or IP address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Where a store is: `valkey://HOST[:PORT][,HOST[:PORT]…]`, or `valkeys://` for TLS. `redis://` and
/// `rediss://` mean the same.
///
/// ```
/// use memfold_remote::StoreAddress;
///
/// let address: StoreAddress = "valkeys://one,[::1]:7000".parse()?;
/// assert!(address.tls);
/// assert_eq!(address.to_string(), "valkeys://one:6379,[::1]:7000");
/// # Ok::<(), memfold_remote::StoreAddressError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreAddress {
    /// Whether connections are encrypted and servers authenticated.
    pub tls: bool,
    /// At least one server. The others of a cluster are found.
    pub servers: Vec<Server>,
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "valkeys://" } else { "valkey://" })?;
        for (index, server) in self.servers.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{server}")?;
        }
        Ok(())
    }
}

/// Why an address is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreAddressError {
    /// It does not begin with a known scheme.
    #[error("give valkey://HOST[:PORT][,HOST[:PORT]…], or valkeys:// for TLS")]
    Scheme,
    /// It holds a user or a password, which other users could read from the command line.
    #[error(
        "a user or password must not be in the address, which other users can read; give \
         --remote-password-file, or MEMFOLD_REMOTE_USER and MEMFOLD_REMOTE_PASSWORD"
    )]
    Credentials,
    /// A server is not HOST or HOST:PORT.
    #[error("each server must be HOST or HOST:PORT, an IPv6 address in brackets")]
    Server,
}

impl FromStr for StoreAddress {
    type Err = StoreAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (scheme, servers) = text.split_once("://").ok_or(StoreAddressError::Scheme)?;
        let tls = match scheme {
            "valkey" | "redis" => false,
            "valkeys" | "rediss" => true,
            _ => return Err(StoreAddressError::Scheme),
        };
        if servers.contains('@') {
            return Err(StoreAddressError::Credentials);
        }
        let servers = servers.strip_suffix('/').unwrap_or(servers);
        let servers = servers.split(',').map(server);
        Ok(Self {
            tls,
            servers: servers.collect::<Result<_, _>>()?,
        })
    }
}

/// The longest name of a server: that of DNS.
const LONGEST_HOST: usize = 255;

/// Whether a text can be a name or an address. Others are not looked up, kept or shown: servers name further ones.
pub(crate) fn is_host(text: &str) -> bool {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || ".-_:%".contains(letter);
    (1..=LONGEST_HOST).contains(&text.len()) && text.chars().all(allowed)
}

fn server(text: &str) -> Result<Server, StoreAddressError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or(StoreAddressError::Server)?;
            (host, port.strip_prefix(':').filter(|_| !port.is_empty()))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if !is_host(host) {
        return Err(StoreAddressError::Server);
    }
    let port = port.map_or(Ok(PORT), |port| {
        port.parse().map_err(|_| StoreAddressError::Server)
    })?;
    Ok(Server {
        host: host.to_owned(),
        port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for (text, shown) in [
            ("valkey://a", "valkey://a:6379"),
            ("redis://a:1,b.c:2/", "valkey://a:1,b.c:2"),
            (
                "rediss://[::1],127.0.0.1:7",
                "valkeys://[::1]:6379,127.0.0.1:7",
            ),
        ] {
            assert_eq!(text.parse::<StoreAddress>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        use StoreAddressError as Error;
        for (text, error) in [
            ("a:6379", Error::Scheme),
            ("http://a", Error::Scheme),
            ("valkey://user:secret@a", Error::Credentials),
            ("valkey://", Error::Server),
            ("valkey://a,,b", Error::Server),
            ("valkey://a:b", Error::Server),
            ("valkey://a:65536", Error::Server),
            ("valkey://[::1", Error::Server),
            ("valkey://a/3", Error::Server),
            ("valkey://a b", Error::Server),
        ] {
            assert_eq!(text.parse::<StoreAddress>(), Err(error), "{text}");
        }
    }
}
