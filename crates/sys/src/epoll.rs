//! Waiting for many descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// An epoll instance. Level-triggered; each descriptor carries a number of the caller's.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// One ready descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// The number it was added with.
    pub token: u64,
    /// The other end is gone.
    pub hung_up: bool,
}

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

    /// Watches a descriptor for input.
    pub fn add(&self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, descriptor, token)
    }

    /// Stops watching a descriptor.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, descriptor, 0)
    }

    fn control(&self, operation: i32, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
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

    /// Waits for descriptors to be ready, at most `timeout`; interrupted counts as none.
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
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
        ready.extend(events[..count as usize].iter().map(|event| Ready {
            token: event.u64,
            hung_up: event.events & (libc::EPOLLHUP | libc::EPOLLRDHUP | libc::EPOLLERR) as u32
                != 0,
        }));
        Ok(())
    }
}
