//! The `memfold` command.
#![allow(
    unreachable_pub,
    reason = "nothing in a program is reachable from outside"
)]

mod address;
mod adjust;
mod arguments;
mod completion;
mod control;
mod describe;
mod disk_report;
mod doctor;
mod failure;
mod format;
#[cfg(test)]
mod fuzzing;
mod instance;
mod live;
mod man;
mod messages;
mod own_process;
mod patient;
mod private_socket;
mod remote;
mod report;
mod run;
mod serve;
mod stat;
mod stat_watch;
mod summary;
mod sync;
#[cfg(feature = "top")]
mod top;
mod usage_error;

use arguments::{Arguments, Command};
use clap::error::ErrorKind;
use failure::Failure;
use memfold_sys::privilege;
use std::process::ExitCode;

fn main() -> ExitCode {
    abort_on_panic();
    if let Err(failure) = lower_privileges() {
        return failure.report();
    }
    match completion::answer() {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(failure) => return failure.report(),
    }
    let arguments = match Arguments::of(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    let outcome = match arguments.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Attach(arguments) => run::attach(&arguments),
        Command::Detach(arguments) => adjust::detach(&arguments),
        Command::Stat(arguments) => stat::stat(&arguments),
        Command::Limit(arguments) => adjust::limit(&arguments),
        Command::Reclaim(arguments) => adjust::reclaim(&arguments),
        Command::Swapoff(arguments) => adjust::swapoff(&arguments),
        #[cfg(feature = "top")]
        Command::Top(arguments) => top::top(&arguments),
        Command::Serve(arguments) => serve::serve(&arguments),
        Command::Doctor(arguments) => doctor::doctor(&arguments),
        Command::Completions(arguments) => describe::completions(&arguments),
        Command::Man(arguments) => man::manual(&arguments),
    };
    outcome.unwrap_or_else(|failure| failure.report())
}

/// A supervisor that panics must end at once: its programs are then killed, never left to wait. The
/// repository's release profile aborts by itself, which `cargo install` from a registry knows nothing of.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
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
        _ => {
            let line: Vec<_> = std::env::args_os().skip(1).collect();
            Failure::own(usage_error::one_line(error, &line)).report()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    #[test]
    fn a_panic_in_any_thread_ends_the_process() {
        const IS_CHILD: &str = "MEMFOLD_TEST_PANICS";
        if std::env::var_os(IS_CHILD).is_some() {
            super::abort_on_panic();
            let _ = std::thread::spawn(|| panic!("as intended")).join();
            std::process::exit(0);
        }
        let status = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "tests::a_panic_in_any_thread_ends_the_process",
                "--nocapture",
            ])
            .env(IS_CHILD, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(6), "{status}");
    }
}
