//! The `memfold` command.
#![allow(
    unreachable_pub,
    reason = "nothing in a program is reachable from outside"
)]

mod arguments;
mod describe;
mod doctor;
mod failure;
mod format;
#[cfg(test)]
mod fuzzing;
mod live;
mod messages;
mod report;
mod run;
mod size;
mod stat;
mod swapoff;
#[cfg(feature = "top")]
mod top;

use arguments::{Arguments, Command};
use clap::Parser;
use clap::error::ErrorKind;
use failure::Failure;
use memfold_sys::privilege;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Err(failure) = lower_privileges() {
        return failure.report();
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    let outcome = match arguments.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Stat(arguments) => stat::stat(&arguments),
        Command::Swapoff(arguments) => swapoff::swapoff(&arguments),
        #[cfg(feature = "top")]
        Command::Top(arguments) => top::top(&arguments),
        Command::Doctor(arguments) => doctor::doctor(&arguments),
        Command::Completions(arguments) => describe::completions(&arguments),
        Command::Man(arguments) => describe::manual(&arguments),
    };
    outcome.unwrap_or_else(|failure| failure.report())
}

/// Before anything else: whatever path a user names is opened with the user's own rights.
fn lower_privileges() -> Result<(), Failure> {
    if rustix::process::getuid() != rustix::process::geteuid() {
        return Err(Failure::own(
            "memfold must not be set-user-ID, as programs would run as its owner; chmod u-s it, and \
             give it the capability instead (see memfold doctor)",
        ));
    }
    privilege::lower().map_err(|error| Failure::own(format!("cannot lower privileges: {error}")))
}

/// Help is printed as it is; a mistake becomes one line and memfold's own exit status, as for
/// any other reason not to start a program.
fn refuse(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // A reader that went away has seen enough of the help.
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { failure::OWN } else { 0 })
        }
        _ => Failure::own(one_line(&error.to_string())).report(),
    }
}

/// The message of a usage error: what stands before its first blank line.
fn one_line(message: &str) -> String {
    let lines: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let text = lines.join(" ");
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    format!("{text} (see memfold --help)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_reported_in_one_line() {
        for line in [
            &["memfold", "run", "--limit", "lots", "true"][..],
            &["memfold", "run"],
            &["memfold", "run", "--limt", "1G", "true"],
            &["memfold", "walk"],
        ] {
            let error = Arguments::try_parse_from(line).expect_err("a mistake");
            let text = one_line(&error.to_string());
            assert!(!text.contains('\n') && !text.starts_with("error"), "{text}");
            assert!(text.len() > 25, "{text}");
        }
    }
}
