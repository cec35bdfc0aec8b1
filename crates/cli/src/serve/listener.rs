//! The socket at which clients connect.

use crate::address::Address;
use crate::private_socket::PrivateSocket;
use memfold_disk::nbd::Connection;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rustix::net::sockopt;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Of a path in a URI, all but these and letters and digits is encoded.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket.
    Unix(PrivateSocket),
    /// Over TCP.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens. Only with `everybody` at an address that other machines may reach.
    ///
    /// # Errors
    ///
    /// If the address is in use or not this machine's, or others may reach it.
    pub fn bind(address: &Address, everybody: bool) -> io::Result<Listener> {
        let listener = match address {
            Address::Unix(path) => Listener::Unix(PrivateSocket::bind(path)?),
            Address::Tcp(text) => {
                let all: Vec<SocketAddr> = text.to_socket_addrs()?.collect();
                if !everybody && !all.iter().all(|address| address.ip().is_loopback()) {
                    return Err(io::Error::new(
                        ErrorKind::PermissionDenied,
                        "other machines may reach it, NBD asks for no password, and nothing is encrypted; \
                         use unix:PATH or 127.0.0.1:PORT with ssh -L, or add --allow-everybody",
                    ));
                }
                let listener = TcpListener::bind(&*all)?;
                listener.set_nonblocking(true)?;
                Listener::Tcp(listener)
            }
        };
        Ok(listener)
    }

    /// The next connection; `None` if there is none now.
    ///
    /// # Errors
    ///
    /// If there are no descriptors.
    pub fn accept(&self) -> io::Result<Option<Connection>> {
        let accepted = match self {
            Listener::Unix(listener) => listener.accept().and_then(|stream| {
                stream.set_nonblocking(false)?;
                Ok(Connection::Unix(stream))
            }),
            Listener::Tcp(listener) => listener.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(false)?;
                end_if_lost(&stream)?;
                Ok(Connection::Tcp(stream))
            }),
        };
        match accepted {
            Ok(connection) => Ok(Some(connection)),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::ConnectionAborted | ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
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

/// As clients write it: an NBD URI.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listener::Unix(listener) => fmt_unix(listener.path(), f),
            Listener::Tcp(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "nbd://{address}"),
                Err(_) => f.write_str("nbd://?"),
            },
        }
    }
}

fn fmt_unix(path: &Path, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    // Fails only without a working directory.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let path = percent_encode(path.as_os_str().as_bytes(), ENCODED);
    write!(f, "nbd+unix:///?socket={path}")
}

/// Has a connection end where the client's machine is gone, as it would keep its place: within two minutes if all replies
/// have arrived, else when the kernel gives retransmission up (`tcp_retries2`). `TCP_USER_TIMEOUT` would be as quick there,
/// but would also disconnect clients that are stopped with a full receive window, which would lose their disk.
fn end_if_lost(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 6)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_is_the_users_own_and_goes_with_its_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let address = Address::Unix(path.clone());
        let listener = Listener::bind(&address, false).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let second = Listener::bind(&address, false).unwrap_err();
        assert_eq!(second.kind(), ErrorKind::AddrInUse);
        fs::remove_file(&path).unwrap();
        let third = Listener::bind(&address, false).unwrap();
        drop(listener);
        assert!(path.exists(), "it is another's now");
        drop(third);
        assert!(!path.exists());
        // That of a server that was killed.
        drop(UnixListener::bind(&path).unwrap());
        drop(Listener::bind(&address, false).expect("the stale one is replaced"));
    }

    #[test]
    fn clients_elsewhere_can_use_the_uri_of_a_socket() {
        struct Uri(&'static str);
        impl fmt::Display for Uri {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt_unix(Path::new(self.0), f)
            }
        }
        let uri = |path| Uri(path).to_string();
        assert_eq!(
            uri("/run/a-b_c.sock"),
            "nbd+unix:///?socket=/run/a-b_c.sock"
        );
        assert_eq!(
            uri("/a b/c&d+e#f%g?h;i=ü"),
            "nbd+unix:///?socket=/a%20b/c%26d%2Be%23f%25g%3Fh%3Bi%3D%C3%BC"
        );
        let folder = std::env::current_dir().unwrap();
        let folder = percent_encode(folder.as_os_str().as_bytes(), ENCODED);
        assert_eq!(uri("./s"), format!("nbd+unix:///?socket={folder}/s"));
    }

    #[test]
    fn connections_over_tcp_end_where_the_client_is_lost() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".to_owned()), false).unwrap();
        let Listener::Tcp(socket) = &listener else {
            panic!("it is one of TCP")
        };
        let _client = TcpStream::connect(socket.local_addr().unwrap()).unwrap();
        let Some(Connection::Tcp(stream)) = listener.accept().unwrap() else {
            panic!("there is a client")
        };
        assert!(sockopt::socket_keepalive(&stream).unwrap());
    }

    #[test]
    fn other_machines_are_kept_out() {
        let refused = Listener::bind(&Address::Tcp("0.0.0.0:0".to_owned()), false).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert!(Listener::bind(&Address::Tcp("127.0.0.1:0".to_owned()), false).is_ok());
        assert!(Listener::bind(&Address::Tcp("0.0.0.0:0".to_owned()), true).is_ok());
    }
}
