//! The table of `docs/measurements.md`: real programs and single operations, in Markdown.

use std::{collections::BTreeSet, fmt::Write as _};

use serde_json::Value;

use super::{
    chart::short,
    page::{groups_of, times},
    source::Experiments,
};
use crate::kernel::find_metric;
use crate::report::Samples;

/// The backends in the order of the columns, and their column titles.
const COLUMNS: [(&str, &str); 4] = [
    ("native", "native"),
    ("zram:lz4", "zram"),
    ("zswap", "zswap"),
    ("memfold", "memfold"),
];

/// The rows: workload, metric, title. `{all}` and `{resident}` stand for sizes in MB.
const ROWS: &[(&str, &str, &str)] = &[
    (
        "cpython",
        "seconds",
        "CPython building and hashing {all} MB, {resident} MB resident",
    ),
    (
        "cpython",
        "peak_counted_mib",
        "the same: anonymous memory and pool at the peak",
    ),
    (
        "redis-get",
        "requests_per_s",
        "Redis GET over {all} MB, {resident} MB resident, no pipelining, just filled",
    ),
    (
        "redis-get",
        "requests_settled_per_s",
        "the same after twice as many requests",
    ),
    (
        "redis-get",
        "requests_pipelined_per_s",
        "the same in between, 16 requests pipelined",
    ),
    (
        "build",
        "c_seconds",
        "building the C library of zstd, {resident} MB resident",
    ),
    (
        "build",
        "rust_seconds",
        "building a Rust crate, {resident} MB resident",
    ),
    (
        "page-out",
        "throughput_mib_per_s",
        "writing {all} MB with {resident} MB resident",
    ),
    (
        "swap-in-sequential",
        "throughput_mib_per_s",
        "reading {all} MB that are swapped out, in order",
    ),
    (
        "swap-in-random",
        "throughput_mib_per_s",
        "the same, in random order",
    ),
    (
        "swap-in-random",
        "latency_p99_us",
        "the same: 99 % of the reads take at most",
    ),
    (
        "munmap-256",
        "munmap_ms",
        "`munmap` of {all} MB that are swapped out: the caller waits",
    ),
    (
        "munmap-256",
        "timed_cpu_ms",
        "the same: all CPU time until everything is freed",
    ),
    ("overhead-cpython", "seconds", "CPython far below the limit"),
    (
        "overhead-redis-get",
        "requests_pipelined_per_s",
        "Redis GET far below the limit, 16 requests pipelined",
    ),
    (
        "overhead-build",
        "c_seconds",
        "building the C library of zstd far below the limit",
    ),
];

/// The table, below a description of the host; `None` if no row was measured.
pub fn markdown(all: &Experiments) -> Option<String> {
    let rows = ROWS.iter().filter_map(|row| line(all, *row));
    let rows: Vec<String> = rows.collect();
    let kernel = all.0.iter().find(|one| one.name == "kernel")?;
    if rows.is_empty() {
        return None;
    }
    let fact = |name: &str| kernel.json[name].as_str().unwrap_or("unknown").to_owned();
    let mut text = format!(
        "Medians of alternated runs on {}; commit {}, scale {}.\n",
        fact("host"),
        fact("commit"),
        kernel.json["scale"]
    );
    text += "zram compresses with LZ4. The last columns are the ratio of memfold to zram (far below the \
             limit: to native; below 1\nmemfold is worse), with the smallest and largest ratio of a \
             round, and the number of rounds that both completed.\nThe pages of page-out, swap-in and \
             munmap compress like those recorded of real \
             programs (about 2.4:1 with LZ4).\n";
    let mut notes: Vec<&str> = Vec::new();
    for one in all.0.iter().filter(|one| one.name == "kernel") {
        notes.extend(
            one.notes()
                .filter(|note| !notes.contains(note))
                .collect::<Vec<_>>(),
        );
    }
    for note in notes {
        let _ = writeln!(text, "{note}.");
    }
    for (workload, backend, times) in killed(all) {
        let _ = writeln!(
            text,
            "Under {backend} the OOM killer killed {workload} {times} times although swap was free; \
             those runs were repeated."
        );
    }
    let names = COLUMNS.map(|(_, name)| name).join(" | ");
    let _ = writeln!(text, "\n| case | {names} | memfold is better by | runs |");
    let _ = writeln!(text, "|---|{}---|---|", "---:|".repeat(COLUMNS.len()));
    for row in rows {
        text += &row;
    }
    Some(text)
}

/// Workload, backend, and the number of OOM-killed runs.
fn killed(all: &Experiments) -> BTreeSet<(&str, &str, u64)> {
    all.rows("kernel")
        .filter_map(|row| {
            let times = row["killed"].as_u64().filter(|times| *times > 0)?;
            let workload = row["workload"].as_str()?;
            Some((workload, row["contestant"].as_str()?, times))
        })
        .collect()
}

