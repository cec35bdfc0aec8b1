//! Why a process is outside the limit.

use super::executable::Head;
use memfold_sys::{is_shortage, process};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The most that is read of a file of `/proc` whose length the program chooses.
const MOST_READ: u64 = 32 << 20;

/// Why a process did not connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// No loader brought the library, and it could not be attached; why, if that is known.
    NotAttached(Option<String>),
    /// It is a 32-bit program.
    NotSixtyFourBit,
    /// It has more privileges than its user: the loader ignores `LD_PRELOAD`.
    Privileged,
    /// `LD_PRELOAD` was taken out of its environment.
    Environment,
    /// It was forked in a way that the library does not see.
    Forked,
    /// The library was loaded but could not set up.
    Refused,
    /// It would end if it had a second thread.
    Zygote,
    /// It was under the limit until it was detached.
    Detached,
    /// memfold had no descriptors for it.
    Descriptors,
    /// It ended before it could be looked at.
    Unseen,
}

impl Reason {
    /// Whether the loader has brought the library.
    pub fn has_library(&self) -> bool {
        matches!(
            self,
            Reason::Forked | Reason::Refused | Reason::Zygote | Reason::Descriptors
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NotAttached(why) => {
                f.write_str("it is statically linked, or LD_PRELOAD was removed from its environment, and cannot be attached")?;
                return why.iter().try_for_each(|why| write!(f, ": {why}"));
            }
            Reason::NotSixtyFourBit => {
                "it is not a 64-bit program; use a 64-bit build to have it held"
            }
            Reason::Privileged => {
                "it runs with other privileges (set-user-ID or capabilities); start memfold with \
                 those privileges to have it held"
            }
            Reason::Environment => {
                "LD_PRELOAD was removed from its environment; have its parent pass that variable \
                 on to have it held"
            }
            Reason::Forked => {
                "it was forked by a raw system call or under a seccomp filter; its memory stays \
                 resident until it executes a program"
            }
            Reason::Refused => {
                "it may not use userfaultfd, or cannot reach memfold, as in some containers; start \
                 memfold inside (see memfold doctor)"
            }
            Reason::Zygote => {
                "it is a browser's zygote, which insists on having one thread; the processes that it \
                 forks without a sandbox are under the limit"
            }
            Reason::Detached => "it was detached, and runs on without a limit",
            Reason::Descriptors => {
                "memfold has too few descriptors for it; raise the hard limit of ulimit -n (see \
                 memfold doctor)"
            }
            Reason::Unseen => {
                "it never loaded memfold's library; is it statically linked or set-user-ID?"
            }
        })
    }
}

/// Whether a process has a 64-bit program without a loader.
pub fn is_static(pid: i32) -> bool {
    let file = File::open(format!("{}/exe", process::living_folder(pid))).ok();
    let executable = file.and_then(|file| Head::read(file)?.executable());
    executable.is_some_and(|executable| executable.sixty_four_bit && !executable.interpreted)
}

/// Finds the reason, as far as `/proc` shows it. `is_short` says whether memfold has lacked descriptors since the
/// process started.
pub fn reason(pid: i32, preload: &Path, is_short: bool) -> Reason {
    let folder = process::living_folder(pid);
    let executable = format!("{folder}/exe");
    let file = match File::open(&executable) {
        Ok(file) => file,
        Err(error) if is_shortage(&error) => return Reason::Descriptors,
        Err(_) => return Reason::Privileged,
    };
    if let Some(headers) = Head::read(file).and_then(|head| head.executable()) {
        if !headers.sixty_four_bit {
            return Reason::NotSixtyFourBit;
        }
        if !headers.interpreted {
            return Reason::NotAttached(None);
        }
    }
    const SET_ID: u32 = 0o6000;
    if fs::metadata(&executable).is_ok_and(|file| file.mode() & SET_ID != 0) {
        return Reason::Privileged;
    }
    let preload = preload.as_os_str().as_bytes();
    let has = |file: &str| -> io::Result<bool> {
        let mut bytes = Vec::new();
        let file = File::open(format!("{folder}/{file}"))?;
        file.take(MOST_READ).read_to_end(&mut bytes)?;
        Ok(contains(&bytes, preload))
    };
    match (has("maps"), has("environ")) {
        (Ok(true), _) if is_short => Reason::Descriptors,
        (Err(error), _) | (_, Err(error)) if is_shortage(&error) => Reason::Descriptors,
        (Ok(true), _) if process::is_zygote(pid) => Reason::Zygote,
        (Ok(true), _) if process::is_fork(pid) => Reason::Forked,
        (Ok(true), _) => Reason::Refused,
        (_, Ok(false)) => Reason::Environment,
        (Err(_), _) | (_, Err(_)) => Reason::Privileged,
        _ => Reason::Unseen,
    }
}

/// Whether `needle` is part of `bytes`.
fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_the_library_has_no_preload() {
        let own = std::process::id() as i32;
        assert_eq!(
            reason(own, Path::new("/tmp/memfold-0/none.so"), true),
            Reason::Environment
        );
    }
}
