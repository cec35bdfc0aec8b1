//! What memfold makes of its own process, whatever it holds of others.

use crate::failure::Failure;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use std::fmt::Display;

/// Has neither a debugger nor a core file show what this process holds: memory of programs or a disk, keys and
/// passwords. Raises the limits of which it needs more. Returns what these were.
pub fn prepare<const COUNT: usize>(
    raised: [Resource; COUNT],
) -> Result<[(Resource, Rlimit); COUNT], Failure> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|error| cannot_prepare(&error))?;
    Ok(raised.map(|resource| (resource, raise(resource))))
}

pub fn cannot_prepare(error: &dyn Display) -> Failure {
    Failure::own(format!("cannot prepare memfold's process: {error}"))
}

/// Raises a limit as far as this process may. Returns what it was.
fn raise(resource: Resource) -> Rlimit {
    let was = getrlimit(resource);
    let none = Rlimit {
        current: None,
        maximum: None,
    };
    let to_the_hard_one = Rlimit {
        current: was.maximum,
        maximum: was.maximum,
    };
    // Only root may exceed the hard limit, and for descriptors not even root. If this fails, what needs
    // more reports that.
    let _ = setrlimit(resource, none).or_else(|_| setrlimit(resource, to_the_hard_one));
    was
}
