//! A heap that grows stays few mappings.

use crate::support::{Limits, MIB, Program, compiled};

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_heap_that_grows_bit_by_bit_stays_few_mappings() {
    alone!(&["cc"]);
    let program = Program::new(compiled("grow", &["grow.c"], &[])).args(["250", "2000", "0"]);
    let outcome = program.run(Limits::Resident(64 * MIB));
    outcome.assert_success();
    outcome.assert_limit_held();
    outcome.assert_swapped(250 * MIB);
    let mappings: u32 = outcome.text().trim().parse().expect("a number");
    assert!(mappings < 80, "{mappings} mappings");
}
