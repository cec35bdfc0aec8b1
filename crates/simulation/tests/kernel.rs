//! The model of Linux held to Linux: see docs/testing.md.

use memfold_simulation::simulation::conformance::facts::Step;
use memfold_simulation::simulation::conformance::linux::Linux;
use memfold_simulation::simulation::conformance::operation::{Operation, history};
use memfold_simulation::simulation::conformance::{compare, shorten};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Seconds of random histories.
const SECONDS: u64 = 10;

/// Whether programs of other kernels can be tried here; says so if not.
fn is_possible() -> bool {
    match Linux::start() {
        Ok(_) => true,
        Err(error) => {
            let missing = format!("root and a userfaultfd with fork events ({error})");
            memfold_testing::skip(&missing);
            false
        }
    }
}

/// A number of the environment.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

/// Kinds of operations with what came of them.
#[derive(Default)]
struct Seen(BTreeMap<String, u64>);

impl Seen {
    fn note(&mut self, step: &Step) {
        let operation = match step.operation {
            Operation::By(_, call) => format!("{call:?}"),
            Operation::To(_, request) => format!("{request:?}"),
            Operation::Exit(_) => "Exit()".to_owned(),
        };
        let kind = operation.split('(').next().unwrap_or_default();
        for (what, how) in step.facts.said() {
            let what = what.split(' ').next().unwrap_or_default();
            if matches!(what, "thread" | "helper" | "result") {
                *self.0.entry(format!("{kind}, {what}: {how}")).or_default() += 1;
            }
        }
    }
}

#[test]
fn the_model_does_what_linux_does() {
    if !is_possible() {
        return;
    }
    let first = number("MEMFOLD_KERNEL_SEED").unwrap_or(0);
    let seconds = Duration::from_secs(number("MEMFOLD_KERNEL_SECONDS").unwrap_or(SECONDS));
    let (began, mut seen, mut operations) = (Instant::now(), Seen::default(), 0);
    let mut seeds = first..;
    // A busy machine gets through fewer histories in that time.
    while began.elapsed() < seconds || (!seen.missing().is_empty() && began.elapsed() < seconds * 6)
    {
        let seed = seeds.next().expect("seeds");
        match compare(&history(seed)).expect("a program") {
            Ok(steps) => {
                operations += steps.len();
                steps.iter().for_each(|step| seen.note(step));
            }
            Err(difference) => {
                let shortest = shorten(difference).expect("a program");
                panic!("seed {seed}:\n{shortest}");
            }
        }
    }
    println!(
        "{operations} operations of {} histories",
        seeds.start - first
    );
    if seconds >= Duration::from_secs(SECONDS) {
        let missing = seen.missing();
        assert!(missing.is_empty(), "no history came to {missing:?}");
    }
}

/// What the histories must have come to within the time of one run: else they compare too little.
const MUST_SEE: [&str; 31] = [
    "CopyIn, result: Ok(())",
    // Partial, occupied, changing, not registered, gone.
    "CopyIn, result: Err((1, Errno(11)))",
    "CopyIn, result: Err((0, Errno(17)))",
    "CopyIn, result: Err((0, Errno(11)))",
    "CopyIn, result: Err((0, Errno(2)))",
    "CopyIn, result: Err((0, Errno(3)))",
    "CopyIn, thread: Done",
    "PutPage, result: Ok(())",
    "Zero, thread: Done",
    "Wake, thread: waits: Fault",
    "Protect, result: Ok(())",
    "Protect, result: Err(Errno(11))",
    "Unprotect, thread: Done",
    "Unregister, thread: Done",
    "IsRegistered, result: true",
    "Move, helper: Moved(1, Errno(0))",
    "Move, helper: Moved(0, Errno(11))",
    "Move, helper: Moved(0, Errno(16))",
    "Move, helper: Moved(0, Errno(17))",
    "Drop, thread: waits: Event",
    "Unmap, thread: waits: Event",
    "Remap, thread: waits: Event",
    "Fork, thread: waits: Event",
    "ForkUnreported, thread: Forked",
    "Keep, thread: Done",
    "Keep, thread: Failed(Errno(12))",
    "Mark, thread: Done",
    "Free, thread: waits: Event",
    "Receive, thread: Forked",
    "Receive, thread: waits: Event",
    "Write, thread: waits: Fault",
];

impl Seen {
    /// What none of the histories came to yet.
    fn missing(&self) -> Vec<&'static str> {
        let unseen = |what: &&str| !self.0.contains_key(*what);
        MUST_SEE.into_iter().filter(unseen).collect()
    }
}
