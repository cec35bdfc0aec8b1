//! What must not grow with time: page tables, mappings.

use crate::support::{Limits, MIB, Program, Running, compiled, is_without_move, skip, source};
use std::time::{Duration, Instant};

/// What a run's page tables and swap tables take now.
fn metadata(run: &Running) -> u64 {
    let statistics = run.statistics();
    statistics["metadata_bytes"].as_u64().expect("a number")
}

/// The most that metadata takes within a time.
fn most_metadata(run: &Running, time: Duration) -> u64 {
    let end = Instant::now() + time;
    let mut most = 0;
    while Instant::now() < end {
        most = most.max(metadata(run));
        std::thread::sleep(Duration::from_millis(100));
    }
    most
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn page_tables_of_random_mappings_do_not_grow() {
    beside!(&["cc"]);
    let program = Program::new(compiled("randmap", &["randmap.c"], &[])).args(["15", "200"]);
    let running = program.start(Limits::Total(48 * MIB));
    std::thread::sleep(Duration::from_secs(2));
    let early = most_metadata(&running, Duration::from_millis(1500));
    std::thread::sleep(Duration::from_secs(3));
    let late = most_metadata(&running, Duration::from_millis(1500));
    let outcome = running.wait();
    outcome.assert_success();
    assert_eq!(outcome.text(), "randmap ok\n");
    assert!(
        late < early + MIB,
        "from {} to {} KiB",
        early / 1024,
        late / 1024
    );
}

/// How much a collector leaves lying about changes by the second, so this looks at what is left once
/// nothing is.
#[test]
fn page_tables_of_node_go_with_its_heap() {
    only_in_the_long_form!();
    beside!(&["node"]);
    let script = source("churn.js");
    let program = Program::new("node").arg("--expose-gc").arg(script);
    let mut running = program.args(["8", "5"]).start(Limits::Total(100 * MIB));
    running.wait_for_output(1);
    std::thread::sleep(Duration::from_secs(3));
    let left = metadata(&running);
    let outcome = running.wait();
    outcome.assert_success();
    assert_eq!(outcome.text(), "all given up\nchurn ok\n");
    assert!(left < 6 * MIB, "{} KiB", left / 1024);
}

#[test]
fn a_program_keeps_the_mappings_that_it_may_have() {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("the most mappings");
    let own = most.trim().parse::<u64>().expect("a number") - 70;
    beside!(&["cc"]);
    if own > 100_000 {
        return skip("a vm.max_map_count of at most 100,000");
    }
    let own = own.to_string();
    let program = Program::new(compiled("grow", &["grow.c"], &[])).args(["60", "1000", &own]);
    let outcome = program.run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    let warnings = outcome.errors.matches("vm.max_map_count allows").count();
    assert_eq!(warnings, 1, "{}", outcome.errors);
}

/// The kernel merges no page of the stage with another: it could not be moved to be dropped.
#[test]
fn the_stage_is_kept_from_merging() {
    beside!(&["cc"]);
    let program = Program::new(compiled("merged", &["merged.c"], &[])).args(["exec", "40"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    if outcome.text() == "no merging\n" {
        skip("KSM (PR_SET_MEMORY_MERGE)");
        return;
    }
    // Pages that are carried off by mremap bring their mappings, and are dropped in place, where a merged one can be.
    let stages = u32::from(!is_without_move());
    assert_eq!(outcome.text(), format!("{stages} stages, 0 merged\n"));
}
