//! How much longer a shell takes that runs 500 short programs under memfold, which each load its library and end before they are
//! worth a helper: `cargo bench -p memfold-cli --bench short_programs [-- ROUNDS]`, without and with memfold in turn. What memfold
//! itself takes to start and to end is a part of it. `MEMFOLD_BINARY` is another binary than this build's. Fails if the median of the
//! ratios of a round exceeds 1.1. As root.
#![allow(missing_docs, reason = "a program")]

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const GOAL: f64 = 1.1;
const SCRIPT: &str = "i=0; while [ $i -lt 500 ]; do sh -c true; i=$((i+1)); done; echo $i";

/// How long it takes, from exec to exit.
fn time(mut command: Command) -> Duration {
    let start = Instant::now();
    let output = command.args(["-c", SCRIPT]).stderr(Stdio::null()).output();
    let taken = start.elapsed();
    let output = output.expect("it can be started");
    assert!(output.status.success(), "{}", output.status);
    assert_eq!(output.stdout, b"500\n");
    taken
}

fn main() -> ExitCode {
    let rounds = std::env::args().find_map(|argument| argument.parse().ok());
    let binary = std::env::var_os("MEMFOLD_BINARY");
    let binary = binary.map_or_else(|| env!("CARGO_BIN_EXE_memfold").into(), PathBuf::from);
    let mut native = Vec::new();
    let mut ratios = Vec::new();
    for _ in 0..rounds.unwrap_or(15) {
        let alone = time(Command::new("sh"));
        let mut limited = Command::new(&binary);
        limited.args(["run", "--limit", "1G", "--", "sh"]);
        ratios.push(time(limited).as_secs_f64() / alone.as_secs_f64());
        native.push(alone);
    }
    native.sort();
    ratios.sort_by(f64::total_cmp);
    let (median, last) = (ratios.len() / 2, ratios.len() - 1);
    println!(
        "natively {:?}; under memfold {:.2} times as long ({:.2} to {:.2}, {} rounds)",
        native[median],
        ratios[median],
        ratios[0],
        ratios[last],
        ratios.len()
    );
    if ratios[median] > GOAL {
        println!("the median exceeds {GOAL}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
