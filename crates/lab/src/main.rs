//! `memfold-lab`: experiments on compressed swap. Designs that were published stand beside those
//! that replace them here, with the published figures, in one run on this machine.

mod before;
mod chain;
mod clock;
mod command_line;
mod contents;
mod exit;
mod free;
mod host;
mod kernel;
mod mapping;
mod output;
mod picture;
mod pool;
mod random;
mod report;
mod report_html;
mod soak;
mod table;
mod trace;
mod virtual_slots;

use std::{
    io::{Write, stderr},
    process::ExitCode,
};

use clap::error::ErrorKind;

use command_line::Options;

/// That of memfold's own failures.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    let outcome = match command_line::command().try_get_matches() {
        Ok(matches) => command_line::run(&matches),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                // A reader that went away has seen enough of the help.
                let _ = error.print();
                return ExitCode::SUCCESS;
            }
            _ => Err(anyhow::anyhow!(command_line::one_line(&error))),
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            host::wait_if_leaving();
            // There is nobody to tell if this fails.
            let _ = writeln!(stderr(), "memfold-lab: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}
