//! Capabilities of memfold's file that its user does not have.
//!
//! [`lower`] makes them ineffective at the start, so that every path a user names is opened with the
//! user's own rights; [`raised`] makes them effective in one thread for what needs them. Root's
//! capabilities, and those the caller of memfold had (ambient ones), are the user's own: both
//! functions leave them alone.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::io;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

/// Capabilities came with the file, and are effective only under [`raised`].
static LOWERED: AtomicBool = AtomicBool::new(false);

fn get() -> io::Result<CapabilitySets> {
    Ok(capabilities(None)?)
}

fn set(sets: CapabilitySets) -> io::Result<()> {
    Ok(set_capabilities(None, sets)?)
}

/// Whether this process was started in secure mode: with rights that its caller had not.
#[must_use]
pub fn is_secure() -> bool {
    // SAFETY: takes a number and returns one.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Makes the capabilities of memfold's file ineffective. For the start of the process, before other
/// threads are started: they inherit the sets of the thread that starts them.
///
/// The ambient set is cleared too, as programs would take it over. The inheritable set is the
/// caller's own, which execve does not change.
///
/// # Errors
/// If the kernel refuses: the process must not go on then.
pub fn lower() -> io::Result<()> {
    if rustix::process::geteuid().is_root() || !is_secure() {
        return Ok(());
    }
    let sets = get()?;
    if sets.permitted.is_empty() {
        return Ok(());
    }
    rustix::thread::clear_ambient_capability_set()?;
    set(with_effective(sets, CapabilitySet::empty()))?;
    LOWERED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Takes the file's capabilities from the calling thread for good, whatever its starter had raised: for what is to be
/// done with the user's own rights alone. Nothing where there are none.
///
/// # Errors
/// If the kernel refuses: the thread must not go on then.
pub fn give_up_in_thread() -> io::Result<()> {
    if !LOWERED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let sets = get()?;
    set(CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        ..sets
    })
}

/// Makes the file's capabilities ineffective in the calling thread, whatever its starter had raised. Nothing where
/// there are none.
pub(crate) fn lower_in_thread() {
    if LOWERED.load(Ordering::Relaxed)
        && let Ok(sets) = get()
    {
        // The kernel takes capabilities away as readily as it did in `lower`.
        let _ = set(with_effective(sets, CapabilitySet::empty()));
    }
}

/// Whether the file's capabilities are effective in the calling thread.
pub(crate) fn are_raised() -> bool {
    LOWERED.load(Ordering::Relaxed) && get().is_ok_and(|sets| !sets.effective.is_empty())
}

/// Whether the calling thread, or a thread that it descends from, gave the file's capabilities up. Also where that
/// cannot be told.
pub(crate) fn are_given_up() -> bool {
    LOWERED.load(Ordering::Relaxed) && get().ok().is_none_or(|sets| sets.permitted.is_empty())
}

fn with_effective(sets: CapabilitySets, effective: CapabilitySet) -> CapabilitySets {
    CapabilitySets { effective, ..sets }
}

/// The file's capabilities are effective in the thread that made it, until it is dropped. Nothing
/// where there are none.
#[derive(Debug)]
#[must_use = "they are effective until it is dropped"]
pub struct Raised {
    before: Option<CapabilitySets>,
    /// Of one thread.
    _not_send: PhantomData<*const ()>,
}

/// Makes the file's capabilities effective in the calling thread. Hold the guard over what needs
/// them alone, and open no path in that time that a user named.
pub fn raised() -> Raised {
    let raise = || {
        let before = get().ok()?;
        set(with_effective(before, before.permitted)).ok()?;
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
        if let Some(before) = self.before {
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
        let none = with_effective(all, CapabilitySet::empty());
        set(none).unwrap();
        LOWERED.store(true, Ordering::Relaxed);
        let outer = raised();
        let effective = with_effective(all, all.permitted);
        assert_eq!(get().unwrap(), effective);
        drop(raised());
        assert_eq!(get().unwrap(), effective);
        drop(outer);
        assert_eq!(get().unwrap(), none);
        LOWERED.store(false, Ordering::Relaxed);
    }

    /// Says by its presence that this process runs one test alone.
    const ALONE: &str = "MEMFOLD_TEST_CAPABILITIES_ALONE";

    /// Threads that wait for work keep nothing of what another thread had raised, and have it for what such a one asks
    /// for. Those who gave them up share no thread with others.
    #[test]
    fn capabilities_are_effective_within_a_deadline_as_for_the_caller() {
        if std::env::var_os(ALONE).is_none() {
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            alone.args([
                "--exact",
                "privilege::tests::capabilities_are_effective_within_a_deadline_as_for_the_caller",
            ]);
            assert!(alone.env(ALONE, "").status().unwrap().success());
            return;
        }
        let all = get().unwrap();
        set(with_effective(all, CapabilitySet::empty())).unwrap();
        LOWERED.store(true, Ordering::Relaxed);
        let in_worker = || {
            let look = || (crate::thread::current_id(), get().unwrap());
            let patience = std::time::Duration::from_secs(10);
            crate::deadline::within(crate::process::own_user(), patience, look).unwrap()
        };
        let of_given_up = || {
            let look = || {
                give_up_in_thread().unwrap();
                in_worker().1.permitted
            };
            std::thread::scope(|scope| scope.spawn(look).join().unwrap())
        };
        assert_eq!(of_given_up(), CapabilitySet::empty());
        let outer = raised();
        let (worker, sets) = in_worker();
        assert_eq!(sets.effective, all.permitted);
        let status = std::fs::read_to_string(format!("/proc/self/task/{worker}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("CapEff:"));
        assert_eq!(line, Some("CapEff:\t0000000000000000"));
        drop(outer);
        assert_eq!(in_worker().1.effective, CapabilitySet::empty());
        let _outer = raised();
        assert_eq!(in_worker().1.effective, all.permitted);
        assert_eq!(of_given_up(), CapabilitySet::empty());
    }
}
