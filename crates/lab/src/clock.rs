//! CPU time of this process and its threads.

use std::{io, time::Duration};

/// CPU time of all threads of this process.
pub fn process_cpu() -> Duration {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time of all threads of another process, also of those that ended.
///
/// # Errors
/// If there is no process with this PID.
pub fn cpu_of(pid: u32) -> io::Result<Duration> {
    let mut clock = 0;
    // SAFETY: `clock` is valid for writes, and lives across the call.
    let error = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    try_read(clock)
}

fn read(clock: libc::clockid_t) -> Duration {
    try_read(clock).expect("the CPU clocks of the caller always exist")
}

fn try_read(clock: libc::clockid_t) -> io::Result<Duration> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for writes, and lives across the call.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_a_process_is_read_from_outside() {
        let before = cpu_of(std::process::id()).unwrap();
        assert!(before <= process_cpu());
        let error = cpu_of(1 << 27).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
