//! Completions, and what is printed on standard output.

use crate::arguments::CompletionArguments;
use crate::failure::Failure;
use clap_complete::env::Shells;
use std::io::{self, Write};
use std::process::ExitCode;

/// The variable by which a shell asks for completions.
const VARIABLE: &str = "COMPLETE";

const NAME: &str = "memfold";
/// The function that zsh's script makes.
const ZSH_COMPLETER: &str = "_clap_dynamic_completer_memfold";

/// `memfold completions SHELL`: a script that asks memfold itself, which knows the runs and commands.
pub fn completions(arguments: &CompletionArguments) -> Result<ExitCode, Failure> {
    print(&script(&arguments.shell.to_string())?)
}

fn script(shell: &str) -> Result<Vec<u8>, Failure> {
    let mut script = Vec::new();
    Shells::builtins()
        .completer(shell)
        .ok_or_else(|| Failure::own(format!("there are no completions for {shell}")))?
        .write_registration(VARIABLE, NAME, NAME, NAME, &mut script)
        .map_err(|error| Failure::own(format!("cannot make the completions: {error}")))?;
    if shell == "zsh" {
        // Autoloaded from $fpath, it is the body of the function that is to complete already.
        let first =
            format!("\nif [[ ${{funcstack[1]}} = _{NAME} ]]; then {ZSH_COMPLETER} \"$@\"; fi\n");
        script.extend(first.into_bytes());
    }
    Ok(script)
}

/// Writes to standard output. A reader that closes it early is no failure.
pub fn print(bytes: &[u8]) -> Result<ExitCode, Failure> {
    print_to_reader(bytes).map(|_| ExitCode::SUCCESS)
}

/// The same; returns whether there still is a reader.
pub fn print_to_reader(bytes: &[u8]) -> Result<bool, Failure> {
    write(&mut io::stdout().lock(), bytes)
}

fn write(out: &mut impl Write, bytes: &[u8]) -> Result<bool, Failure> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::own(format!(
            "cannot write to standard output: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_closes_early_is_no_failure() {
        let (reading, mut writing) = io::pipe().unwrap();
        assert!(write(&mut writing, b"x").unwrap());
        drop(reading);
        assert!(!write(&mut writing, b"x").unwrap());
        let mut full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        assert!(write(&mut full, b"x").is_err());
    }

    #[test]
    fn all_scripts_ask_as_is_expected() {
        for shell in Shells::builtins().names() {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            assert!(
                script.contains("memfold\" -- ") || script.contains("memfold -- "),
                "{script}"
            );
        }
    }

    #[test]
    fn zshs_script_calls_the_function_that_it_makes() {
        let script = String::from_utf8(script("zsh").unwrap()).unwrap();
        assert!(script.starts_with("#compdef memfold\n"), "{script}");
        assert!(
            script.contains(&format!("function {ZSH_COMPLETER}()")),
            "{script}"
        );
        assert!(
            script.contains(&format!("then {ZSH_COMPLETER} ")),
            "{script}"
        );
    }
}
