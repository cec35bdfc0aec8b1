//! `memfold-lab report` as a user runs it, at sizes of seconds.

use std::{fs, process::Command};

/// The names that the page looks up are those that the experiments print: every line that is not
/// about `kernel` (whose names a unit test looks at) has its figures.
#[test]
fn every_published_line_has_figures() {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_memfold-lab"))
        .args(["report", "--scale", "0.02", "--runs", "1", "--out"])
        .arg(out.path())
        .args(["--experiments", "chain,free,table,virtual,exit"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(!error.contains("FAILED"), "{error}");
    let page = fs::read_to_string(out.path().join("index.html")).unwrap();
    let lines = page.split("<tr").filter(|line| line.contains("gain here"));
    assert_eq!(lines.count(), 5, "a table for each thread");
    let mut measured = 0;
    for line in page
        .split("<tr")
        .filter(|line| line.contains("<td class=\"text\">"))
    {
        let of_kernel = line.contains("zram (lz4)");
        assert_eq!(line.contains("not measured"), of_kernel, "{line}");
        measured += usize::from(!of_kernel);
    }
    assert!(measured > 25, "{measured} lines");
    for name in ["chain", "free", "table", "virtual", "exit"] {
        assert!(out.path().join(format!("{name}.json")).exists(), "{name}");
        assert!(page.contains(&format!("<summary>{name}, ")), "{name}");
    }
}
