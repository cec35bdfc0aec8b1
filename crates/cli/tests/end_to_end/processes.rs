//! One limit over a tree of processes.

use crate::support::{Limits, MIB, Program, alone, available, compiled};

#[test]
fn one_limit_covers_all_processes() {
    if !available("one limit", &["cc", "sh"]) {
        return;
    }
    let _guard = alone();
    let folder = tempfile::tempdir().expect("a temporary directory");
    // Four at once, 24 MiB each, and 24 MiB resident for all of them.
    let script = "for i in 1 2 3 4; do \"$0\" 24 6 \"$1\" > /dev/null & all[i]=$!; done; \
                  code=0; for one in ${all[@]}; do wait $one || code=1; done; exit $code";
    let outcome = Program::new("bash")
        .args(["-c", script])
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(folder.path().join("result"))
        .run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    outcome.assert_swapped(96 * MIB);
    outcome.assert_limit_held();
    assert!(
        outcome.number("processes") >= 5.0,
        "{}",
        outcome.number("processes")
    );
}

#[test]
fn a_program_that_outlives_its_parent_is_still_served() {
    if !available("orphan", &["cc", "sh"]) {
        return;
    }
    let _guard = alone();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let result = folder.path().join("result");
    // The first program ends at once; its child goes on in the background, and its
    // output says that it came to its end.
    let script = "(\"$0\" 64 12 \"$1\"; echo \"ended $?\") & exit 3";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(&result)
        .run(Limits::Resident(16 * MIB));
    assert_eq!(outcome.code(), 3);
    assert_eq!(outcome.text(), "............ended 0\n");
    assert_eq!(
        std::fs::read_to_string(&result).expect("the result file"),
        ""
    );
}
