//! Limits that cannot be held, as the pool alone is larger: the programs get on, and are told which limit would be.

use crate::support::{Limits, MIB, Outcome, Program, python};

/// 64 MiB of pages of which half compresses to nothing and half not at all; 6 MiB of them are touched again and again.
const HOT_AND_COLD: &str = "
import mmap, os
size = 64 << 20
memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, size, 4096):
    memory[page:page + 2048] = os.urandom(2048)
total = 0
for lap in range(30):
    for page in range(0, 6 << 20, 4096):
        total += memory[page + 3000]
print(total)
";

fn run(limit: u64, floor: &str) -> Outcome {
    let program = Program::new(python()).args(["-c", HOT_AND_COLD]);
    let outcome = program
        .memfold_options(["--floor", floor])
        .run(Limits::Total(limit * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "0\n");
    outcome
}

#[test]
fn what_programs_use_most_stays_where_the_limit_cannot_be_held() {
    alone!(&["python3"]);
    let (none, fifth) = (run(16, "0%"), run(16, "20%"));
    let brought_in = |outcome: &Outcome| outcome.number("pages_in");
    assert!(
        brought_in(&none) > 3.0 * brought_in(&fifth),
        "{} without a floor, {} with it",
        brought_in(&none),
        brought_in(&fifth)
    );
    assert!(
        fifth.errors.contains("would be held now"),
        "{}",
        fifth.errors
    );
    let held = run(fifth.number("held_limit_bytes") as u64 / MIB + 1, "20%");
    held.assert_no_warning_of_the_limit();
    // No floor is asked for where the limit can be held.
    assert!(brought_in(&held) < brought_in(&none));
}
