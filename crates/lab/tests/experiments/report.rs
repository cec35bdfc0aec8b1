//! `memfold-lab report` end to end, at a small scale.

use std::fs;

/// Every published line has figures, so the page looks up names that the experiments print. Lines
/// of `kernel` are not run here; a unit test checks their names.
#[test]
fn every_published_line_has_figures() {
    let out = tempfile::tempdir().unwrap();
    let output = crate::lab()
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
    assert_eq!(lines.count(), 5, "one table per mailing-list thread");
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
