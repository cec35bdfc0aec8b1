//! `memfold-lab proactive` end to end, for a few seconds.

use serde_json::Value;

use memfold_testing::skip;

use crate::{lab, memfold_is_built};

#[test]
fn programs_are_measured_without_and_with_it() {
    if !memfold_is_built() {
        return;
    }
    let output = lab()
        .args(["proactive", "--json", "--program", "redis,node"])
        .args(["--runs", "2", "--seconds", "2", "--rate", "50"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["experiment"], "proactive");
    let notes = report["notes"].as_array().expect("notes");
    let missing = notes.iter().filter_map(Value::as_str);
    let missing: Vec<_> = missing.filter(|note| note.contains("left out")).collect();
    missing.iter().for_each(|note| skip(note));
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len() + missing.len(), 2, "{report}");
    for row in rows {
        for figure in ["idle_memory", "loaded_memory", "cpu", "requests"] {
            let ratio = row[format!("{figure}_ratio")].as_f64().expect("a number");
            assert!(ratio > 0.0, "{figure}: {row}");
            let ratios = row[format!("{figure}_ratios")].as_array();
            assert_eq!(ratios.expect("samples").len(), 2, "{figure}: {row}");
        }
    }
}

#[test]
fn what_cannot_be_measured_is_one_line() {
    for (arguments, part) in [
        (["--program", "sort"], "unknown program \"sort\""),
        (["--seconds", "0"], "--seconds takes a number of at least 1"),
        (["--rate", "0"], "--rate must be at least 1"),
        (["--runs", "0"], "--runs must be at least 1"),
    ] {
        let output = lab().arg("proactive").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(125));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            error.lines().count() == 1 && error.contains(part),
            "{error}"
        );
    }
}
