//! `--metrics`: the statistics of a run for Prometheus, by HTTP on a Unix socket or the loopback
//! interface.
//!
//! A thread serves one connection at a time. Any local user may connect to a TCP port: a request is
//! bounded in bytes and in time, nothing is taken from it but its method and path, and what is served
//! is numbers. The parser is `httparse`. (`tiny_http` has neither a time limit for a request nor a bound
//! on its connections, and the larger servers bring an asynchronous runtime.)

mod address;
mod exposition;
mod http;

pub use address::MetricsAddress;

use crate::failure::Failure;
use exposition::{Format, expose};
use http::{Request, answer, read_request};
use memfold_pager::Control;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a connection may take from its start to the end of its answer. A longer time lets a slow
/// peer keep others waiting for longer.
const LONGEST: Duration = Duration::from_secs(1);

/// An address that is listened at.
#[derive(Debug)]
pub struct Metrics(address::Listener);

/// What the numbers are of.
pub struct Source {
    /// The supervisor's.
    pub control: Control,
    /// Programs that could not be put under the limit.
    pub unmanaged: Arc<AtomicU64>,
    /// Name of the program, for display.
    pub program: String,
    /// When the run began.
    pub started: Instant,
}

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Serving {
    stop: Option<std::io::PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    /// Listens at an address.
    pub fn bind(address: &MetricsAddress) -> Result<Metrics, Failure> {
        address
            .listen()
            .map(Metrics)
            .map_err(|error| Failure::own(format!("cannot listen at --metrics {address}: {error}")))
    }

    /// Serves from a thread of its own, which inherits that all signals are blocked.
    pub fn serve(self, source: Source) -> io::Result<Serving> {
        let (stopped, stop) = std::io::pipe()?;
        let thread = std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                while wait(&[stopped.as_fd(), self.0.as_fd()]) {
                    // A peer that fails is no concern of the run's.
                    let _ = self.serve_one(&source);
                }
            })?;
        Ok(Serving {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    fn serve_one(&self, source: &Source) -> io::Result<()> {
        let mut stream = self.0.accept(LONGEST)?;
        let request = read_request(&mut *stream, Instant::now() + LONGEST);
        let answer = match request {
            Ok(Request {
                accepts_openmetrics,
            }) => {
                let format = if accepts_openmetrics {
                    Format::OpenMetrics
                } else {
                    Format::Text
                };
                answer("200 OK", format.content_type(), &expose(source, format))
            }
            Err(refusal) => answer(refusal.status(), "text/plain", refusal.status()),
        };
        stream.write_all(&answer)
    }
}

/// Waits until a connection comes. Returns whether to go on: not once the first descriptor is closed.
fn wait(descriptors: &[BorrowedFd<'_>; 2]) -> bool {
    let mut waited = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut waited, None) {
        Ok(_) => waited[0].revents().is_empty(),
        Err(error) => error == rustix::io::Errno::INTR,
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // At most the time that one connection may take.
            let _ = thread.join();
        }
    }
}
