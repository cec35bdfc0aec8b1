//! What memfold itself costs.

use rustix::time::{ClockId, clock_gettime};

/// CPU time of this process in seconds: user and system time of all its threads.
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
