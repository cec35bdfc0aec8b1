//! Where metrics are served: `unix:PATH` or a loopback address with a port.

use crate::private_socket::PrivateSocket;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::str::FromStr;

/// An address of `--metrics`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A socket's path.
    Unix(PathBuf),
    /// A loopback address.
    Tcp(SocketAddr),
}

/// Why an address is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressError {
    /// It is neither form.
    Form,
    /// Other hosts could connect.
    NotLoopback,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AddressError::Form => "give unix:PATH, or HOST:PORT such as localhost:9464",
            AddressError::NotLoopback => {
                "only loopback addresses are served (localhost, 127.0.0.1, [::1]), as there is no \
                 authentication; put a proxy in front for other hosts"
            }
        })
    }
}

impl std::error::Error for AddressError {}

impl FromStr for MetricsAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<MetricsAddress, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return match path.file_name() {
                Some(_) => Ok(MetricsAddress::Unix(path)),
                None => Err(AddressError::Form),
            };
        }
        let address = match text.strip_prefix("localhost:") {
            Some(port) => {
                let port = port.parse().map_err(|_| AddressError::Form)?;
                SocketAddr::from((IpAddr::V4(Ipv4Addr::LOCALHOST), port))
            }
            None => text.parse().map_err(|_| AddressError::Form)?,
        };
        if address.ip().is_loopback() {
            Ok(MetricsAddress::Tcp(address))
        } else {
            Err(AddressError::NotLoopback)
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            MetricsAddress::Tcp(address) => address.fmt(f),
        }
    }
}

/// A connection.
pub trait Stream: Read + Write + AsFd {}
impl<T: Read + Write + AsFd> Stream for T {}

/// What listens.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket.
    Unix(PrivateSocket),
    /// A port.
    Tcp(TcpListener),
}

impl MetricsAddress {
    /// Listens. To be called while there is one thread, as the file creation mask is changed.
    pub fn listen(&self) -> io::Result<Listener> {
        match self {
            MetricsAddress::Unix(path) => PrivateSocket::bind(path).map(Listener::Unix),
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }
}

impl Listener {
    /// The next connection, if there is one. Nothing waits on it.
    pub fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Listener::Unix(listener) => {
                let stream = listener.accept()?;
                stream.set_nonblocking(true)?;
                Box::new(stream)
            }
            Listener::Tcp(listener) => {
                let (stream, _): (TcpStream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Box::new(stream)
            }
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::ErrorKind;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_loopback_and_unix_sockets_are_addresses() {
        for text in [
            "localhost:9464",
            "127.0.0.1:0",
            "127.9.9.9:80",
            "[::1]:9464",
        ] {
            let parsed = text.parse::<MetricsAddress>();
            assert!(matches!(parsed, Ok(MetricsAddress::Tcp(_))), "{text}");
        }
        let unix = "unix:/run/user/0/m.sock".parse::<MetricsAddress>().unwrap();
        assert_eq!(unix.to_string(), "unix:/run/user/0/m.sock");
        for text in ["0.0.0.0:9464", "[::]:9464", "192.168.1.1:80", "8.8.8.8:1"] {
            let refused = text.parse::<MetricsAddress>();
            assert_eq!(refused, Err(AddressError::NotLoopback), "{text}");
        }
        for text in [
            "",
            "9464",
            ":9464",
            "localhost",
            "localhost:x",
            "unix:",
            "unix:/",
            "a:1",
        ] {
            assert_eq!(
                text.parse::<MetricsAddress>(),
                Err(AddressError::Form),
                "{text}"
            );
        }
    }

    #[test]
    fn a_socket_is_private_and_goes_and_only_a_stale_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.sock");
        let address = MetricsAddress::Unix(path.clone());
        let listener = address.listen().unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(address.listen().unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        drop(address.listen().expect("the stale one is replaced"));
        fs::write(&path, "data").unwrap();
        assert!(address.listen().is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "data");
        fs::remove_file(&path).unwrap();
        symlink("elsewhere", &path).unwrap();
        assert!(address.listen().is_err());
        assert!(fs::symlink_metadata(&path).unwrap().is_symlink());
    }
}
