//! Completions and manual pages, from the definition of the command line.

use crate::arguments::{Arguments, CompletionArguments, ManArguments};
use crate::failure::Failure;
use clap::CommandFactory;
use std::io::{self, Write};
use std::process::ExitCode;

/// `memfold completions SHELL`.
pub fn completions(arguments: &CompletionArguments) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut Arguments::command(),
        "memfold",
        &mut script,
    );
    print(&script)
}

/// `memfold man [--dir DIR]`.
pub fn manual(arguments: &ManArguments) -> Result<ExitCode, Failure> {
    if let Some(dir) = &arguments.dir {
        clap_mangen::generate_to(Arguments::command(), dir).map_err(|error| {
            Failure::own(format!(
                "cannot write manual pages to {}: {error}",
                dir.display()
            ))
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Arguments::command())
        .render(&mut page)
        .map_err(|error| Failure::own(format!("cannot make the manual page: {error}")))?;
    print(&page)
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
