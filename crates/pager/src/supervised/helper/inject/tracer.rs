//! The thread of memfold's that traces, and the one of a program's that it stops.

use super::AttachError;
use memfold_sys::hello::Filters;
use memfold_sys::process::{Process, own_filters};
use memfold_sys::tracee::{Seized, Tracee};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How long a thread may take to stop. Longer delays a program whose first threads cannot be stopped.
const STOPPING: Duration = Duration::from_millis(200);
/// How many threads are tried.
const THREADS: usize = 4;

/// Stops a thread of a process, the main thread if that can be, and does something by it.
///
/// A tracer is a thread: what could not be stopped is let go when that ends.
pub(super) fn by_any_thread<T: Send + 'static>(
    process: &Arc<Process>,
    work: impl Fn(&mut Tracee) -> Result<T, AttachError> + Send + Sync + 'static,
) -> Result<T, AttachError> {
    let mut threads = vec![process.pid()];
    let others = process.threads().into_iter();
    threads.extend(others.filter(|thread| *thread != process.pid()));
    by_one_of(process, &threads, STOPPING, work)
}

/// Stops one of these threads, and does something by it. `Busy` where none is seized or stops within `patience`.
pub(super) fn by_one_of<T: Send + 'static>(
    process: &Arc<Process>,
    threads: &[i32],
    patience: Duration,
    work: impl Fn(&mut Tracee) -> Result<T, AttachError> + Send + Sync + 'static,
) -> Result<T, AttachError> {
    let work = Arc::new(work);
    let mut last = AttachError::Gone;
    for &thread in threads.iter().take(THREADS) {
        let (seized_of, work) = (process.clone(), work.clone());
        let by_thread = move |seized| work(&mut stop(&seized_of, (thread, seized), patience)?);
        let done = Seized::with(process, thread, patience, by_thread);
        match done.unwrap_or_else(|error| Err(refusal(process, error))) {
            Err(error @ (AttachError::Busy | AttachError::Dispatched | AttachError::Gone)) => {
                last = error;
            }
            outcome => return outcome,
        }
    }
    Err(last)
}

/// Stops a thread, unless it filters its system calls.
fn stop(
    process: &Process,
    (thread, seized): (i32, Seized),
    patience: Duration,
) -> Result<Tracee, AttachError> {
    let stopped = seized.stop(patience);
    let tracee = stopped.map_err(|error| refusal(process, error))?;
    let status = process.text(&format!("task/{thread}/status"));
    let status = status.map_err(|_| gone(process))?;
    let mut filters = Filters::default();
    filters.look(status.as_bytes());
    // In strict mode there is none.
    let is_strict = status.lines().any(|line| line == "Seccomp:\t1");
    if is_strict || filters.count > own_filters() {
        return Err(AttachError::Filtered);
    }
    Ok(tracee)
}

/// Why a thread could not be stopped.
fn refusal(process: &Process, error: io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => AttachError::NotPermitted,
        Some(libc::ENOEXEC) => AttachError::NotSixtyFourBit,
        Some(libc::ETIMEDOUT | libc::EAGAIN) => AttachError::Busy,
        Some(libc::EOPNOTSUPP) => AttachError::Dispatched,
        Some(libc::ESRCH) => gone(process),
        _ => error.into(),
    }
}

/// `Gone` if the process has ended, not a thread alone.
fn gone(process: &Process) -> AttachError {
    if process.has_ended() {
        AttachError::Gone
    } else {
        // Another thread can be stopped, at another time at least.
        AttachError::Busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_program_is_not_gone_with_one_of_its_threads() {
        let mut child = Command::new("/bin/sleep").arg("10").spawn().unwrap();
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let stop = |thread| {
            let stopped = by_one_of(&process, &[thread], STOPPING, |_| Ok(()));
            stopped.unwrap_err()
        };
        // No thread has this TID.
        assert!(matches!(stop(i32::MAX), AttachError::Busy));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(stop(process.pid()), AttachError::Gone));
    }
}
