//! What memfold makes of its own process, and the start of the program.

use super::interpreter;
use super::signals::Signals;
use crate::arguments::STATS_FD;
use crate::failure::{self, Failure};
use crate::own_process;
use crate::remote::SECRETS;
use memfold_sys::exec::Exec;
use memfold_sys::inherited;
use memfold_sys::memory::kernel_frees_locked;
use memfold_sys::probe::{self, Managed};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, getpid, set_child_subreaper, setrlimit};
use rustix::thread::disable_transparent_huge_pages;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const PRELOAD: &str = "LD_PRELOAD";

/// What was changed of this process and must not reach the program.
#[derive(Debug, Clone)]
pub struct Original {
    limits: [(Resource, Rlimit); RAISED.len()],
}

/// Limits that are meant for the program, and of which memfold needs more: descriptors for many
/// programs, addresses for a pool, a swap file's length, and time for all of them.
const RAISED: [Resource; 4] = [
    Resource::Nofile,
    Resource::As,
    Resource::Fsize,
    Resource::Cpu,
];

/// Prepares this process for holding other programs' memory: it cannot be read by a debugger or in
/// a core dump, it is not swapped out where the host lets it lock memory, orphans of the program
/// come to it, and limits meant for the program do not hold for it.
pub fn harden() -> Result<Original, Failure> {
    let limits = own_process::prepare(RAISED)?;
    set_child_subreaper(Some(getpid())).map_err(|error| own_process::cannot_prepare(&error))?;
    // Memory that is given back while it is locked would stay, where the kernel does not know how to free it.
    if probe::may_lock_memory() && kernel_frees_locked() {
        // Code, data and stacks: files could be dropped without any swap.
        let mut flags = MlockAllFlags::CURRENT | MlockAllFlags::ONFAULT;
        if probe::swap_areas() > 0 {
            // Then anonymous memory could be, too: also the pool to come, each page from its first touch
            // on; it gives locked memory back by MADV_DONTNEED_LOCKED. That costs 0.3 µs a page, so only where it is of use.
            flags |= MlockAllFlags::FUTURE;
        }
        let _ = mlockall(flags);
    }
    Ok(Original { limits })
}

/// Starts the program with the preload library in front of its `LD_PRELOAD`. It gets memfold's
/// process group, the descriptors, signal mask and limits that memfold was started with, and its own PID where
/// the environment has memfold's. Returns its PID.
pub fn start(
    program: &[OsString],
    preload: &Path,
    signals: &Signals,
    original: &Original,
) -> Result<i32, Failure> {
    let name = program.first().ok_or_else(|| Failure::own("no program"))?;
    let mask = signals.original();
    let limits = original.limits;
    let mut exec =
        Exec::new(program, environment(preload)).map_err(|error| not_started(name, &error))?;
    let mut command = Command::new(name);
    let without_huge_pages = probe::move_bugs(Managed::Started).of_huge_pages;
    // SAFETY: all of it is system calls that allocate nothing and take no lock, as code between fork
    // and exec must. The environment that it executes with was made before.
    unsafe {
        command.pre_exec(move || {
            mask.thread_set_mask()?;
            Signals::restore_actions()?;
            for (resource, limit) in &limits {
                setrlimit(*resource, *limit)?;
            }
            if without_huge_pages {
                // What it executes, and its children, inherit this.
                disable_transparent_huge_pages(true)?;
            }
            Err(exec.execute())
        });
    }
    match command.spawn() {
        Ok(child) => Ok(child.id() as i32),
        Err(error) => Err(not_started(name, &error)),
    }
}

/// What the C library took out of this process's environment is the program's all the same.
fn environment(preload: &Path) -> Vec<(OsString, OsString)> {
    let mut environment = inherited::environment();
    // The descriptor is not the program's: a run that it starts would write to another file of that number.
    let dropped = |name: &OsStr| {
        SECRETS
            .iter()
            .chain(&[STATS_FD, PRELOAD])
            .any(|of| name == *of)
    };
    environment.retain(|(name, _)| !dropped(name));
    let list = preload_list(preload, inherited::variable(PRELOAD));
    environment.push((PRELOAD.into(), list));
    environment
}

