//! Programs that begin without a helper: the limit holds all the same.

use super::processes::assert_held_once;
use crate::support::{Limits, MIB, Program, compiled, short_or_long};

fn grows_late(mode: &str, at_once: u32, megabytes: &str) {
    let script = format!(
        "sleep 0.1; for i in $(seq {at_once}); do \"$0\" \"$@\" & all=\"$all $!\"; done; \
         for one in $all; do wait $one || exit 1; done"
    );
    let outcome = Program::new("sh")
        .args(["-c", &script])
        .arg(compiled("late", &["late.c"], &["-pthread"]))
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
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_late_program_that_touches_pages_stays_in_its_limit() {
    alone!(&["cc", "sh"]);
    grows_late("touch", 1, short_or_long("1000", "1800"));
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn late_programs_that_touch_pages_at_once_stay_in_one_limit() {
    alone!(&["cc", "sh"]);
    grows_late("touch", 6, "200");
}

/// As many as fit four times over start at once: each waits to be admitted until there is room.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn small_programs_that_start_at_once_do_not_take_twice_the_limit() {
    alone!(&["cc", "sh"]);
    const LIMIT: u64 = 156 * MIB;
    let script = "for i in $(seq 200); do \"$0\" hold 3 & all=\"$all $!\"; done; \
                  for one in $all; do wait $one || exit 1; done";
    let program =
        Program::new("sh")
            .args(["-c", script])
            .arg(compiled("late", &["late.c"], &["-pthread"]));
    let outcome = assert_held_once(&program, LIMIT, LIMIT + LIMIT / 2, 50_000 * 4096);
    assert_eq!(outcome.text(), "hold ok\n".repeat(200));
}
