//! Programs that would have memfold read a file of a FUSE file system of their own, which never answers,
//! where it reads their helper's memory.

use crate::support::{Limits, MIB, Program, compiled, skip};
use std::time::Duration;

/// Whether this kernel keeps a sealed mapping (Linux 6.10) and has FUSE.
fn is_supported() -> bool {
    // SAFETY: an empty range.
    let sealed = unsafe { nix::libc::syscall(462, 0, 0, 0) } == 0;
    let fuse = std::fs::metadata("/dev/fuse").is_ok();
    if !(sealed && fuse) {
        skip("mseal (Linux 6.10) and /dev/fuse");
    }
    sealed && fuse
}

#[test]
fn a_file_mapped_over_the_stage_holds_up_no_program() {
    beside!(&["cc", "sh"]);
    if !is_supported() {
        return;
    }
    let program = compiled("stage_mapped_over", &["stage_mapped_over.c"], &[]);
    let script = "\"$0\" over 24 4 & \"$0\" steady 24 6 & wait";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(&program)
        .timeout(Duration::from_secs(60))
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    let said = outcome.text();
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    let refused = "over: Operation not permitted";
    assert_eq!(lines, [refused, "over: ok", "steady: ok"]);
    assert!(outcome.number("pages_out") > 2000.0, "{}", outcome.errors);
}
