//! Memory that cannot be paged out, as it is not managed: what can be keeps some room beside it.

use crate::support::{Limits, MIB, Program, compiled};
use std::time::Duration;

const LIMIT: u64 = 20 * MIB;
const OWN: u64 = 24 * MIB;

/// The rest of the program goes round a part of the limit, though there are 40 MiB beside it that cannot be paged out.
#[test]
fn memory_keeps_room_beside_that_of_a_child_without_a_helper() {
    beside!(&["cc"]);
    let outcome = Program::new(compiled("unmanaged", &["unmanaged.c"], &[]))
        .args(["24", "40", "6"])
        .timeout(Duration::from_secs(60))
        .run(Limits::Resident(LIMIT));
    outcome.assert_success();
    let pages_in = outcome.number("pages_in");
    assert!(pages_in * 4096.0 > OWN as f64, "{pages_in} pages came in");
    let resident: u64 = outcome.text().trim().parse().expect("a number of KiB");
    let expected = LIMIT / 4 / 1024;
    assert!(
        (expected / 2..expected * 2).contains(&resident),
        "{resident} KiB beside it"
    );
}
