//! The names in the JSON that other programs may rely on.

use std::process::Output;

use serde_json::Value;

/// The rows of one JSON object, each of which has these names, `runs` and `spread`.
pub(crate) fn rows(output: &Output, experiment: &str, names: &[&str]) -> Vec<Value> {
    let error = String::from_utf8_lossy(&output.stderr);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{error}"));
    assert_eq!(json["experiment"], experiment);
    assert!(json["host"].is_string() && json["commit"].is_string());
    let rows = json["rows"].as_array().expect("rows").clone();
    assert!(!rows.is_empty(), "{json}");
    for (row, name) in rows.iter().flat_map(|row| {
        names
            .iter()
            .chain(&["runs", "spread"])
            .map(move |name| (row, name))
    }) {
        assert!(row.get(name).is_some(), "no {name} in {row}");
    }
    rows
}

#[test]
fn policy_has_a_row_for_each_policy() {
    let output = crate::lab()
        .args([
            "policy",
            "--json",
            "--trace",
            "cycle",
            "--policy",
            "fifo,two-lists",
        ])
        .args(["--share", "50"])
        .output()
        .unwrap();
    let names = [
        "trace",
        "policy",
        "knowledge",
        "resident_share",
        "misses",
        "ratio_to_optimum",
    ];
    let rows = rows(&output, "policy", &names);
    let policies: Vec<_> = rows
        .iter()
        .map(|row| row["policy"].as_str().unwrap())
        .collect();
    assert_eq!(policies, ["optimum", "fifo", "two-lists"]);
    assert_eq!(rows[0]["resident_share"], 0.5);
    assert!(rows[0]["misses"].as_u64() < rows[1]["misses"].as_u64());
}

#[test]
fn simulate_counts_its_failures() {
    let simulate = |words: &[&str]| {
        let mut lab = crate::lab();
        lab.args(["simulate", "--threads", "1"]).args(words);
        lab.output().unwrap()
    };
    let output = simulate(&["--json", "--minutes", "0.001"]);
    assert_eq!(output.status.code(), Some(0));
    let rows = rows(&output, "simulate", &["histories", "steps", "failures"]);
    assert_eq!(rows[0]["failures"], 0);
    assert!(rows[0]["steps"].as_u64() >= rows[0]["histories"].as_u64());
    let bug = ["--bug", "SettledTooLate", "--seed", "0"];
    let output = simulate(&[&["--json", "--minutes", "0.05"][..], &bug].concat());
    assert_eq!(output.status.code(), Some(1));
    let rows = self::rows(&output, "simulate", &["histories", "steps", "failures"]);
    assert_eq!(
        (&rows[0]["failures"], &rows[0]["failed_seed"]),
        (&1.into(), &0.into())
    );
    assert_eq!(rows[0]["histories"], 1);
    let output = simulate(&[&bug[..], &["--trace"]].concat());
    assert_eq!(output.status.code(), Some(1));
}
