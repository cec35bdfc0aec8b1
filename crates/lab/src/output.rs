//! Standard output.

use anyhow::{Context, Result};
use std::io::{self, Write};

/// Writes to standard output. A closed pipe (EPIPE) is not an error.
pub fn say(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("standard output")
        }
        _ => Ok(()),
    }
}
