//! A mistake on the command line, as one line that says what is meant.

use crate::arguments::Arguments;
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue};
use std::ffi::OsString;

/// The line for an error, with what is most likely meant and the help that lists it. `line` are the
/// arguments after the name of the program.
pub fn one_line(error: &clap::Error, line: &[OsString]) -> String {
    let mut command = Arguments::command();
    command.build();
    let given = line.first().and_then(|word| word.to_str());
    let subcommand = given.and_then(|word| command.find_subcommand(word));
    let help = match subcommand {
        Some(found) => format!("memfold {} --help", found.get_name()),
        None => "memfold --help".to_owned(),
    };
    let hint = match subcommand {
        Some(found) => suggestion(error).or_else(|| pid_first(found, line)),
        None => program_hint(line)
            .or_else(|| suggestion(error))
            .or_else(|| run_hint(&command, line)),
    };
    let text = match subcommand.and_then(|command| variable(command, error, line)) {
        Some(variable) => format!("{variable}: {}", first_paragraph(error)),
        None => first_paragraph(error),
    };
    match hint {
        Some(hint) => format!("{text}; {hint} (see {help})"),
        None => format!("{text} (see {help})"),
    }
}

/// The variable that a value comes from that is not understood.
fn variable(command: &clap::Command, error: &clap::Error, line: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(shown)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let option = shown.split(' ').next()?;
    let is_given = |word: &OsString| word.to_string_lossy().starts_with(option);
    let mut arguments = command.get_arguments();
    let argument = arguments.find(|one| one.get_long() == option.strip_prefix("--"))?;
    let name = argument.get_env()?;
    (std::env::var_os(name).is_some() && !line.iter().any(is_given))
        .then(|| name.to_string_lossy().into_owned())
}

/// What stands before the first blank line.
fn first_paragraph(error: &clap::Error) -> String {
    let message = error.to_string();
    let lines: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let text = lines.join(" ");
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

/// What clap takes to be meant.
fn suggestion(error: &clap::Error) -> Option<String> {
    let kinds = [
        ContextKind::SuggestedArg,
        ContextKind::SuggestedSubcommand,
        ContextKind::SuggestedValue,
    ];
    let names = kinds.iter().find_map(|kind| match error.get(*kind)? {
        ContextValue::String(name) => Some(name.clone()),
        ContextValue::Strings(names) if !names.is_empty() => Some(names.join(" or ")),
        _ => None,
    })?;
    Some(format!("did you mean {names}?"))
}

/// For a PID behind what belongs behind it.
fn pid_first(command: &clap::Command, line: &[OsString]) -> Option<String> {
    let words: Vec<_> = line
        .iter()
        .map(|word| word.to_str())
        .collect::<Option<_>>()?;
    let [name, size, pid] = words[..] else {
        return None;
    };
    let takes_pid = command.get_positionals().next()?.get_id() == "pid";
    let is_pid = |word: &str| word.parse::<u32>().is_ok();
    (takes_pid && is_pid(pid) && !is_pid(size) && !size.starts_with('-'))
        .then(|| format!("the PID comes first: memfold {name} {pid} {size}"))
}

/// For options of `run`, and for a program, in the place of a subcommand.
fn run_hint(command: &clap::Command, line: &[OsString]) -> Option<String> {
    let word = line.first()?.to_str()?;
    let run = command.find_subcommand("run")?;
    let name = word.strip_prefix("--")?.split('=').next();
    let is_option = run
        .get_arguments()
        .any(|argument| argument.get_long() == name);
    is_option.then(|| format!("to run a program: memfold run {word} …"))
}

/// For what is no subcommand: it may be a program.
fn program_hint(line: &[OsString]) -> Option<String> {
    let words: Vec<_> = line.iter().map(|word| word.to_string_lossy()).collect();
    let first = words.first().filter(|word| !word.starts_with('-'))?;
    let is_program = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join(first.as_ref()).is_file())
    });
    (is_program || first.contains('/')).then(|| {
        format!(
            "to run {first} under a limit: memfold run -- {}",
            words.join(" ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn line(words: &[&str]) -> String {
        let arguments: Vec<OsString> = words.iter().map(Into::into).collect();
        let all = std::iter::once("memfold".into()).chain(arguments.iter().cloned());
        let error = Arguments::try_parse_from(all).expect_err("a mistake");
        one_line(&error, &arguments)
    }

    #[test]
    fn a_mistake_is_one_line_with_what_is_meant() {
        for (words, parts) in [
            (
                &["run", "--limt", "1G", "true"][..],
                &["did you mean --limit?", "memfold run --help"][..],
            ),
            (
                &["run", "--limit", "lots", "true"],
                &["--limit <SIZE>", "512M", "memfold run --help"],
            ),
            (&["run", "--algo", "lz5", "true"], &["did you mean lz4?"]),
            (&["run"], &["PROGRAM", "memfold run --help"]),
            (&["stast"], &["did you mean stat?", "memfold --help"]),
            (
                &["--limit", "1G", "--", "true"],
                &["memfold run --limit", "memfold --help"],
            ),
            (&["walk"], &["walk"]),
            (
                &["limit", "3G", "11"],
                &["the PID comes first: memfold limit 11 3G"],
            ),
            (&["reclaim", "3G", "11"], &["memfold reclaim 11 3G"]),
        ] {
            let text = line(words);
            assert!(!text.contains('\n') && !text.starts_with("error"), "{text}");
            for part in parts {
                assert!(text.contains(part), "{part} in {text}");
            }
        }
    }

    #[test]
    fn a_program_is_recognised() {
        let words = |words: &[&str]| words.iter().map(Into::into).collect::<Vec<OsString>>();
        let hint = program_hint(&words(&["ls", "-l"])).unwrap();
        assert!(hint.ends_with("memfold run -- ls -l"), "{hint}");
        assert_eq!(program_hint(&words(&["no-such-program-anywhere"])), None);
        assert_eq!(program_hint(&words(&["--ls"])), None);
    }
}
