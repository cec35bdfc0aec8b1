//! Waiting for input on many descriptors.

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// An epoll instance. Each descriptor carries a token of the caller's.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// Creates an instance, close-on-exec.
    pub fn new() -> io::Result<Epoll> {
        Ok(Epoll(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Watches a descriptor for input, level-triggered: each wait reports it while there is some.
    pub fn add(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let token = EventData::new_u64(token);
        Ok(epoll::add(&self.0, descriptor, token, EventFlags::IN)?)
    }

    /// Watches a descriptor for input, edge-triggered: input that is left unread is reported again only
    /// when more arrives, or after [`Epoll::remind`].
    pub fn add_arrivals(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let token = EventData::new_u64(token);
        Ok(epoll::add(&self.0, descriptor, token, ARRIVALS)?)
    }

    /// Rearms an edge-triggered descriptor: input that is still unread is reported once more.
    pub fn remind(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let token = EventData::new_u64(token);
        Ok(epoll::modify(&self.0, descriptor, token, ARRIVALS)?)
    }

    /// Stops watching a descriptor.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.0, descriptor)?)
    }

    /// Waits at most `timeout` (rounded down to milliseconds) for input or a hangup, and fills in the tokens
    /// of the ready descriptors. A signal ends the wait with none.
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        let mut events = [const { MaybeUninit::uninit() }; 16];
        ready.clear();
        match epoll::wait(&self.0, &mut events, timeout.map(milliseconds).as_ref()) {
            Ok((events, _)) => ready.extend(events.iter().map(|event| event.data.u64())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }
}

/// By which other threads wake one that waits: it has input from a call of `wake` on until `clear`.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// Creates one, close-on-exec, without input.
    pub fn new() -> io::Result<Wake> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Wake(eventfd(0, flags)?))
    }

    /// Wakes the thread that waits.
    pub fn wake(&self) {
        // Fails only where it has been woken 2^64 times.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Called before looking for what others woke for.
    pub fn clear(&self) {
        // Fails only where there is nothing.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

const ARRIVALS: EventFlags = EventFlags::IN.union(EventFlags::ET);

/// A timeout that `epoll_pwait` can take: whole milliseconds, at most `i32::MAX`. (With others rustix rounds up,
/// or calls `epoll_pwait2`, which seccomp filters may not know.)
fn milliseconds(timeout: Duration) -> Timespec {
    let whole = timeout.as_millis().min(i32::MAX as u128) as i64;
    Timespec {
        tv_sec: whole / 1000,
        tv_nsec: whole % 1000 * 1_000_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn arrivals_are_reported_once_unless_reminded() {
        let epoll = Epoll::new().expect("an epoll instance");
        let (mut reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(b"a").expect("room in the pipe");
        epoll.add_arrivals(reader.as_fd(), 7).expect("it is new");
        let mut ready = Vec::new();
        let mut reported = || {
            epoll
                .wait(&mut ready, Some(Duration::ZERO))
                .expect("it waits");
            ready.clone()
        };
        assert_eq!(reported(), [7], "what was there before");
        assert_eq!(reported(), [0; 0], "left unread: not reported again");
        epoll.remind(reader.as_fd(), 7).expect("it is watched");
        assert_eq!(reported(), [7]);
        writer.write_all(b"b").expect("room in the pipe");
        assert_eq!(reported(), [7], "new input on top of the old");
        reader.read_exact(&mut [0; 2]).expect("two bytes");
        epoll.remind(reader.as_fd(), 7).expect("it is watched");
        assert_eq!(reported(), [0; 0], "nothing is unread");
    }

    #[test]
    fn input_is_reported_while_it_is_there() {
        let epoll = Epoll::new().expect("an epoll instance");
        let (reader, mut writer) = io::pipe().expect("a pipe");
        epoll.add(reader.as_fd(), 8).expect("it is new");
        writer.write_all(b"a").expect("room in the pipe");
        let mut ready = Vec::new();
        for _ in 0..2 {
            epoll
                .wait(&mut ready, Some(Duration::ZERO))
                .expect("it waits");
            assert_eq!(ready, [8]);
        }
        drop(writer);
        epoll
            .wait(&mut ready, Some(Duration::ZERO))
            .expect("it waits");
        assert_eq!(ready, [8], "a hangup is reported, too");
    }

    #[test]
    fn a_thread_is_woken_until_it_has_looked() {
        let (epoll, wake) = (Epoll::new().unwrap(), Wake::new().unwrap());
        epoll.add(wake.as_fd(), 9).expect("it is new");
        let mut ready = Vec::new();
        let mut reported = || {
            epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
            ready.clone()
        };
        wake.clear();
        assert_eq!(reported(), [0; 0]);
        wake.wake();
        wake.wake();
        assert_eq!((reported(), reported()), (vec![9], vec![9]));
        wake.clear();
        assert_eq!(reported(), [0; 0]);
    }
}
