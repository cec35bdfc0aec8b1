//! Manual pages, from the definition of the command line.

use crate::arguments::{Arguments, ManArguments};
use crate::describe::print;
use crate::failure::Failure;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Exit statuses of `run`, and of the others.
const RUN_STATUS: [(&str, &str); 5] = [
    ("the program's own", "The program exited by itself."),
    ("death by a signal", "The program died of that signal."),
    (
        "125",
        "memfold itself failed; one line on standard error says why.",
    ),
    ("126", "The program cannot be executed."),
    ("127", "The program was not found."),
];
const STATUS: [(&str, &str); 3] = [
    ("0", "All went well."),
    (
        "1",
        "No such run or disk, or it could not do all that was asked; for doctor: run will not work here.",
    ),
    (
        "125",
        "memfold itself failed, or the command line is wrong; one line says why.",
    ),
];
const FILES: [(&str, &str); 4] = [
    (
        "/run/memfold, /var/lib/memfold, /usr/local/lib/memfold",
        "For root: the private folders of runs and disks, with the preload library of a run and the sockets \
         for stat, top and commands. The first of these that does is taken: /run may be mounted noexec.",
    ),
    ("$XDG_RUNTIME_DIR/memfold", "The same for other users."),
    (
        "$TMPDIR/memfold-BOOT",
        "The same, where there is none of these, with digits of the boot's number. With random digits behind them where \
         other users can write to the folder, as root does not.",
    ),
    (
        "/tmp, /dev/shm, /var/tmp",
        "The same for users other than root, as memfold-BOOT-RANDOM, where there is no other place.",
    ),
];
const VARIABLES: [(&str, &str); 6] = [
    (
        "LD_PRELOAD",
        "memfold puts its library in front of it for the program.",
    ),
    (
        "XDG_RUNTIME_DIR, TMPDIR",
        "Where the folders of runs may lie.",
    ),
    (
        "MEMFOLD_REMOTE_USER, MEMFOLD_REMOTE_PASSWORD",
        "The store's user and password, where there is no --remote-password-file. No program gets them.",
    ),
    (
        "MEMFOLD_WITH_MOVE",
        "If it is 1, UFFDIO_MOVE is used on kernels whose version has a bug in it: the distribution has fixed that.",
    ),
    (
        "NO_COLOR",
        "If it is set, help and messages have no colours.",
    ),
    (
        "COMPLETE",
        "Set by the shell to ask memfold for completions.",
    ),
];

