//! Programs that verify every page they own, each in one unusual state of its mappings.

use crate::support::{Limits, MIB, Program, Share, compiled, short_or_long, skip, turn};
use memfold_sys::channel::{CHANNEL_BYTES, Channel};
use std::mem::offset_of;
use std::time::Duration;

#[test]
fn what_fills_a_gap_while_it_is_taken_over_is_not_lost() {
    beside!(&["cc"]);
    let program = Program::new(compiled("gaps", &["gaps.c"], &["-pthread"])).args(["8", "8", "24"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "gaps ok\n");
    outcome.assert_swapped(32 * MIB);
}

#[test]
fn a_child_uses_what_was_kept_from_it() {
    beside!(&["cc"]);
    let program = Program::new(compiled("dontfork", &["dontfork.c"], &[]));
    // Managed, but with nothing out as it forks, with much out, and with most of what is kept out.
    let few = &["24", "40"][..];
    for (arguments, limit) in [(few, 32), (few, 16), (&["48", "8", "40"], 16)] {
        let program = program.clone().args(arguments);
        let outcome = program.run(Limits::Resident(limit * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), "dontfork ok\n");
        outcome.assert_swapped(48 * MIB);
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn what_a_fork_wipes_is_empty_in_the_child() {
    beside!(&["cc"]);
    let program = Program::new(compiled("wiped", &["wiped.c"], &[])).args(["56", "12"]);
    for options in [[].as_slice(), ["--prepare-forks"].as_slice()] {
        let program = program.clone().memfold_options(options);
        // Much of it out at each fork, and nearly all.
        for limit in [40 * MIB, 16 * MIB] {
            let outcome = program.clone().run(Limits::Resident(limit));
            outcome.assert_success();
            assert_eq!(outcome.text(), "wiped ok\n");
            outcome.assert_swapped(32 * MIB);
        }
    }
}

#[test]
fn a_child_is_not_taken_for_another_of_its_number() {
    beside!(&["cc"]);
    let program = compiled("namespaces", &["namespaces.c"], &[]);
    for other in ["managed", "unmanaged"] {
        let program = Program::new(&program).args([other, "48"]);
        let outcome = program.run(Limits::Resident(16 * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), "namespaces ok\n");
        outcome.assert_swapped(24 * MIB);
    }
}

/// Known as resident, such a page would be reported as lost once it is dropped.
#[test]
fn zeros_are_not_brought_in_where_memory_is_given_up() {
    beside!(&["cc"]);
    let program = Program::new(compiled("ahead", &["ahead.c"], &["-pthread"])).arg("4");
    let outcome = program.run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "ahead ok\n");
    outcome.assert_swapped(48 * MIB);
}

#[test]
fn what_was_dropped_comes_back_many_pages_at_a_time() {
    beside!(&["cc"]);
    let program = Program::new(compiled("refill", &["refill.c"], &[])).args(["6", "50"]);
    let outcome = program.run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "refill ok\n");
    outcome.assert_swapped(32 * MIB);
    let refilled = 50.0 * 6.0 * 256.0;
    let faults = outcome.number("faults_zero_fill");
    assert!(
        faults < refilled / 8.0,
        "{faults} faults for {refilled} pages"
    );
}

/// Pages go away without an event here, as a lost page would: this must not pass in silence.
#[test]
fn a_page_that_is_not_where_it_was_is_reported() {
    beside!(&["cc"]);
    let program = Program::new(compiled("guarded", &["guarded.c"], &[])).arg("40");
    let outcome = program.run(Limits::Resident(16 * MIB));
    if outcome.text() == "no guard regions\n" {
        skip("guard regions (Linux 6.13)");
        return;
    }
    assert_eq!(outcome.text(), "zeros\n", "{}", outcome.errors);
    assert!(outcome.has_missed_a_page(), "{}", outcome.errors);
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_program_that_secures_itself_keeps_its_memory() {
    beside!(&["cc"]);
    let program = Program::new(compiled("hostile", &["hostile.c"], &[])).arg("64");
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    // No limit to hold: the child under a filter has no helper, and what it touches stays in.
    outcome.assert_swapped(64 * MIB);
}

#[test]
fn the_last_pages_that_a_program_can_have_are_kept() {
    beside!(&["cc"]);
    let program = compiled("last_pages", &["last_pages.c"], &[]);
    let outcome = Program::new(program)
        .args(["3", "24"])
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    if outcome.text() == "taken\n" {
        skip("free memory at the end of the address space");
        return;
    }
    assert_eq!(outcome.text(), "last_pages ok\n");
}

/// Most of its time it waits until what was dropped is looked at: the short form judges no limit.
#[test]
fn what_was_dropped_is_zero_and_known_to_be_gone() {
    let share = short_or_long(Share::Beside, Share::Alone);
    let Some(_turn) = turn(share, &["cc"]) else {
        return;
    };
    let program = Program::new(compiled("dropped", &["dropped.c"], &[])).args(["48", "13"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "dropped ok\n");
    if share == Share::Alone {
        outcome.assert_limit_held();
    }
}

/// A program that writes over its channel harms itself at most, however its forks are followed.
#[test]
fn a_program_that_scribbles_over_its_channel_harms_no_other() {
    beside!(&["cc", "sh"]);
    let layout = [
        ("CHANNEL_BYTES", CHANNEL_BYTES),
        ("FORK", offset_of!(Channel, fork)),
        ("FATAL_1", offset_of!(Channel, alive)),
        ("FATAL_2", offset_of!(Channel, dismissed)),
    ];
    let layout = layout.map(|(name, value)| format!("-D{name}={value}UL"));
    let scribble = compiled(
        "scribble",
        &["scribble.c"],
        &layout.each_ref().map(String::as_str),
    );
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("result");
    // One whose helper hangs does not end.
    let script = "for seed in 1 2 3; do \"$0\" 2 16 $seed & all=\"$all $!\"; done
                  \"$1\" 16 4 \"$2\" >/dev/null; status=$?; sleep 1; kill -9 $all 2>/dev/null; exit $status";
    let program = Program::new("sh")
        .args(["-c", script])
        .arg(scribble)
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(&file)
        .timeout(Duration::from_secs(60));
    let ways: [&[&str]; 2] = [&[], &["--prepare-forks"]];
    for options in &ways[..short_or_long(1, 2)] {
        let outcome = program
            .clone()
            .memfold_options(*options)
            .run(Limits::Resident(32 * MIB));
        let (text, errors) = (outcome.text(), &outcome.errors);
        assert!(outcome.status.success(), "{options:?}: {text}\n{errors}");
        assert_eq!(text.matches("scribbling\n").count(), 3, "{text}\n{errors}");
        let result = std::fs::read_to_string(&file).expect("the result file");
        assert_eq!(result, "", "{options:?}: {text}\n{errors}");
        assert!(outcome.number("pages_in") > 1000.0);
    }
}
