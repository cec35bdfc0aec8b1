//! `memfold-lab growth` end to end, at a small scale.

use std::process::Command;

use serde_json::Value;

use memfold_testing::skip;

use crate::memfold_is_built;

fn lab() -> Command {
    let mut lab = crate::lab();
    lab.arg("growth");
    lab
}

fn can_run() -> bool {
    if !memfold_is_built() {
        return false;
    }
    let compiler = Command::new("cc").arg("--version").output();
    if compiler.is_err() {
        skip("cc");
        return false;
    }
    true
}

#[test]
fn each_dimension_is_measured_beside_the_small_case() {
    if !can_run() {
        return;
    }
    let output = lab()
        .args(["--json", "--scale", "0.11", "--megabytes", "96"])
        .args(["--runs", "2", "--seconds", "1"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let rows = &crate::schema::rows(&output, "growth", &["grown", "size", "wall_us", "misses"]);
    let grown: Vec<_> = rows.iter().map(|row| row["grown"].as_str()).collect();
    let wanted = ["nothing", "bytes", "processes", "mappings", "threads"];
    assert_eq!(grown, wanted.map(Some), "{report}");
    let sizes: Vec<_> = rows.iter().filter_map(|row| row["size"].as_str()).collect();
    assert_eq!(sizes, ["96 MiB", "22", "1100", "7"], "{report}");
    for row in rows {
        let number = |name: &str| {
            row[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{name}: {row}"))
        };
        // At least what does not fit came in, and went out again.
        let pages = number("megabytes") * 256.0;
        for name in ["pages_in", "pages_out"] {
            assert!(number(name) > pages / 2.0, "{name}: {row}");
        }
        assert!(
            number("program_cpu_us") > 0.0 && number("memfold_cpu_us") > 0.0,
            "{row}"
        );
        assert!(
            number("own_percent") > 0.0 && number("own_mib") > 0.0,
            "{row}"
        );
        assert!(number("rest_percent") > 0.0, "{row}");
        assert!(row["misses"].is_string(), "{row}");
        if row["grown"] == "nothing" {
            continue;
        }
        for name in ["wall", "cpu"] {
            let (least, most) = (
                number(&format!("{name}_least")),
                number(&format!("{name}_most")),
            );
            let ratio = number(&format!("{name}_ratio"));
            assert!(0.0 < least && least <= ratio && ratio <= most, "{row}");
            let ratios = row[format!("{name}_ratios")].as_array();
            assert_eq!(ratios.expect("samples").len(), 2, "{row}");
        }
    }
}

#[test]
fn a_wrong_byte_fails_the_experiment() {
    if !can_run() {
        return;
    }
    let output = lab()
        .args(["--scale", "0.11", "--dimension", "threads"])
        .args(["--runs", "1", "--seconds", "1", "--spoil", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("WRONG RESULT: page 8800 in pass 1"),
        "{error}"
    );
}

#[test]
fn what_there_is_no_memory_for_is_left_out_with_a_note() {
    if !can_run() {
        return;
    }
    let output = lab()
        .args([
            "--json",
            "--dimension",
            "bytes",
            "--megabytes",
            "1000000000",
        ])
        .args(["--scale", "0.11", "--runs", "1"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 1, "{report}");
    assert!(rows[0]["size"] == "1000000000 MiB" && rows[0]["wall_ratio"].is_null());
    let note = report["notes"][0].as_str().expect("a note");
    assert!(note.starts_with("bytes is left out"), "{note}");
}

#[test]
fn what_cannot_be_measured_is_one_line() {
    for (arguments, part) in [
        (["--dimension", "files"], "unknown dimension \"files\""),
        (["--seconds", "0"], "--seconds takes a number of at least 1"),
        (["--megabytes", "600"], "--megabytes must be above the 625"),
        (["--scale", "0"], "--scale takes a number above 0"),
        (["--scale", "0.05"], "--scale must be at least 0.11"),
        (["--runs", "0"], "--runs must be at least 1"),
    ] {
        let output = lab().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            error.lines().count() == 1 && error.contains(part),
            "{error}"
        );
    }
}
