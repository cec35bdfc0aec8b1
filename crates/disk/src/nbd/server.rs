//! Connections: a thread each.

use super::handshake::{HandshakeError, negotiate};
use super::team::Team;
use super::transmission::transmit_beside;
use crate::disk::Disk;
use crate::sync::lock;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zsmalloc::PageSource;

/// Connections at a time. One costs a thread and three buffers; more are hung up on.
pub const MOST_CONNECTIONS: usize = 128;
/// Longest negotiation. A client that takes longer is hung up on, so that it keeps no connection from
/// others.
const LONGEST_HANDSHAKE: Duration = Duration::from_secs(10);

/// A connection to a client.
#[derive(Debug)]
pub enum Connection {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Connection {
    fn try_clone(&self) -> io::Result<Connection> {
        Ok(match self {
            Connection::Unix(stream) => Connection::Unix(stream.try_clone()?),
            Connection::Tcp(stream) => Connection::Tcp(stream.try_clone()?),
        })
    }

    /// Reads and writes fail after so long without progress, or never.
    fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Connection::Unix(stream) => {
                stream.set_read_timeout(patience)?;
                stream.set_write_timeout(patience)
            }
            Connection::Tcp(stream) => {
                stream.set_read_timeout(patience)?;
                stream.set_write_timeout(patience)
            }
        }
    }

    /// Replies leave at once: they are collected before.
    fn prepare(&self) -> io::Result<()> {
        match self {
            Connection::Unix(_) => Ok(()),
            Connection::Tcp(stream) => stream.set_nodelay(true),
        }
    }

    fn shut_down(&self) {
        // Fails only if the client was faster.
        let _ = match self {
            Connection::Unix(stream) => stream.shutdown(Shutdown::Both),
            Connection::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Connection::Unix(stream) => (&*stream).read(buffer),
            Connection::Tcp(stream) => (&*stream).read(buffer),
        }
    }
}

impl Write for &Connection {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Connection::Unix(stream) => (&*stream).write(data),
            Connection::Tcp(stream) => (&*stream).write(data),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection in its negotiation, all of which must be over in time: a client that sends a byte now and
/// then does not lengthen it.
struct Hurried<'a> {
    connection: &'a Connection,
    until: Instant,
}

impl Hurried<'_> {
    fn set_patience(&self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.connection.set_patience(Some(left))
    }
}

impl Read for Hurried<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.set_patience()?;
        self.connection.read(buffer)
    }
}

impl Write for Hurried<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.set_patience()?;
        self.connection.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Serves one client from its first byte to its last.
///
/// # Errors
///
/// If the negotiation fails, or the connection does.
pub fn serve_connection<S: PageSource + 'static>(
    disk: &Disk<S>,
    connection: &Connection,
) -> Result<(), HandshakeError> {
    serve_beside(disk, None, connection)
}

fn serve_beside<S: PageSource + 'static>(
    disk: &Disk<S>,
    team: Option<&Team<S>>,
    connection: &Connection,
) -> Result<(), HandshakeError> {
    connection.prepare()?;
    let mut hurried = Hurried {
        connection,
        until: Instant::now() + LONGEST_HANDSHAKE,
    };
    let agreed = negotiate(&mut hurried, disk.size())?;
    connection.set_patience(None)?;
    Ok(transmit_beside(
        disk,
        team,
        agreed,
        (connection, connection),
    )?)
}

struct Client {
    connection: Connection,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Clients {
    by_number: HashMap<u64, Client>,
    next: u64,
}

/// Serves any number of clients. Dropping it hangs up on all, after the requests that are being served:
/// [`Disk::end_waits`] keeps those from waiting for a store.
pub struct Server<S: PageSource + 'static> {
    disk: Arc<Disk<S>>,
    team: Arc<Team<S>>,
    clients: Arc<Mutex<Clients>>,
}

impl<S: PageSource + 'static> std::fmt::Debug for Server<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let connections = &self.connections();
        f.debug_struct("Server")
            .field("connections", connections)
            .finish()
    }
}

impl<S: PageSource + Send + Sync + 'static> Server<S> {
    /// A server of a disk, without clients.
    pub fn new(disk: Arc<Disk<S>>) -> Self {
        Server {
            team: Arc::new(Team::new(Arc::clone(&disk))),
            disk,
            clients: Arc::default(),
        }
    }

    /// Serves a client in a thread of its own.
    ///
    /// # Errors
    ///
    /// If there are [`MOST_CONNECTIONS`] already, or no thread or descriptor can be had. The client is
    /// hung up on.
    pub fn welcome(&self, connection: Connection) -> io::Result<()> {
        let mut clients = lock(&self.clients);
        if self.team.is_ending() || clients.by_number.len() >= MOST_CONNECTIONS {
            return Err(io::Error::other("too many connections"));
        }
        let number = clients.next;
        clients.next += 1;
        let its = connection.try_clone()?;
        let (disk, team) = (self.disk.clone(), self.team.clone());
        let all = self.clients.clone();
        let builder = std::thread::Builder::new().name("memfold-nbd".to_owned());
        // It takes itself off the list when this is done with it.
        let thread = builder.spawn(move || {
            match serve_beside(&disk, Some(&team), &its) {
                Ok(()) | Err(HandshakeError::Ended) => {}
                Err(error) => log::debug!("a client is hung up on: {error}"),
            }
            its.shut_down();
            lock(&all).by_number.remove(&number);
        })?;
        let client = Client {
            connection,
            thread: Some(thread),
        };
        clients.by_number.insert(number, client);
        Ok(())
    }
}

impl<S: PageSource + 'static> Server<S> {
    /// Clients at the moment.
    pub fn connections(&self) -> usize {
        lock(&self.clients).by_number.len()
    }
}

impl<S: PageSource + 'static> Drop for Server<S> {
    fn drop(&mut self) {
        self.team.end();
        let threads: Vec<_> = {
            let mut clients = lock(&self.clients);
            let clients = clients.by_number.values_mut();
            let end = |client: &mut Client| {
                client.connection.shut_down();
                client.thread.take()
            };
            clients.filter_map(end).collect()
        };
        for thread in threads {
            // It panics only where the swap space finds a bug, and has reported it.
            let _ = thread.join();
        }
    }
}