/// `memfold man [--dir DIR]`.
pub fn manual(arguments: &ManArguments) -> Result<ExitCode, Failure> {
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    let Some(dir) = &arguments.dir else {
        let text = page(&command, &command);
        return print(
            &text.map_err(|error| Failure::own(format!("cannot make the manual page: {error}")))?,
        );
    };
    write_all(&command, dir).map_err(|error| {
        let dir = dir.display();
        Failure::own(format!(
            "cannot write manual pages to {dir}: {error}; give a folder of yours"
        ))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn write_all(command: &Command, dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    fs::write(dir.join("memfold.1"), page(command, command)?)?;
    for one in command.get_subcommands() {
        let name = format!("memfold-{}", one.get_name());
        fs::write(dir.join(format!("{name}.1")), page(one, command)?)?;
    }
    Ok(())
}

/// The page of a command, which is `whole` itself or one of its subcommands.
fn page(command: &Command, whole: &Command) -> io::Result<Vec<u8>> {
    let name = command.get_name();
    let is_whole = name == whole.get_name();
    let title = if is_whole {
        name.to_owned()
    } else {
        format!("memfold-{name}")
    };
    let shown = command.clone().display_name(title.clone());
    let man = Man::new(shown)
        .title(title.to_uppercase())
        .manual("memfold");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut text)?;
    }
    if is_whole {
        man.render_subcommands_section(&mut text)?;
    }
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    match name {
        "run" => entries(&mut roff, RUN_STATUS),
        "memfold" => {
            roff.text([roman("Of run:")]);
            entries(&mut roff, RUN_STATUS);
            roff.control("PP", []);
            roff.text([roman("Of the others:")]);
            entries(&mut roff, STATUS);
        }
        _ => entries(&mut roff, STATUS),
    }
    environment(&mut roff, command, whole);
    roff.control("SH", ["FILES"]);
    entries(&mut roff, FILES);
    if let Some(help) = command.get_after_help() {
        examples(&mut roff, &help.to_string());
    }
    see_also(&mut roff, &title, whole);
    roff.to_writer(&mut text)?;
    if is_whole {
        man.render_version_section(&mut text)?;
    }
    Ok(text)
}

fn entries<const N: usize>(roff: &mut Roff, entries: [(&str, &str); N]) {
    for (name, meaning) in entries {
        entry(roff, name, meaning);
    }
}

fn entry(roff: &mut Roff, name: &str, meaning: &str) {
    roff.control("TP", []);
    roff.text([bold(name)]);
    roff.text([roman(meaning)]);
}

/// The variables that stand for options of `run`, and the others.
fn environment(roff: &mut Roff, command: &Command, whole: &Command) {
    let options = match command.get_name() {
        "memfold" => whole.find_subcommand("run"),
        _ => Some(command),
    };
    roff.control("SH", ["ENVIRONMENT"]);
    for argument in options.into_iter().flat_map(Command::get_arguments) {
        let variable = argument.get_env().and_then(|name| name.to_str());
        if let (Some(variable), Some(option)) = (variable, argument.get_long()) {
            let of = if command.get_name() == whole.get_name() {
                " of memfold run"
            } else {
                ""
            };
            let meaning = format!("As --{option}{of}, which overrides it.");
            entry(roff, variable, &meaning);
        }
    }
    entries(roff, VARIABLES);
}

/// The examples of a command's help, and what stands above and below them.
fn examples(roff: &mut Roff, help: &str) {
    let Some((before, examples)) = help.split_once("Examples:\n") else {
        return;
    };
    let (examples, after) = examples.split_once("\n\n").unwrap_or((examples, ""));
    roff.control("SH", ["EXAMPLES"]);
    roff.control("nf", []);
    for line in examples.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    let notes = [before, after]
        .into_iter()
        .flat_map(|part| part.split("\n\n"))
        .map(str::trim)
        .filter(|note| !note.is_empty() && !note.starts_with("Exit status"));
    for (index, note) in notes.enumerate() {
        match index {
            0 => roff.control("SH", ["NOTES"]),
            _ => roff.control("PP", []),
        };
        roff.text([roman(note)]);
    }
}

fn see_also(roff: &mut Roff, own: &str, whole: &Command) {
    roff.control("SH", ["SEE ALSO"]);
    let subcommands = whole.get_subcommands();
    let mut names: Vec<String> = subcommands
        .map(|one| format!("memfold-{}", one.get_name()))
        .collect();
    names.insert(0, "memfold".to_owned());
    names.retain(|name| name != own);
    let mut pages: Vec<String> = names.iter().map(|name| format!("{name}(1)")).collect();
    pages.extend(
        [
            "userfaultfd(2)",
            "ld.so(8)",
            "cgroups(7)",
            "capabilities(7)",
        ]
        .map(str::to_owned),
    );
    roff.text([roman(pages.join(", "))]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::home::SHARED;
    use crate::run::runtime::ROOTS;

    #[test]
    fn all_folders_of_runs_are_among_the_files() {
        let named: Vec<&str> = FILES
            .iter()
            .flat_map(|(names, _)| names.split(", "))
            .collect();
        for folder in ROOTS {
            assert!(
                named.contains(&format!("{folder}/memfold").as_str()),
                "{folder}"
            );
        }
        for folder in SHARED {
            assert!(named.contains(&folder), "{folder}");
        }
    }

    #[test]
    fn pages_have_what_manual_pages_have() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("new/man1");
        let arguments = ManArguments {
            dir: Some(dir.clone()),
        };
        manual(&arguments).unwrap();
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        let run = read("memfold-run.1");
        for part in [
            ".SH NAME",
            ".SH SYNOPSIS",
            ".SH OPTIONS",
            ".SH \"EXIT STATUS\"",
            ".SH ENVIRONMENT",
            ".SH FILES",
            ".SH EXAMPLES",
            ".SH \"SEE ALSO\"",
            "MEMFOLD_LIMIT",
            "memfold\\-limit(1)",
        ] {
            assert!(run.contains(part), "{part} in {run}");
        }
        let attach = read("memfold-attach.1");
        assert!(attach.contains("killed takes the program") && run.contains("SIZE is a number"));
        let whole = read("memfold.1");
        assert!(whole.contains("MEMFOLD_SUMMARY") && whole.contains("memfold\\-reclaim"));
        assert_eq!(
            fs::read_dir(&dir).unwrap().count(),
            1 + Arguments::command().get_subcommands().count()
        );
    }
}
