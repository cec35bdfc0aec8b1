//! Addresses of a block device, as users write them.

use std::path::PathBuf;
use std::str::FromStr;

/// An address as `--nbd` takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket at this path, for this user alone.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("a path is missing after unix:".to_owned()),
                path => Ok(Address::Unix(path.into())),
            };
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Address::Tcp(text.to_owned()))
            }
            _ => Err("give unix:PATH or HOST:PORT, such as unix:disk.sock".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_apart() {
        assert_eq!("unix:/a:1".parse(), Ok(Address::Unix("/a:1".into())));
        assert_eq!("[::1]:7".parse(), Ok(Address::Tcp("[::1]:7".to_owned())));
        for text in ["", "unix:", "/path", "host", ":80", "host:", "host:70000"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
