//! The time that a call has left.

use std::{
    io,
    time::{Duration, Instant},
};

/// What is left until a deadline.
pub(crate) fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    // A socket takes no shorter time-out than a microsecond.
    if left < Duration::from_millis(1) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}
