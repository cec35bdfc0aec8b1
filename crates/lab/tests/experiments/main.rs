//! Experiments of `memfold-lab` end to end, at a small scale. One binary: each further one would link the crates again, and
//! run alone, though most of its time is spent waiting for programs.

mod growth;
mod kernel;
mod proactive;
mod report;
mod schema;
mod soak;

use std::path::PathBuf;
use std::process::Command;

use memfold_testing::skip;

fn lab() -> Command {
    Command::new(env!("CARGO_BIN_EXE_memfold-lab"))
}

/// Whether there is what the lab runs programs under; says so where there is not.
fn memfold_is_built() -> bool {
    let memfold = PathBuf::from(env!("CARGO_BIN_EXE_memfold-lab")).with_file_name("memfold");
    if !memfold.exists() {
        skip("memfold beside it (cargo build -p memfold-cli)");
    }
    memfold.exists()
}