/// One row, if it was measured.
fn line(all: &Experiments, (workload, metric, what): (&str, &str, &str)) -> Option<String> {
    // A full report has further cases, with several processes or other contents.
    let group = groups_of(all, |row| {
        row["workload"] == workload && row["processes"] == 1 && row["data"] != "phrases"
    });
    let rows = &group.first()?.rows;
    let of = |backend: &str| {
        let wanted = |row: &&Value| row["contestant"] == backend && row["metric"] == metric;
        rows.iter().copied().find(wanted)
    };
    let ours = of("memfold")?;
    let resident = ours["resident_megabytes"].to_string();
    let what = what
        .replace("{all}", &ours["megabytes"].to_string())
        .replace("{resident}", &resident);
    let cells = COLUMNS.map(|(backend, _)| of(backend).map_or("–".to_owned(), figure));
    let reference = if workload.starts_with("overhead-") {
        of("native")
    } else {
        of("zram:lz4")
    };
    let (better, runs) = match reference {
        Some(reference) => better(ours, reference, metric),
        None => ("–".to_owned(), ours["runs"].as_u64().unwrap_or(0) as usize),
    };
    let cells = cells.join(" | ");
    Some(format!("| {what} | {cells} | {better} | {runs} |\n"))
}

fn figure(row: &Value) -> String {
    let Some(value) = row["value"].as_f64() else {
        return "–".to_owned();
    };
    match row["unit"].as_str() {
        Some("1/s") => format!("{}/s", short(value)),
        Some("MiB/s") if value >= 10_240.0 => format!("{} GiB/s", short(value / 1024.0)),
        Some(unit) => format!("{} {unit}", short(value)),
        None => short(value),
    }
}

/// The ratio of the medians with the smallest and largest ratio of a round, and the number of
/// rounds that both completed.
fn better(ours: &Value, reference: &Value, metric: &str) -> (String, usize) {
    let samples = |row: &Value| {
        let mut samples = Samples::new();
        let values = row["values"].as_array().into_iter().flatten();
        values
            .filter_map(Value::as_f64)
            .for_each(|value| samples.push(value));
        samples
    };
    let (ours, reference) = (samples(ours), samples(reference));
    let metric = find_metric(metric).expect("ROWS names existing metrics");
    let (our_median, their_median) = ours.medians_beside(&reference);
    let ratio = metric.times_better(our_median, their_median);
    let pairs = ours.values().into_iter().zip(reference.values());
    let rounds: Vec<f64> = pairs
        .map(|(ours, theirs)| metric.times_better(ours, theirs))
        .collect();
    if !ratio.is_finite() {
        return ("–".to_owned(), rounds.len());
    }
    if rounds.len() < 2 {
        return (times(ratio), rounds.len());
    }
    let least = rounds.iter().copied().fold(f64::INFINITY, f64::min);
    let most = rounds.iter().copied().fold(0.0, f64::max);
    let text = format!("{} ({} to {})", times(ratio), bare(least), bare(most));
    (text, rounds.len())
}

fn bare(ratio: f64) -> String {
    times(ratio).trim_end_matches('×').to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::{super::source::Experiment, *};
    use crate::kernel::{known, workload_names};

    fn kernel(rows: Vec<Value>) -> Experiments {
        Experiments(vec![Experiment {
            name: "kernel".to_owned(),
            file: PathBuf::new(),
            json: json!({ "experiment": "kernel", "host": "a host", "commit": "abc", "scale": 1.0,
                "notes": ["zswap compresses with lzo here"], "rows": rows }),
        }])
    }

    #[test]
    fn every_row_names_an_existing_case_and_metric() {
        let mut rows = Vec::new();
        let cases = known::cases(&workload_names(&["summary"]), 1.0).unwrap();
        for case in &cases {
            for backend in ["native", "memfold"] {
                for metric in known::METRICS {
                    rows.push(json!({ "contestant": backend, "workload": case.workload,
                        "processes": case.processes, "data": case.data, "megabytes": case.megabytes,
                        "metric": metric.name, "value": 2.0, "unit": metric.unit, "runs": 1 }));
                }
            }
        }
        let table = markdown(&kernel(rows)).unwrap();
        let lines = table.lines().filter(|line| line.starts_with("| "));
        assert_eq!(lines.count(), 1 + ROWS.len());
        assert!(markdown(&kernel(Vec::new())).is_none());
    }

    #[test]
    fn rows_in_which_memfold_is_worse_are_kept() {
        let row = |backend: &str, value: f64, values: &[f64]| {
            json!({ "contestant": backend, "workload": "cpython", "processes": 1,
                "data": null, "megabytes": 178, "resident_megabytes": 30, "metric": "seconds",
                "killed": if backend == "memfold" { 0 } else { 7 },
                "value": value, "unit": "s", "runs": values.len(), "values": values })
        };
        // zram completed only two rounds.
        let rows = vec![
            row("zram:lz4", 4.0, &[3.9, 4.1]),
            row("memfold", 5.2, &[5.2, 4.8, 7.0]),
        ];
        let table = markdown(&kernel(rows)).unwrap();
        let wanted = "| CPython building and hashing 178 MB, 30 MB resident | – | 4.00 s | – \
                      | 5.20 s | 0.80× (0.75 to 0.85) | 2 |";
        assert!(table.contains(wanted), "{table}");
        assert!(
            table.contains("commit abc") && table.contains("with lzo here."),
            "{table}"
        );
        let killed = "Under zram:lz4 the OOM killer killed cpython 7 times";
        assert_eq!(table.matches(killed).count(), 1, "{table}");
        assert_eq!(table.matches("the OOM killer killed").count(), 1, "{table}");
    }
}
