//! Tests that need what a machine may lack.

use std::io::Write;

/// Says aloud that a test, or a part of it, is left out; fails where nothing may be (`CI=true`).
pub fn skip(missing: &str) {
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "this machine lacks {missing}, and CI=true allows no test to be skipped"
    );
    // Not eprintln: the test harness would hide it from whoever runs the tests.
    let line = format!("\nSKIPPED: this machine lacks {missing}\n");
    std::io::stderr()
        .write_all(line.as_bytes())
        .expect("stderr");
}
