//! CPU time of this process and its threads.

use std::time::Duration;

/// CPU time of all threads of this process.
pub fn process_cpu() -> Duration {
    read(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for writes, and lives across the call.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    assert_eq!(
        result, 0,
        "clock_gettime: the CPU clocks of the caller always exist"
    );
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
