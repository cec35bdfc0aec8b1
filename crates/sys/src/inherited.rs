//! What this process was started with and others change before `main`, or memfold does: signals
//! ignored, the environment.
//!
//! Rust's runtime ignores SIGPIPE, so that is noted before, as the loader calls initialisers. The C
//! library takes variables out of the environment in secure mode.

use crate::privilege::is_secure;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU32, Ordering};

/// A bit for each standard signal.
static IGNORED: AtomicU32 = AtomicU32::new(0);

#[used]
// SAFETY: the loader calls what stands in this section, before `main` and with one thread. The
// function uses nothing that is set up later.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    let mut ignored = 0;
    for signal in 1..32 {
        // SAFETY: asks only, and fills a live structure, for which zeros are a value.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action);
            action
        };
        if action.sa_sigaction == libc::SIG_IGN {
            ignored |= 1 << signal;
        }
    }
    IGNORED.store(ignored, Ordering::Relaxed);
}

/// Whether a standard signal was ignored when this process was started.
pub fn was_ignored(signal: i32) -> bool {
    (1..32).contains(&signal) && IGNORED.load(Ordering::Relaxed) >> signal & 1 == 1
}

/// Ignores a signal from now on, or gives it its default action. May be called between fork and exec.
///
/// # Errors
/// If there is no such signal, or it cannot be ignored.
pub fn set_ignored(signal: i32, ignored: bool) -> io::Result<()> {
    let action = if ignored {
        libc::SIG_IGN
    } else {
        libc::SIG_DFL
    };
    // SAFETY: installs no code.
    match unsafe { libc::signal(signal, action) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The environment that this process was started with: also what the C library keeps from one in
/// secure mode (`LD_LIBRARY_PATH`, `TMPDIR` and others), which is meant for the programs it starts.
#[must_use]
pub fn environment() -> Vec<(OsString, OsString)> {
    if !is_secure() {
        return std::env::vars_os().collect();
    }
    let block = initial_environment().unwrap_or_default();
    let entries = block.split(|byte| *byte == 0);
    entries.filter_map(variable_in).collect()
}

/// One variable of it, the first of that name.
#[must_use]
pub fn variable(name: &str) -> Option<OsString> {
    if !is_secure() {
        return std::env::var_os(name);
    }
    let mut all = environment().into_iter();
    all.find_map(|(key, value)| (key == name).then_some(value))
}

fn variable_in(entry: &[u8]) -> Option<(OsString, OsString)> {
    // A name may begin with the sign, as the C library has it.
    let sign = entry.iter().skip(1).position(|byte| *byte == b'=')? + 1;
    let text = |bytes| OsStr::from_bytes(bytes).to_owned();
    Some((text(&entry[..sign]), text(&entry[sign + 1..])))
}

/// The strings on the initial stack. `/proc/self/environ` is the same, but belongs to root where the
/// process is undumpable, as in secure mode.
fn initial_environment() -> Option<&'static [u8]> {
    const ENV_START: usize = 50;
    let stat = std::fs::read("/proc/self/stat").ok()?;
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[name_end + 1..])
        .ok()?
        .split_ascii_whitespace()
        .skip(ENV_START - 3)
        .map(|field| field.parse::<usize>().ok());
    let (start, end) = (fields.next()??, fields.next()??);
    if start == 0 || end <= start {
        return None;
    }
    // SAFETY: the kernel put them there when it started this program, and they stay as long as the
    // process: nothing here writes to them or unmaps the initial stack.
    Some(unsafe { std::slice::from_raw_parts(start as *const u8, end - start) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_ignored_at_the_start_is_known() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let now = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
        for signal in (1..32).filter(|signal| *signal != libc::SIGPIPE) {
            assert_eq!(
                was_ignored(signal),
                now >> (signal - 1) & 1 == 1,
                "{signal}"
            );
        }
        assert!(!was_ignored(0) && !was_ignored(32));
        assert!(set_ignored(libc::SIGKILL, true).is_err());
    }

    #[test]
    fn the_initial_environment_is_that_of_the_library_where_nothing_was_taken_out() {
        let block = initial_environment().unwrap();
        assert_eq!(block, std::fs::read("/proc/self/environ").unwrap());
        let mut ours: Vec<_> = block
            .split(|byte| *byte == 0)
            .filter_map(variable_in)
            .collect();
        let mut its: Vec<_> = std::env::vars_os().collect();
        ours.sort();
        its.sort();
        assert_eq!(ours, its);
        let path = variable_in(b"PATH=/bin:a=b").unwrap();
        assert_eq!(path, ("PATH".into(), "/bin:a=b".into()));
        assert_eq!(variable_in(b"=x=y").unwrap(), ("=x".into(), "y".into()));
        assert_eq!((variable_in(b"none"), variable_in(b"")), (None, None));
    }
}
