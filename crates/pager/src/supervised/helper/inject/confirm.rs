//! Whether a program still is what it was looked at for, once a thread of it is stopped: it may have executed another one, to
//! which the loader brings the library as well. With two of them, one would have the memory, and the other the forks.

use super::{AttachError, Library};
use memfold_sys::deadline;
use memfold_sys::process::Process;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// How long reading a program's environment may take: it may have mapped a file of its own FUSE server there.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most that is read of it: what the kernel takes for a program, with ordinary stacks.
const MOST_ENVIRONMENT: u64 = 8 << 20;

impl Library {
    /// Whether a program, a thread of which is stopped, may have the library brought into it, which was `found` in it before
    /// or not.
    ///
    /// # Errors
    /// `Gone` if it has executed another program; `Busy` as long as its memory is that of its parent (`vfork`).
    pub(super) fn confirm(&self, process: &Process, found: Option<u64>) -> Result<(), AttachError> {
        if process.may_share_memory_with_parent() {
            return Err(AttachError::Busy);
        }
        let is_as_found = self.find(process)? == found;
        if !is_as_found || found.is_none() && self.comes_by_loader(process)? {
            return Err(AttachError::Gone);
        }
        Ok(())
    }

    /// Whether the program's loader brings the library.
    fn comes_by_loader(&self, process: &Process) -> io::Result<bool> {
        if !has_loader(process)? {
            return Ok(false);
        }
        let path = self.path.as_os_str().as_bytes().to_vec();
        let environment = process.open_living("environ")?;
        let names_path = move || {
            let bytes = read(environment, MOST_ENVIRONMENT)?;
            Ok(bytes.windows(path.len()).any(|bytes| bytes == path))
        };
        let names_path = deadline::within(process.user()?, PATIENCE, names_path);
        names_path.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Whether the kernel has mapped a loader for a process's program.
fn has_loader(process: &Process) -> io::Result<bool> {
    /// More than the kernel tells a program.
    const MOST: u64 = 1 << 12;
    const WORD: usize = size_of::<u64>();
    const AT_BASE: u64 = 7;
    let vector = read(process.open_living("auxv")?, MOST)?;
    let (words, _) = vector.as_chunks::<WORD>();
    let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
    let base = words.chunks_exact(2).find(|entry| entry[0] == AT_BASE);
    Ok(base.is_some_and(|entry| entry[1] != 0))
}

fn read(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
