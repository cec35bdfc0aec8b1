//! Setup of the kernel's backends for one run: zram, zswap and memory cgroups.
//!
//! Every change to the host is undone. The types undo their change on drop. If the lab exits
//! without that (Ctrl-C, SIGKILL), its [`Guardian`] undoes it; if the guardian is killed too, the
//! next one undoes it from the journal.

mod cgroup;
mod cleanup;
mod facts;
mod guardian;

mod swap;
mod undo;
mod zram;
mod zswap;

pub use cgroup::MemoryGroup;
pub use cleanup::{Scratch, wait_if_interrupted, while_running};
pub use facts::Facts;
pub use guardian::{Change, GUARDIAN, Guardian, guard};
pub use undo::Undo;
pub use zram::Zram;
pub use zswap::Zswap;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};

/// A file's text, trimmed.
fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn write(path: impl AsRef<Path>, text: &str) -> Result<()> {
    let path = path.as_ref();
    std::fs::write(path, text)
        .with_context(|| format!("cannot write {text:?} to {}", path.display()))
}

fn require_root(what: &str) -> Result<()> {
    // SAFETY: the call has no preconditions and always succeeds.
    let user = unsafe { libc::geteuid() };
    ensure!(user == 0, "{what} needs root: run the lab with sudo");
    Ok(())
}

/// Retries for about ten seconds, and returns the last error.
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
