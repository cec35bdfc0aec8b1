//! `--metrics`: the statistics of a run for Prometheus, by HTTP on a Unix socket or the loopback
//! interface.
//!
//! A thread serves a few connections side by side. Any local user may connect to a TCP port: a request is
//! bounded in bytes and in time, peers that say nothing make room for others, nothing is taken from a
//! request but its method and path, and what is served is numbers. The parser is `httparse`. (`tiny_http` has neither a time limit for a request nor a bound
//! on its connections, and the larger servers bring an asynchronous runtime.)

mod address;
mod connections;
mod exposition;
mod http;

pub use address::MetricsAddress;

use crate::failure::Failure;
use connections::Connections;
use exposition::{Format, expose};
use http::answer;
use memfold_pager::Control;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Until connections are accepted again after that failed. A longer time spares the CPU and delays answers.
const SHORTAGE: Duration = Duration::from_millis(20);

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
            .spawn(move || self.serve_all(&source, stopped.as_fd()))?;
        Ok(Serving {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Until the other end of a pipe is closed.
    fn serve_all(&self, source: &Source, stopped: BorrowedFd<'_>) {
        let mut connections = Connections::default();
        while wait(stopped, self.0.as_fd(), &connections) {
            match self.0.accept() {
                Ok(stream) => connections.add(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The peer has left, or descriptors are short: then it would be tried without a pause.
                Err(_) => std::thread::sleep(SHORTAGE),
            }
            connections.serve(&|request| {
                let format = if request.accepts_openmetrics {
                    Format::OpenMetrics
                } else {
                    Format::Text
                };
                answer("200 OK", format.content_type(), &expose(source, format))
            });
        }
    }
}

/// Waits until there is something to do. Returns whether to go on: not once the first descriptor is
/// closed.
fn wait(stopped: BorrowedFd<'_>, listener: BorrowedFd<'_>, connections: &Connections) -> bool {
    let own = [(stopped, PollFlags::IN), (listener, PollFlags::IN)];
    let all = own.into_iter().chain(connections.waited());
    let mut waited: Vec<PollFd<'_>> = all
        .map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
        .collect();
    let rest = connections
        .deadline()
        .map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let rest = rest.map(|rest| Timespec {
        tv_sec: rest.as_secs() as i64,
        tv_nsec: i64::from(rest.subsec_nanos()),
    });
    match poll(&mut waited, rest.as_ref()) {
        Ok(_) => waited[0].revents().is_empty(),
        Err(error) => error == rustix::io::Errno::INTR,
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It waits for no peer.
            let _ = thread.join();
        }
    }
}
