//! A connection's bytes: connecting, reading and writing end by a deadline, through TLS too.
//!
//! A time-out of the socket holds for each read, so that a server that sends a byte at a time renews it. Before each
//! read and write it is set to what is left until the deadline.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, IntoRawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::fs::fstat;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};

use crate::{address::Server, deadline::left_until, names::Names};

/// A socket that is not waited for beyond a deadline. The program may close descriptors which it does not know
/// (`closefrom`), and have files by their numbers then: those are neither used nor closed.
struct Socket {
    /// `None` only while it is dropped.
    stream: Option<TcpStream>,
    /// Each socket has an inode of its own.
    identity: (u64, u64),
    deadline: Instant,
}

/// Device and inode.
fn identity(socket: &impl AsFd) -> io::Result<(u64, u64)> {
    let found = fstat(socket)?;
    Ok((found.st_dev, found.st_ino))
}

impl Socket {
    fn new(stream: TcpStream, deadline: Instant) -> io::Result<Self> {
        Ok(Self {
            identity: identity(&stream)?,
            stream: Some(stream),
            deadline,
        })
    }

    /// The stream, unless the program has closed it.
    fn open(&mut self) -> io::Result<&mut TcpStream> {
        let is_same =
            |stream: &&mut TcpStream| identity(*stream).is_ok_and(|found| found == self.identity);
        let stream = self.stream.as_mut().filter(is_same);
        stream.ok_or_else(|| io::Error::other("the program has closed the connection"))
    }

    /// Tries until it has an outcome, or the deadline has passed. A signal interrupts a wait, and a socket reports an
    /// expired time-out as if it did not block.
    fn in_time<T>(
        &mut self,
        mut attempt: impl FnMut(&mut TcpStream, Duration) -> io::Result<T>,
    ) -> io::Result<T> {
        use io::ErrorKind::{Interrupted, WouldBlock};
        loop {
            let left = left_until(self.deadline)?;
            match attempt(self.open()?, left) {
                Err(error) if matches!(error.kind(), Interrupted | WouldBlock) => {}
                outcome => return outcome,
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.in_time(|stream, left| {
            stream.set_read_timeout(Some(left))?;
            stream.read(buffer)
        })
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.in_time(|stream, left| {
            stream.set_write_timeout(Some(left))?;
            stream.write(bytes)
        })
    }

    /// What is written is sent at once.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.open().is_err()
            && let Some(stream) = self.stream.take()
        {
            // The number is another file's, or none's.
            let _ = stream.into_raw_fd();
        }
    }
}

/// A connection to a server, with TLS or without.
pub(crate) struct Stream(Inner);

enum Inner {
    Plain(Socket),
    Tls(Box<StreamOwned<ClientConnection, Socket>>),
}

impl Stream {
    /// Connects to a server, at the first of its addresses that answers.
    pub(crate) fn connect(
        server: &Server,
        names: &Arc<Names>,
        tls: Option<&Arc<ClientConfig>>,
        deadline: Instant,
    ) -> io::Result<Self> {
        let stream = Self::reach(server, names, deadline)?;
        stream.set_nodelay(true)?;
        let socket = Socket::new(stream, deadline)?;
        let Some(tls) = tls else {
            return Ok(Self(Inner::Plain(socket)));
        };
        let name = ServerName::try_from(server.host.clone()).map_err(io::Error::other)?;
        let connection = ClientConnection::new(Arc::clone(tls), name).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(connection, socket);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        Ok(Self(Inner::Tls(Box::new(stream))))
    }

    fn reach(server: &Server, names: &Arc<Names>, deadline: Instant) -> io::Result<TcpStream> {
        let addresses = names.look_up(server, deadline)?;
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for (index, address) in addresses.iter().enumerate() {
            // The others are tried even if this one swallows packets.
            let within = left_until(deadline)? / (addresses.len() - index) as u32;
            match TcpStream::connect_timeout(address, within) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn socket(&mut self) -> &mut Socket {
        match &mut self.0 {
            Inner::Plain(socket) => socket,
            Inner::Tls(stream) => &mut stream.sock,
        }
    }

    /// Has reads and writes end by this time from now on.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.socket().deadline = deadline;
    }

    /// Whether the program has not closed it.
    pub(crate) fn is_open(&mut self) -> bool {
        self.socket().open().is_ok()
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Inner::Plain(socket) => socket.read(buffer),
            Inner::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Inner::Plain(socket) => socket.write(bytes),
            Inner::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Inner::Plain(socket) => socket.flush(),
            Inner::Tls(stream) => stream.flush(),
        }
    }
}

/// The settings of TLS: which authorities servers are checked against. Without certificates, those of the host. The
/// error says what is wrong with them.
pub(crate) fn tls_config(certificates: Option<&[u8]>) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    match certificates {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem) {
                let certificate = certificate.map_err(|error| error.to_string())?;
                roots.add(certificate).map_err(|error| error.to_string())?;
            }
            if roots.is_empty() {
                return Err("it has no certificate in PEM".to_owned());
            }
        }
        None => {
            let mut found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                let error = found.errors.pop().map(|error| error.to_string());
                return Err(error.unwrap_or_else(|| "the host has none".to_owned()));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_that_cannot_be_used_are_refused() {
        let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for pem in [&b""[..], b"no certificate", broken] {
            assert!(tls_config(Some(pem)).is_err());
        }
    }
}
