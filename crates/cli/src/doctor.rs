//! `memfold doctor`, and the same checks before a run.

use crate::arguments::DoctorArguments;
use crate::describe::print;
use crate::failure::Failure;
use crate::run::{descriptors, runtime};
use memfold_sys::privilege;
use memfold_sys::probe::{self, Check, Verdict};
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;

/// A check as `--json` prints it.
#[derive(Debug, Serialize)]
struct Row<'a> {
    name: &'a str,
    verdict: &'static str,
    found: &'a str,
    remedy: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct Document<'a> {
    /// Whether `memfold run` works here.
    ok: bool,
    checks: Vec<Row<'a>>,
}

/// `memfold doctor [--json]`: exit status 0 when `run` will work, else 1.
pub fn doctor(arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    let mut checks = requirements();
    let ok = checks.iter().all(|check| check.verdict != Verdict::Missing);
    checks.extend(raised(probe::notes));
    let text = if arguments.json {
        json(ok, &checks)?
    } else {
        table(ok, &checks)
    };
    print(text.as_bytes())?;
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Refuses, with all gaps and what fixes them, where programs cannot be supervised.
pub fn check() -> Result<(), Failure> {
    let checks = requirements();
    let gap = |check: &&Check| check.verdict == Verdict::Missing;
    let gaps: Vec<String> = checks.iter().filter(gap).map(gap_text).collect();
    if gaps.is_empty() {
        return Ok(());
    }
    Err(Failure::own(format!(
        "this host does not let memfold run programs (see memfold doctor): {}",
        gaps.join("; ")
    )))
}

fn gap_text(check: &Check) -> String {
    let remedy = match &check.remedy {
        Some(remedy) => format!(". To fix it: {remedy}"),
        None => String::new(),
    };
    format!("{}: {}{remedy}", check.name, check.found)
}

fn requirements() -> Vec<Check> {
    let mut checks = raised(probe::requirements);
    checks.push(runtime::check());
    checks.push(descriptors::check());
    checks
}

/// The host is tried with the rights that a run has.
fn raised(probe: impl Fn() -> Vec<Check>) -> Vec<Check> {
    let _raised = privilege::raised();
    probe()
}

fn json(ok: bool, checks: &[Check]) -> Result<String, Failure> {
    let checks = checks
        .iter()
        .map(|check| Row {
            name: check.name,
            verdict: word(check.verdict),
            found: &check.found,
            remedy: check.remedy.as_deref(),
        })
        .collect();
    let mut text = serde_json::to_string_pretty(&Document { ok, checks })
        .map_err(|error| Failure::own(format!("cannot write JSON: {error}")))?;
    text.push('\n');
    Ok(text)
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ok => "ok",
        Verdict::Missing => "missing",
        Verdict::Note => "note",
    }
}

fn table(ok: bool, checks: &[Check]) -> String {
    let width = checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<7}  {:<width$}  {}",
            word(check.verdict),
            check.name,
            check.found
        );
        if let Some(remedy) = &check.remedy {
            let _ = writeln!(text, "{:<7}  {:<width$}  → {remedy}", "", "");
        }
    }
    text.push_str(if ok {
        "\nmemfold run works on this host.\n"
    } else {
        "\nmemfold run does not work here yet: fix what is missing (→).\n"
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_table_show_the_same() {
        let mut checks = requirements();
        checks.extend(probe::notes());
        let document: serde_json::Value =
            serde_json::from_str(&json(true, &checks).unwrap()).unwrap();
        let rows = document["checks"].as_array().unwrap();
        let table = table(true, &checks);
        assert_eq!(rows.len(), checks.len());
        for row in rows {
            let line = table
                .lines()
                .find(|line| line.contains(row["name"].as_str().unwrap()));
            let line = line.expect("every check has its line");
            assert!(line.starts_with(row["verdict"].as_str().unwrap()), "{line}");
            assert!(line.ends_with(row["found"].as_str().unwrap()), "{line}");
        }
    }
}
