//! How many descriptors a run needs, and whether it may have them.

use memfold_sys::probe::Check;
use rustix::process::{Resource, getrlimit};
use std::fs;

/// Of memfold's own, besides one for each CPU and what it was started with.
const OWN: u64 = 22;
/// Descriptors that a process takes while it is admitted. With fewer free ones it must wait.
const TO_ADMIT: u64 = 16;
/// What a program takes while it is managed: a forked one; an executed one takes ten.
const A_PROGRAM: u64 = 15;
/// With room for this many programs, `doctor` has no note.
const MANY: u64 = 100;

/// Whether a run can start, and for how many programs it has descriptors.
pub fn check() -> Check {
    const NAME: &str = "descriptors";
    let (open, allowed) = (open(), most());
    let needed = open + OWN + cpus() + TO_ADMIT + A_PROGRAM;
    let enough = needed + MANY * A_PROGRAM;
    if allowed < needed {
        let found = format!("the hard limit is {allowed}, and a run needs at least {needed}");
        return Check::missing(NAME, found, remedy(enough));
    }
    let programs = 1 + (allowed - needed) / A_PROGRAM;
    let found = match allowed {
        u64::MAX => "not limited".to_owned(),
        allowed => format!("{allowed}, enough for about {programs} programs at a time"),
    };
    if programs < MANY {
        return Check::note(NAME, found, Some(&remedy(enough)));
    }
    Check::ok(NAME, found)
}

fn remedy(enough: u64) -> String {
    format!(
        "raise the hard limit (as root: ulimit -n {enough}; in a unit: LimitNOFILE={enough}; for \
         users: nofile in /etc/security/limits.conf)"
    )
}

/// Warns at the end of a run for how many programs there were none.
pub fn warn_of_shortage(programs: u64) {
    let (most, enough) = (most(), open() + MANY * A_PROGRAM);
    log::warn!(
        "{programs} programs were not under the limit, as memfold has too few descriptors (ulimit \
         -n {most}); {}",
        remedy(enough)
    );
}

/// The limit is raised up to the hard one before a run.
fn most() -> u64 {
    getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX)
}

fn open() -> u64 {
    // One of them reads the folder.
    let open = fs::read_dir("/proc/self/fd").map_or(1, Iterator::count);
    open as u64 - 1
}

fn cpus() -> u64 {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_counted() {
        let before = open();
        let more: Vec<_> = (0..20)
            .map(|_| fs::File::open("/dev/null").unwrap())
            .collect();
        // Other tests open and close some meanwhile.
        assert!(open() + 10 > before + more.len() as u64);
        assert!(open() < most());
        assert!(check().found.contains("programs") || most() == u64::MAX);
    }
}
