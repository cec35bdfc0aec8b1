//! The limit holds while pages go to the swap file.

use crate::beside::tiers::{assert_empty, with_file};
use crate::support::{Limits, MIB, Program, python, short_or_long, source};

#[test]
fn what_does_not_fit_goes_to_the_swap_file_and_comes_back() {
    alone!(&["python3"]);
    let program = Program::new(python())
        .arg(source("objects.py"))
        .arg(short_or_long("0.4", "1"));
    let native = program.run(Limits::None);
    native.assert_success();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let limit = native.peak().total / 3;
    let limited = with_file(program, folder.path(), "1G").run(Limits::Total(limit));
    limited.assert_success();
    assert_eq!(limited.text(), native.text());
    limited.assert_limit_held();
    assert!(limited.number("pages_written_back") > 1000.0);
    assert!(limited.number("peak_file_bytes") > MIB as f64);
    assert_eq!(limited.number("file_errors"), 0.0);
    // Above it for moments, as the assertion on the limit allows, but never stuck there.
    limited.assert_no_warning_of_the_limit();
    assert!(limited.number("peak_pool_bytes") < limit as f64 * 0.6);
    assert_empty(folder.path());
}
