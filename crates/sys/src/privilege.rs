//! Capabilities that memfold's file has and its user has not.
//!
//! [`lower`] makes them ineffective at the start, so that every path a user names is opened with the
//! user's own rights; [`raised`] makes them effective in one thread for what needs them. Root's
//! capabilities, and those the caller of memfold had (ambient ones), are the user's own: both
//! functions leave them alone.

use std::io;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

/// Capabilities came with the file, and are not effective but where [`raised`] says so.
static LOWERED: AtomicBool = AtomicBool::new(false);

const VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct Header {
    version: u32,
    thread: i32,
}

/// One half of the sets of a thread: capabilities 0 to 31, or 32 to 63.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Half {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

type Sets = [Half; 2];

const CLEAR_ALL: u64 = libc::PR_CAP_AMBIENT_CLEAR_ALL as u64;

/// The calling thread, as capget and capset name it.
fn this_thread() -> Header {
    Header {
        version: VERSION_3,
        thread: 0,
    }
}

fn get() -> io::Result<Sets> {
    let (mut header, mut sets) = (this_thread(), Sets::default());
    // SAFETY: both live here, and of this version the kernel fills two halves.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, &raw mut sets) };
    if result == 0 {
        Ok(sets)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn set(sets: &Sets) -> io::Result<()> {
    let mut header = this_thread();
    // SAFETY: both are live, and of this version the kernel reads two halves.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, &raw const *sets) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether this process was started in secure mode: with rights that its caller had not.
#[must_use]
pub fn is_secure() -> bool {
    // SAFETY: takes a number and returns one.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Makes the capabilities of memfold's file ineffective. For the start of the process, before other
/// threads are: theirs are those of who started them.
///
/// The ambient set is cleared too, as programs would take it over. The inheritable set is the
/// caller's own, which execve does not change.
///
/// # Errors
/// If the kernel refuses: the process must not go on then.
pub fn lower() -> io::Result<()> {
    // SAFETY: takes nothing.
    let is_root = unsafe { libc::geteuid() == 0 };
    if is_root || !is_secure() {
        return Ok(());
    }
    let sets = get()?;
    if sets.iter().all(|half| half.permitted == 0) {
        return Ok(());
    }
    // SAFETY: numbers only.
    let cleared = unsafe { libc::prctl(libc::PR_CAP_AMBIENT, CLEAR_ALL, 0_u64, 0_u64, 0_u64) };
    if cleared != 0 {
        return Err(io::Error::last_os_error());
    }
    set(&with_effective(sets, |_| 0))?;
    LOWERED.store(true, Ordering::Relaxed);
    Ok(())
}

fn with_effective(sets: Sets, effective: impl Fn(Half) -> u32) -> Sets {
    sets.map(|half| Half {
        effective: effective(half),
        ..half
    })
}

/// The file's capabilities are effective in the thread that made it, until it is dropped. Nothing
/// where there are none.
#[derive(Debug)]
#[must_use = "they are effective until it is dropped"]
pub struct Raised {
    before: Option<Sets>,
    /// Of one thread.
    _not_send: PhantomData<*const ()>,
}

/// Makes the file's capabilities effective in the calling thread. Hold the guard over what needs
/// them alone, and open no path in that time that a user named.
pub fn raised() -> Raised {
    let raise = || {
        let before = get().ok()?;
        set(&with_effective(before, |half| half.permitted)).ok()?;
        Some(before)
    };
    Raised {
        // What needs them fails by itself where this does.
        before: LOWERED.load(Ordering::Relaxed).then(raise).flatten(),
        _not_send: PhantomData,
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // The kernel takes capabilities away as readily as it did in `lower`.
            let _ = set(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, as whether there are such capabilities is known to the whole process.
    #[test]
    fn guards_nest_and_end_with_what_was() {
        let all = get().unwrap();
        lower().unwrap();
        drop(raised());
        assert_eq!(get().unwrap(), all, "they are the user's own");
        let none = with_effective(all, |_| 0);
        set(&none).unwrap();
        LOWERED.store(true, Ordering::Relaxed);
        let outer = raised();
        let effective = with_effective(all, |half| half.permitted);
        assert_eq!(get().unwrap(), effective);
        drop(raised());
        assert_eq!(get().unwrap(), effective);
        drop(outer);
        assert_eq!(get().unwrap(), none);
        LOWERED.store(false, Ordering::Relaxed);
    }
}
