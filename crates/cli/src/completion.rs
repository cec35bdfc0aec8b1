//! What shells offer for the values of arguments: PIDs of runs and disks, commands.

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::instance::Instance;
use crate::live;
use crate::report::Snapshot;
use clap::{Command, CommandFactory};
use clap_complete::CompleteEnv;
use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// How long runs are asked for their names while the user waits for a list.
const PATIENCE: Duration = Duration::from_millis(300);

/// Answers a shell that asks for completions; returns whether one has asked. Scripts of all shells ask by
/// `COMPLETE=SHELL memfold -- WORD…`. The variable alone may be meant for a program that is to be run.
pub fn answer() -> Result<bool, Failure> {
    let line: Vec<_> = std::env::args_os().collect();
    if line.get(1).is_none_or(|word| word != "--") {
        return Ok(false);
    }
    let folder = std::env::current_dir().ok();
    CompleteEnv::with_factory(command)
        .try_complete(line, folder.as_deref())
        .map_err(|error| {
            let text = error.to_string();
            let text = text.trim().trim_start_matches("error: ");
            Failure::own(format!("cannot complete what COMPLETE asks for: {text}"))
        })
}

/// The command line with what is offered for its values.
pub fn command() -> Command {
    let mut command = Arguments::command();
    let knows_disks = |name: &str| !matches!(name, "limit" | "reclaim");
    for name in ["stat", "top", "limit", "reclaim", "swapoff"] {
        if command.find_subcommand(name).is_some() {
            let candidates = if knows_disks(name) {
                ArgValueCandidates::new(all)
            } else {
                ArgValueCandidates::new(runs)
            };
            command =
                command.mut_subcommand(name, |one| one.mut_arg("pid", |pid| pid.add(candidates)));
        }
    }
    command = command.mut_subcommand("detach", |detach| {
        detach.mut_arg("pid", |pid| pid.add(ArgValueCandidates::new(programs)))
    });
    command.mut_subcommand("run", |run| {
        run.mut_arg("program", |program| {
            program.add(ArgValueCompleter::new(ProgramCompleter))
        })
    })
}

/// The PIDs of this user's runs and disks, with their commands and addresses.
fn all() -> Vec<CompletionCandidate> {
    let found = live::instances_of(None, PATIENCE);
    found.iter().map(candidate).collect()
}

/// The candidates that are runs.
fn runs() -> Vec<CompletionCandidate> {
    let found = live::instances_of(None, PATIENCE).into_iter();
    let runs = found.filter(|instance| matches!(instance, Instance::Run(_)));
    runs.map(|run| candidate(&run)).collect()
}

/// The PIDs of the programs in these runs.
fn programs() -> Vec<CompletionCandidate> {
    let found = live::instances_of(None, PATIENCE).into_iter();
    let runs = found.filter_map(|instance| match instance {
        Instance::Run(run) => Some(run),
        Instance::Disk(_) => None,
    });
    let of_run = |run: Box<Snapshot>| {
        let pids = run.programs.into_iter().map(|program| program.pid);
        let command = run.command;
        pids.map(move |pid| {
            CompletionCandidate::new(pid.to_string()).help(Some(command.clone().into()))
        })
        .collect::<Vec<_>>()
    };
    runs.flat_map(of_run).collect()
}

fn candidate(instance: &Instance) -> CompletionCandidate {
    let help = match instance {
        Instance::Run(run) => run.command.clone(),
        Instance::Disk(_) => instance.title(),
    };
    CompletionCandidate::new(instance.pid().to_string()).help(Some(help.into()))
}

/// A program in `PATH` or by its path, then files.
#[derive(Debug)]
struct ProgramCompleter;

impl ValueCompleter for ProgramCompleter {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        self.complete_at(0, current)
    }

    fn complete_at(&self, index: usize, current: &OsStr) -> Vec<CompletionCandidate> {
        let paths = PathCompleter::any().complete(current);
        if index > 0 || current.as_encoded_bytes().contains(&b'/') {
            return paths;
        }
        commands(current)
    }
}

/// The executable files in `PATH` whose names begin so.
fn commands(prefix: &OsStr) -> Vec<CompletionCandidate> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let entries = std::env::split_paths(&path)
        .filter_map(|folder| folder.read_dir().ok())
        .flatten()
        .flatten();
    let names: BTreeSet<_> = entries
        .filter(|entry| {
            let name = entry.file_name();
            let begins = name
                .as_encoded_bytes()
                .starts_with(prefix.as_encoded_bytes());
            // Of what a link leads to.
            let file = || entry.path().metadata();
            begins
                && file().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        })
        .map(|entry| entry.file_name())
        .collect();
    names.into_iter().map(CompletionCandidate::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        command().debug_assert();
    }

    fn names(index: usize, current: &str) -> Vec<String> {
        let found = ProgramCompleter.complete_at(index, OsStr::new(current));
        let name = |one: &CompletionCandidate| one.get_value().to_string_lossy().into_owned();
        found.iter().map(name).collect()
    }

    #[test]
    fn commands_come_first_and_files_for_their_arguments() {
        assert!(names(0, "slee").contains(&"sleep".to_owned()));
        assert!(names(0, "/bin/slee").contains(&"/bin/sleep".to_owned()));
        assert!(!names(1, "slee").contains(&"sleep".to_owned()));
        assert!(names(1, "Cargo").contains(&"Cargo.toml".to_owned()));
    }
}
