//! The kernel's side of a comparison: zram, zswap and memory cgroups, set up for one run.
//!
//! Everything here is put back. The types undo their change when they are dropped; if the lab ends
//! in any other way (Ctrl-C, a panic, SIGKILL), its [`Guardian`] undoes it, and if that dies as
//! well, the next guardian does so from the journal.

mod cgroup;
mod facts;
mod guardian;
mod leaving;
mod swap;
mod undo;
mod zram;
mod zswap;

pub use cgroup::MemoryGroup;
pub use facts::Facts;
pub use guardian::{Change, GUARDIAN, Guardian, guard};
pub use leaving::{Scratch, wait_if_leaving, while_running};
pub use undo::Undo;
pub use zram::Zram;
pub use zswap::Zswap;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};

/// A file's text, without what surrounds it.
fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("{} cannot be read", path.display()))?;
    Ok(text.trim().to_owned())
}

fn write(path: impl AsRef<Path>, text: &str) -> Result<()> {
    let path = path.as_ref();
    std::fs::write(path, text)
        .with_context(|| format!("{text:?} cannot be written to {}", path.display()))
}

fn require_root(what: &str) -> Result<()> {
    // SAFETY: the call has no preconditions and always succeeds.
    let user = unsafe { libc::geteuid() };
    ensure!(user == 0, "{what} needs root: run this with sudo");
    Ok(())
}

/// Tries until it works, for at most about ten seconds; then the last error.
fn retry(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    const ATTEMPTS: u32 = 200;
    for _ in 1..ATTEMPTS {
        if attempt().is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    attempt()
}

#[cfg(test)]
mod tests;