/// Ours first, then what the user had.
fn preload_list(preload: &Path, had: Option<OsString>) -> OsString {
    let mut list = preload.as_os_str().to_owned();
    if let Some(had) = had.filter(|had| !had.is_empty()) {
        list.push(":");
        list.push(had);
    }
    list
}

/// Exit status 127 where the program is not there, 126 where it cannot be executed, 125 where it
/// never came to that.
fn not_started(program: &OsStr, error: &io::Error) -> Failure {
    use io::ErrorKind::{NotFound, OutOfMemory, PermissionDenied, WouldBlock};
    let name = program.to_string_lossy();
    match error.kind() {
        NotFound if program.is_empty() => Failure::with_status(
            failure::NOT_FOUND,
            "cannot execute a program without a name: the first word of the command is empty (a variable that is not set?)",
        ),
        NotFound => {
            let why = match interpreter::missing(program) {
                Some(missing) => format!("its interpreter {} does not exist", missing.display()),
                None => "not found".to_owned(),
            };
            let text = format!("cannot execute {name}: {why}");
            Failure::with_status(failure::NOT_FOUND, text)
        }
        OutOfMemory | WouldBlock => {
            Failure::own(format!("cannot start a process for {name}: {error}"))
        }
        _ => {
            // A name without a slash was looked for in PATH, not here.
            let found = if name.contains('/') {
                Path::new(program).metadata().ok()
            } else {
                None
            };
            let why = match (error.kind(), found) {
                (PermissionDenied, Some(found)) if found.is_dir() => {
                    "it is a folder; name a program in it".to_owned()
                }
                (PermissionDenied, Some(found)) if found.mode() & 0o111 == 0 => {
                    format!(
                        "it is not executable; chmod +x {name}, or name its interpreter before it"
                    )
                }
                _ => error.to_string(),
            };
            let text = format!("cannot execute {name}: {why}");
            Failure::with_status(failure::NOT_EXECUTABLE, text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_preloads_stay() {
        let ours = Path::new("/tmp/memfold-1/a.so");
        assert_eq!(preload_list(ours, None), "/tmp/memfold-1/a.so");
        assert_eq!(preload_list(ours, Some("".into())), "/tmp/memfold-1/a.so");
        assert_eq!(
            preload_list(ours, Some("/usr/lib/b.so c.so".into())),
            "/tmp/memfold-1/a.so:/usr/lib/b.so c.so"
        );
    }

    #[test]
    fn what_is_no_program_is_told_why() {
        let plain = tempfile::NamedTempFile::new().unwrap();
        let plain = plain.path().to_str().unwrap();
        for (program, errno, part) in [
            ("/tmp", 13, "it is a folder"),
            ("", 2, "is empty"),
            (plain, 13, "chmod +x"),
            ("/bin/sh", 13, "Permission denied"),
            // A folder here, but none of PATH.
            ("src", 13, "Permission denied"),
        ] {
            let failure = not_started(OsStr::new(program), &io::Error::from_raw_os_error(errno));
            assert!(failure.to_string().contains(part), "{failure}");
        }
    }

    #[test]
    fn statuses_are_those_of_shells() {
        let status = |errno| {
            let failure = not_started(OsStr::new("p"), &io::Error::from_raw_os_error(errno));
            format!("{failure:?}")
        };
        // ENOENT, EACCES, ENOEXEC, EAGAIN.
        for (errno, code) in [(2, 127), (13, 126), (8, 126), (11, 125)] {
            assert!(
                status(errno).contains(&format!("status: {code}")),
                "{}",
                status(errno)
            );
        }
    }
}
