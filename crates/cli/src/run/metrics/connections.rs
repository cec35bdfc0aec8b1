//! Connections that are served side by side, none of them for long.

use super::address::Stream;
use super::http::{Head, Refusal, Request, answer};
use rustix::event::PollFlags;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Connections at once. More let more slow peers wait, and take descriptors.
const MOST: usize = 16;
/// How long a connection may take from its start to the end of its answer. A longer time lets slow peers
/// keep others waiting for longer, and a run from ending.
const LONGEST: Duration = Duration::from_secs(1);

/// A peer, and how far it is.
struct Connection {
    stream: Box<dyn Stream>,
    deadline: Instant,
    head: Head,
    /// The answer, and how much of it was written.
    answer: Option<(Vec<u8>, usize)>,
}

/// All connections, the oldest first.
#[derive(Default)]
pub struct Connections(Vec<Connection>);

impl Connections {
    /// Takes one more. If there are many, the oldest that has said nothing leaves for it, or else the
    /// oldest: a peer that sends its request at once is served.
    pub fn add(&mut self, stream: Box<dyn Stream>) {
        if self.0.len() >= MOST {
            let silent = self.0.iter().position(|peer| peer.head.is_empty());
            self.0.remove(silent.unwrap_or(0));
        }
        self.0.push(Connection {
            stream,
            deadline: Instant::now() + LONGEST,
            head: Head::default(),
            answer: None,
        });
    }

    /// What is waited for on each.
    pub fn waited(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        self.0.iter().map(|peer| {
            let flags = match peer.answer {
                None => PollFlags::IN,
                Some(_) => PollFlags::OUT,
            };
            (peer.stream.as_fd(), flags)
        })
    }

    /// When the first of them has taken too long.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.first().map(|peer| peer.deadline)
    }

    /// Serves all as far as that needs no waiting, with the metrics as they are made by this. Peers that are
    /// done, too slow, or gone are dropped.
    pub fn serve(&mut self, metrics: &dyn Fn(Request) -> Vec<u8>) {
        let now = Instant::now();
        self.0
            .retain_mut(|peer| now < peer.deadline && peer.serve(metrics).unwrap_or(false));
    }
}

impl Connection {
    /// Returns whether there is more to do.
    fn serve(&mut self, metrics: &dyn Fn(Request) -> Vec<u8>) -> io::Result<bool> {
        if self.answer.is_none() {
            let mut part = [0; 1024];
            let length = match self.stream.read(&mut part) {
                Ok(0) => return Ok(false),
                Ok(length) => length,
                Err(error) if may_go_on(&error) => return Ok(true),
                Err(error) => return Err(error),
            };
            let made = match self.head.add(&part[..length]) {
                Ok(None) => return Ok(true),
                Ok(Some(request)) => metrics(request),
                Err(refusal) => refused(refusal),
            };
            self.answer = Some((made, 0));
        }
        let Some((made, written)) = &mut self.answer else {
            return Ok(true);
        };
        match self.stream.write(&made[*written..]) {
            Ok(0) => Ok(false),
            Ok(length) => {
                *written += length;
                Ok(*written < made.len())
            }
            Err(error) if may_go_on(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

fn refused(refusal: Refusal) -> Vec<u8> {
    answer(refusal.status(), "text/plain", refusal.status())
}

fn may_go_on(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn peer(connections: &mut Connections) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        connections.add(Box::new(ours));
        theirs
    }

    fn made(_: Request) -> Vec<u8> {
        b"numbers".to_vec()
    }

    #[test]
    fn whoever_asks_is_served_beside_any_number_who_say_nothing() {
        let mut connections = Connections::default();
        let mut asking = peer(&mut connections);
        asking.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
        connections.serve(&made);
        let silent: Vec<UnixStream> = (0..3 * MOST).map(|_| peer(&mut connections)).collect();
        assert_eq!(connections.0.len(), MOST);
        asking.write_all(b"\r\n").unwrap();
        connections.serve(&made);
        let mut text = String::new();
        asking.read_to_string(&mut text).unwrap();
        assert_eq!(text, "numbers");
        assert_eq!(connections.0.len(), MOST - 1);
        drop(silent);
        connections.serve(&made);
        assert!(connections.0.is_empty() && connections.deadline().is_none());
    }

    #[test]
    fn time_is_bounded_also_for_who_does_not_read() {
        let mut connections = Connections::default();
        let mut asking = peer(&mut connections);
        asking.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let began = Instant::now();
        while connections.deadline().is_some() {
            connections.serve(&|_| vec![b'x'; 16 << 20]);
            std::thread::sleep(Duration::from_millis(5));
        }
        let took = began.elapsed();
        assert!(took >= LONGEST && took < 5 * LONGEST, "{took:?}");
    }
}
