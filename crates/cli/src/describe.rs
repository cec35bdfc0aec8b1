//! Completions, and what is printed on standard output.

use crate::arguments::CompletionArguments;
use crate::failure::Failure;
use clap_complete::env::Shells;
use std::io::{self, Write};
use std::process::ExitCode;

/// The variable by which a shell asks for completions.
const VARIABLE: &str = "COMPLETE";

/// `memfold completions SHELL`: a script that asks memfold itself, which knows the runs and commands.
pub fn completions(arguments: &CompletionArguments) -> Result<ExitCode, Failure> {
    const NAME: &str = "memfold";
    let mut script = Vec::new();
    let shell = arguments.shell.to_string();
    Shells::builtins()
        .completer(&shell)
        .ok_or_else(|| Failure::own(format!("there are no completions for {shell}")))?
        .write_registration(VARIABLE, NAME, NAME, NAME, &mut script)
        .map_err(|error| Failure::own(format!("cannot make the completions: {error}")))?;
    print(&script)
}

/// Writes to standard output. A reader that closes it early is no failure.
pub fn print(bytes: &[u8]) -> Result<ExitCode, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::own(format!(
            "cannot write to standard output: {error}"
        ))),
        _ => Ok(ExitCode::SUCCESS),
    }
}
