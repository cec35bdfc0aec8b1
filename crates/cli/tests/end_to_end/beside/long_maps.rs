//! Programs that make files of `/proc` as long as they like.

use crate::support::{Limits, MIB, Program, compiled};
use std::time::Duration;

/// 1000 lines of 200 KB each.
#[test]
fn a_program_whose_mappings_take_long_to_list_costs_memfold_nothing() {
    beside!(&["cc", "sh"]);
    let program = compiled("long_maps", &["long_maps.c"], &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let outcome = Program::new("sh")
        .args(["-c", "\"$0\" \"$1\" 800 1000 24 3; wait"])
        .arg(&program)
        .arg(folder.path())
        .timeout(Duration::from_secs(60))
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    let said = outcome.text();
    let peak = said.strip_prefix("peak ").map(str::trim);
    let peak: u64 = peak.and_then(|peak| peak.parse().ok()).expect("a number");
    assert!(peak < 100 << 10, "{peak} KiB: {}", outcome.errors);
    let warning = "has more mappings, or longer paths of mapped files, than memfold reads";
    assert!(outcome.errors.contains(warning), "{}", outcome.errors);
}
