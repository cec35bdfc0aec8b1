//! The limit that memfold suggests is right: about the smallest one under which at most 5 % of the time goes
//! to swapping, which is searched by trying.

use crate::support::{Limits, MIB, Outcome, Program, compiled, python, short_or_long};
use std::path::Path;

/// What counts as comfortable.
const COMFORTABLE: f64 = 0.05;
/// How far off a suggestion may be.
const TOLERANCE: f64 = 0.15;
/// Parts of the limit that was found, under which a suggestion is asked for.
const PARTS: [f64; 2] = [0.6, 0.75];

const SWEEP: &str = "\
b = bytearray(150 << 20)
for at in range(0, len(b), 4096):
    b[at:at + 2048] = bytes((at * i) >> 12 & 255 for i in range(64)) * 32
print(sum(b[at] for _ in range(8) for at in range(0, len(b), 512)))
";

const OBJECTS: &str = "\
d = {}
for i in range(900000):
    d[i] = str(i) * 3
t = 0
for k in range(3):
    for i in range(0, 900000, 2):
        t += len(d[i])
    for i in range(100000):
        d[i] = str(i + k) * 3
print(t)
";

const NODE: &str = "\
const a = [];
for (let i = 0; i < 600000; i++) a.push({k: i, s: 'x' + i, v: [i, i + 1]});
let t = 0;
for (let r = 0; r < 6; r++) for (let i = 0; i < a.length; i++) t += a[i].v[0] + a[i].s.length;
console.log(t);
";

const AWK: &str = "\
BEGIN {
    for (i = 0; i < 900000; i++) a[i] = i \"x\"
    for (r = 0; r < 3; r++) for (i = 0; i < 900000; i++) t += length(a[i])
    print t
}";

fn programs(folder: &Path) -> Vec<(&'static str, Program)> {
    let lines = folder.join("lines");
    let text: String = (0..2_500_000)
        .map(|line: u32| format!("{line}\n"))
        .collect();
    std::fs::write(&lines, text).expect("a file");
    let hot = Program::new(compiled("hot", &["hot.c"], &[]))
        .args(["120", "50", "400000", "1000", "1500"]);
    // Comfortable far below its need: the rest is never touched again. Long enough that the hot pages' way
    // back from the first round does not count.
    let far = Program::new(compiled("hot", &["hot.c"], &[])).args([
        "120",
        "50",
        "2400000",
        "1000000000",
        "2000",
    ]);
    let sort = Program::new("sort")
        .args(["-rn", "-S", "1G", "--parallel=1", "-o", "/dev/null"])
        .arg(lines);
    let mut all = vec![
        ("objects", Program::new(python()).args(["-c", OBJECTS])),
        ("sort", sort),
        ("sweep", Program::new(python()).args(["-c", SWEEP])),
        ("hot", hot),
        ("far below its need", far),
        ("node", Program::new("node").args(["-e", NODE])),
        ("awk", Program::new("awk").arg(AWK)),
    ];
    all.truncate(short_or_long(1, all.len()));
    all
}

fn run(program: &Program, limit: u64) -> Outcome {
    let outcome = program.start(Limits::Total(limit)).wait();
    outcome.assert_success();
    outcome
}

/// The smallest comfortable limit, to 3 % of what the program needs.
fn least(program: &Program) -> u64 {
    let needed = run(program, 4096 * MIB).number("peak_needed_bytes") as u64;
    let (mut low, mut high) = ((needed / 2).max(16 * MIB), needed * 5 / 4 + 4 * MIB);
    while high - low > needed / 33 {
        let middle = low.midpoint(high);
        // What others do on the machine lengthens waits, and nothing shortens them.
        if (0..3).any(|_| run(program, middle).number("swapping_share") <= COMFORTABLE) {
            high = middle;
        } else {
            low = middle;
        }
    }
    high
}

#[test]
fn the_suggested_limit_is_comfortable_and_no_larger_than_need_be() {
    only_in_the_long_form!();
    alone!(&["cc", "python3", "sort", "node", "awk"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut wrong = Vec::new();
    for (name, program) in programs(folder.path()) {
        let least = least(&program);
        for part in PARTS {
            let outcome = run(&program, (least as f64 * part) as u64);
            let suggested = outcome.number("comfortable_limit_bytes");
            let ratio = suggested / least as f64;
            let line = format!(
                "{name}: {} MiB is the least; {} MiB suggested at {part} of it, {ratio:.2} of the least",
                least / MIB,
                (suggested as u64) / MIB
            );
            println!("{line}");
            if (ratio - 1.0).abs() > TOLERANCE {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
