//! Programs that begin without a helper: the limit holds all the same.

use crate::support::{Limits, MIB, Program, compiled};

fn grows_late(mode: &str, at_once: u32, megabytes: &str) {
    let script = format!(
        "sleep 0.1; for i in $(seq {at_once}); do \"$0\" \"$@\" & all=\"$all $!\"; done; \
         for one in $all; do wait $one || exit 1; done"
    );
    let outcome = Program::new("sh")
        .args(["-c", &script])
        .arg(compiled("late", &["late.c"], &[]))
        .args([mode, megabytes])
        .run(Limits::Resident(512 * MIB));
    outcome.assert_success();
    assert_eq!(
        outcome.text(),
        format!("{mode} ok\n").repeat(at_once as usize)
    );
    outcome.assert_limit_held();
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out"
    );
}

#[test]
fn a_late_program_stays_in_its_limit() {
    alone!(&["cc", "sh"]);
    grows_late("grow", 1, "620");
}

#[test]
fn a_late_program_that_touches_pages_stays_in_its_limit() {
    alone!(&["cc", "sh"]);
    grows_late("touch", 1, "1800");
}

#[test]
fn late_programs_that_touch_pages_at_once_stay_in_one_limit() {
    alone!(&["cc", "sh"]);
    grows_late("touch", 6, "200");
}
