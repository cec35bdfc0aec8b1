//! Completions in the shells themselves; those of bash are in `words`.

use super::words::completes_in_time;
use crate::support::{Limits, MIB, Program, Terminal, memfold};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// A folder that has memfold under its name, for `PATH`.
fn path() -> String {
    let folder = memfold().parent().expect("a folder").display();
    format!("{folder}:{}", std::env::var("PATH").unwrap_or_default())
}

#[test]
fn fish_completes_options_commands_and_runs() {
    beside!(&["fish", "sleep"]);
    let complete = |line: &str| {
        let script = format!("memfold completions fish | source; complete -C'{line}'");
        let output = Command::new("fish")
            .args(["--no-config", "-c", &script])
            .env("PATH", path())
            .output()
            .expect("fish runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for (line, expected) in [
        ("memfold li", "limit"),
        ("memfold run --lim", "--limit"),
        ("memfold run --summary ", "always"),
        ("memfold run -- slee", "sleep"),
        ("memfold run slee", "sleep"),
        ("memfold completions ", "fish"),
    ] {
        let found = complete(line);
        let is_it = |one: &str| one.split('\t').next() == Some(expected);
        assert!(found.lines().any(is_it), "{line}: {found}");
    }
    let run = Program::new("sleep")
        .arg("600")
        .start(Limits::Total(64 * MIB));
    run.statistics();
    let pid = run.root().to_string();
    for line in ["memfold limit ", "memfold stat ", "memfold top "] {
        let is_it = |one: &str| one.split_once('\t') == Some((&pid, "sleep 600"));
        completes_in_time(line, complete, is_it);
    }
    run.terminate().assert_terminated();
}

/// An interactive zsh whose settings in `folder` are these.
fn zsh(folder: &Path, settings: &str) -> Terminal {
    std::fs::write(folder.join(".zshrc"), format!("{settings}; PS1='zsh> '\n")).expect("a file");
    let command = format!("env ZDOTDIR={} PATH={} zsh -d -i", folder.display(), path());
    Terminal::start(100, &command)
}

/// Types a line and Tab, and goes on when this is shown; again where it is not, as a run on a busy machine does not always
/// answer in time.
fn completes(terminal: &Terminal, line: &str, expected: &str) {
    const ONE_TRY: Duration = Duration::from_secs(4);
    let began = Instant::now();
    terminal.shows("the prompt", |screen| screen.trim_end().ends_with("zsh>"));
    loop {
        terminal.types(line);
        terminal.press(&["Tab"]);
        let shown = terminal.shows_within(ONE_TRY, |screen| screen.contains(expected));
        // What is listed goes with the line.
        terminal.press(&["C-c"]);
        terminal.shows("a new prompt", |screen| screen.trim_end().ends_with("zsh>"));
        terminal.press(&["C-l"]);
        terminal.shows("an empty screen", |screen| screen.trim() == "zsh>");
        let Err(screen) = shown else { return };
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{line}:\n{screen}"
        );
    }
}

#[test]
fn zsh_completes_options_commands_and_runs() {
    beside!(&["zsh", "tmux", "env", "sleep"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let settings = "autoload -Uz compinit; compinit -u -D; source <(memfold completions zsh)";
    let terminal = zsh(folder.path(), settings);
    let complete = |line: &str, expected: &str| completes(&terminal, line, expected);
    complete("memfold li", "memfold limit");
    complete("memfold run --summ", "memfold run --summary");
    complete("memfold run --summary ", "always");
    complete("memfold run -- slee", "memfold run -- sleep");
    complete("memfold completions zs", "memfold completions zsh");
    let run = Program::new("sleep")
        .arg("600")
        .start(Limits::Total(64 * MIB));
    run.statistics();
    let pid = run.root().to_string();
    complete("memfold limit ", &pid);
    complete("memfold stat ", &pid);
    run.terminate().assert_terminated();
}

/// As the packages install it.
#[test]
fn zsh_completes_from_the_first_tab_on_where_the_script_is_autoloaded() {
    beside!(&["zsh", "tmux", "env"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let script = Command::new(memfold())
        .args(["completions", "zsh"])
        .output();
    let script = script.expect("memfold starts").stdout;
    std::fs::write(folder.path().join("_memfold"), script).expect("a file");
    let settings = "fpath=($ZDOTDIR $fpath); autoload -Uz compinit; compinit -u -D";
    let terminal = zsh(folder.path(), settings);
    completes(&terminal, "memfold li", "memfold limit");
    completes(&terminal, "memfold run --summ", "memfold run --summary");
}
