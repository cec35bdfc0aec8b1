//! Waiting for many descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// An epoll instance. Each descriptor carries a number of the caller's.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// A new instance.
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: flags only; the descriptor is fresh.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: nobody else owns it.
        Ok(Epoll(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Watches a descriptor for input: each wait reports it while there is some.
    pub fn add(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, descriptor, libc::EPOLLIN, token)
    }

    /// Watches a descriptor for input that arrives: what there is now is reported once, and what comes
    /// after that. Whoever leaves some of it unread is not told again, unless by [`Epoll::remind`].
    pub fn add_arrivals(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLET;
        self.control(libc::EPOLL_CTL_ADD, descriptor, events, token)
    }

    /// Reports once more what there is to be read of a descriptor whose arrivals are watched.
    pub fn remind(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLET;
        self.control(libc::EPOLL_CTL_MOD, descriptor, events, token)
    }

    /// Stops watching a descriptor.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, descriptor, 0, 0)
    }

    fn control(
        &self,
        operation: i32,
        descriptor: BorrowedFd<'_>,
        events: i32,
        token: u64,
    ) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: live descriptors and a live event.
        let result = unsafe {
            libc::epoll_ctl(
                self.0.as_raw_fd(),
                operation,
                descriptor.as_raw_fd(),
                &mut event,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Waits for descriptors to be ready (or the other end gone), at most `timeout`, and fills in the
    /// numbers they were added with; interrupted counts as none.
    pub fn wait(&self, ready: &mut Vec<u64>, timeout: Option<Duration>) -> io::Result<()> {
        const EVENTS: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let milliseconds = timeout.map_or(-1, |t| t.as_millis().min(i32::MAX as u128) as i32);
        ready.clear();
        // SAFETY: room for as many events as told.
        let count = unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                events.as_mut_ptr(),
                EVENTS as i32,
                milliseconds,
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted {
                Ok(())
            } else {
                Err(error)
            };
        }
        ready.extend(events[..count as usize].iter().map(|event| event.u64));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

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
        assert_eq!(reported(), [0; 0], "left unread, and not told again");
        epoll.remind(reader.as_fd(), 7).expect("it is watched");
        assert_eq!(reported(), [7]);
        writer.write_all(b"b").expect("room in the pipe");
        assert_eq!(reported(), [7], "what came on top");
        reader.read_exact(&mut [0; 2]).expect("two bytes");
        epoll.remind(reader.as_fd(), 7).expect("it is watched");
        assert_eq!(reported(), [0; 0], "nothing is there");
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
        assert_eq!(ready, [8], "also when nobody can write any more");
    }
}
