//! `memfold-lab`: experiments on compressed swap. Each published design runs beside memfold's, with
//! the published figures, on this machine.
#![allow(
    unreachable_pub,
    reason = "nothing in a program is reachable from outside"
)]

mod baselines;
mod chain;
mod clock;
mod command_line;
mod contents;
mod exit;
mod free;
mod growth;
mod help;
mod host;
mod kernel;
mod mapping;
mod output;
mod picture;
mod policy;
mod pool;
mod proactive;
mod random;
mod report;
mod report_html;
mod simulate;
mod soak;
mod table;
mod trace;
mod virtual_slots;
mod words;

use std::{
    io::{Write, stderr},
    process::ExitCode,
};

use clap::error::ErrorKind;

use command_line::Options;

/// Exit status of the lab's own failures; the same as `memfold`'s.
const FAILED: u8 = 125;
/// Exit status where a simulated history fails.
const SIMULATION_FAILED: u8 = 1;

fn main() -> ExitCode {
    let outcome = match command_line::command().try_get_matches() {
        Ok(matches) => command_line::run(&matches),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                // A closed pipe is not an error: the reader has seen enough of the help.
                let _ = error.print();
                return ExitCode::SUCCESS;
            }
            _ => Err(anyhow::anyhow!(command_line::one_line(&error))),
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            host::wait_if_interrupted();
            // If stderr is closed, the error cannot be reported anywhere.
            let _ = writeln!(stderr(), "memfold-lab: {error:#}");
            ExitCode::from(if error.is::<simulate::Failed>() {
                SIMULATION_FAILED
            } else {
                FAILED
            })
        }
    }
}
