//! How long memfold's own work takes: `memfold run -- true` and `memfold doctor`, from exec to exit, beside `true`
//! alone: `cargo bench -p memfold-cli --bench startup [-- ROUNDS]`, in turn. `MEMFOLD_BINARY` is another binary than
//! this build's (`packaging/release.sh` makes one). Fails if a median exceeds its goal. As root.
#![allow(missing_docs, reason = "a program")]

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// What is measured: its arguments to memfold (none: `true` alone), and the longest that the median may take.
const CASES: [(&[&str], Duration); 3] = [
    (&[], Duration::MAX),
    (&["run", "--", "true"], Duration::from_millis(15)),
    (&["doctor"], Duration::from_millis(5)),
];

fn main() -> ExitCode {
    let rounds = std::env::args().find_map(|argument| argument.parse().ok());
    let binary = std::env::var_os("MEMFOLD_BINARY");
    let binary = binary.map_or_else(|| env!("CARGO_BIN_EXE_memfold").into(), PathBuf::from);
    let mut times = CASES.map(|_| Vec::new());
    for _ in 0..rounds.unwrap_or(101) {
        for ((arguments, _), times) in CASES.iter().zip(&mut times) {
            let mut command = Command::new("true");
            if !arguments.is_empty() {
                command = Command::new(&binary);
                command.args(*arguments);
            }
            let start = Instant::now();
            let status = command.stdout(Stdio::null()).status();
            times.push(start.elapsed());
            let status = status.expect("it can be started");
            assert!(status.success(), "memfold {arguments:?}: {status}");
        }
    }
    let mut exit = ExitCode::SUCCESS;
    for ((arguments, goal), times) in CASES.iter().zip(&mut times) {
        times.sort();
        let of = |percent: usize| times[times.len() * percent / 100];
        let name = match arguments {
            [] => "true".to_owned(),
            arguments => format!("memfold {}", arguments.join(" ")),
        };
        println!(
            "{name:20} {:?} (10 % {:?}, 90 % {:?})",
            of(50),
            of(10),
            of(90)
        );
        if of(50) > *goal {
            println!("{name}: the median exceeds {goal:?}");
            exit = ExitCode::FAILURE;
        }
    }
    exit
}
