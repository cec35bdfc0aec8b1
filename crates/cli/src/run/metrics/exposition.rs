//! The statistics as metrics: names, types and help, in OpenMetrics or Prometheus' older text format.
//!
//! `prometheus-client` encodes OpenMetrics. The older format differs in the metadata of counters alone.

use super::Source;
use crate::format::printable;
use crate::run::cpu_time::cpu_seconds;
use memfold_pager::{LatencyCounts, Now, Stats, Totals};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::sync::atomic::{AtomicU64, Ordering};

/// How metrics are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Format {
    /// The media type.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// What a statistic is as a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Grows only.
    Counter(&'static str),
    /// Goes up and down, or is a peak.
    Gauge(&'static str),
    /// As a gauge, in nanoseconds.
    Nanoseconds(&'static str),
    /// As a counter, in nanoseconds.
    NanosecondsSoFar(&'static str),
}

/// The metric of a statistic, by its name in JSON: without `memfold_`, and for counters `_total`.
fn kind(name: &'static str) -> Kind {
    match name {
        "bytes_stored" => Kind::Counter("stored_bytes"),
        "bytes_original" => Kind::Counter("original_bytes"),
        "longest_pause_ns" => Kind::Nanoseconds("longest_pause_seconds"),
        "over_limit_ns" => Kind::NanosecondsSoFar("over_limit_seconds"),
        "swap_in_wait_ns" => Kind::NanosecondsSoFar("swap_in_wait_seconds"),
        "first_touch_wait_ns" => Kind::NanosecondsSoFar("first_touch_wait_seconds"),
        "processes_now"
        | "over_limit_pages"
        | "peak_table_slots"
        | "peak_resident_bytes"
        | "peak_pool_bytes"
        | "peak_total_bytes"
        | "peak_file_bytes"
        | "peak_remote_bytes"
        | "peak_table_bytes"
        | "limit_bytes"
        | "resident_limit_bytes" => Kind::Gauge(name),
        // Those of `Now`.
        _ if name.ends_with("_bytes") => Kind::Gauge(name),
        _ => Kind::Counter(name),
    }
}

fn register(registry: &mut Registry, name: &'static str, help: &str, value: u64) {
    // The registry ends it with a full stop.
    let help: Vec<&str> = help.lines().map(str::trim).collect();
    let help = help.join(" ");
    let help = help.trim_end_matches('.');
    match kind(name) {
        Kind::Counter(name) => registry.register(name, help, ConstCounter::new(value)),
        Kind::Gauge(name) => registry.register(name, help, ConstGauge::new(value as i64)),
        Kind::Nanoseconds(name) => {
            registry.register(name, help, ConstGauge::new(value as f64 / 1e9));
        }
        Kind::NanosecondsSoFar(name) => {
            registry.register(name, help, ConstCounter::new(value as f64 / 1e9));
        }
    }
}

/// All numbers by their names in JSON, with their help.
fn numbers(stats: &Stats) -> Vec<(&'static str, &'static str, u64)> {
    let named = |value: serde_json::Value, fields: &'static [memfold_pager::StatsField]| {
        fields
            .iter()
            .map(move |field| {
                let number = value[field.name].as_u64().unwrap_or(0);
                (field.name, field.description, number)
            })
            .collect::<Vec<_>>()
    };
    let now = serde_json::to_value(stats.now).unwrap_or_default();
    let totals = serde_json::to_value(stats.totals).unwrap_or_default();
    let mut all = named(now, Now::FIELDS);
    all.extend(named(totals, Totals::FIELDS));
    all
}

fn registry(
    stats: &Stats,
    latency: &LatencyCounts,
    program: &str,
    seconds: [f64; 2],
    unmanaged: u64,
) -> Registry {
    let mut registry = Registry::with_prefix("memfold");
    let about = Info::new(vec![
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("program", program.to_owned()),
        ("pid", std::process::id().to_string()),
    ]);
    registry.register(
        "run",
        "The run: memfold's version and PID, the program",
        about,
    );
    for (name, help, value) in numbers(stats) {
        register(&mut registry, name, help, value);
    }
    for (name, help, bytes) in [
        (
            "exceeded_limit_bytes",
            "The limit that was exceeded the most, by more than is tolerated; 0 if every limit was kept",
            stats.exceeded_limit_bytes,
        ),
        (
            "exceeded_by_bytes",
            "By how much that limit was exceeded at most",
            stats.exceeded_by_bytes,
        ),
    ] {
        register(&mut registry, name, help, bytes);
    }
    let [cpu, uptime] = seconds;
    registry.register(
        "cpu_seconds",
        "CPU time of memfold's own process, user and system",
        ConstCounter::new(cpu),
    );
    registry.register(
        "uptime_seconds",
        "Time since the program's start",
        ConstGauge::new(uptime),
    );
    registry.register(
        "processes_unmanaged",
        "Programs seen that could not be put under the limit",
        ConstCounter::new(unmanaged),
    );
    registry.register(
        "faults_served",
        "Faults that the handlers served",
        ConstCounter::new(latency.total()),
    );
    let percentiles = Family::<[(&'static str, &'static str); 1], Gauge<f64, AtomicU64>>::default();
    for (label, percent) in [("50", 50), ("90", 90), ("99", 99)] {
        let value = latency.percentile(percent) as f64 / 1e9;
        percentiles
            .get_or_create(&[("percentile", label)])
            .set(value);
    }
    registry.register(
        "fault_latency_seconds",
        "Latency of fault service since the start of the run, by percentile",
        percentiles,
    );
    registry
}

/// The metrics of a run now.
pub fn expose(source: &Source, format: Format) -> String {
    let seconds = [cpu_seconds(), source.started.elapsed().as_secs_f64()];
    let registry = registry(
        &source.control.stats(),
        &source.control.latency(),
        &label(&source.program),
        seconds,
        source.unmanaged.load(Ordering::Relaxed),
    );
    written(&registry, format)
}

/// A program's name as a label: it may be anything, and the encoder need not escape it.
fn label(name: &str) -> String {
    let name = printable(name);
    let safe = name.chars().map(|c| match c {
        '"' | '\\' => '?',
        c => c,
    });
    safe.take(100).collect()
}

fn written(registry: &Registry, format: Format) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, registry);
    match format {
        Format::OpenMetrics => text,
        Format::Text => older(&text),
    }
}

/// The older format of the same metrics: a counter's metadata has the name of its sample, and there is
/// neither the type `info` nor the end mark.
fn older(text: &str) -> String {
    let types = text.lines().filter_map(|line| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        let (ending, kind) = match kind {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            kind => ("", kind),
        };
        Some((name, (ending, kind)))
    });
    let types: std::collections::HashMap<&str, (&str, &str)> = types.collect();
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let metadata = line
            .strip_prefix("# ")
            .and_then(|rest| rest.split_once(' '))
            .and_then(|(word, rest)| Some((word, rest.split_once(' ')?)));
        match metadata {
            Some((word @ ("HELP" | "TYPE"), (name, rest))) => {
                let (ending, kind) = types.get(name).copied().unwrap_or(("", "untyped"));
                let rest = if word == "TYPE" { kind } else { rest };
                out.push_str(&format!("# {word} {name}{ending} {rest}\n"));
            }
            _ if line.starts_with('#') => {}
            _ => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn exposed(format: Format) -> String {
        let mut stats = Stats::default();
        stats.totals.pages_out = 123;
        stats.totals.longest_pause_ns = 1_500_000_000;
        stats.now.resident_bytes = 5 << 20;
        stats.exceeded_by_bytes = 4096;
        let histogram = LatencyCounts::default();
        let program = label("ev\"il\\\n\u{1b}[2Jname");
        written(
            &registry(&stats, &histogram, &program, [1.5, 2.5], 3),
            format,
        )
    }

    #[test]
    fn every_statistic_is_a_metric_with_its_help() {
        for format in [Format::OpenMetrics, Format::Text] {
            let text = exposed(format);
            for field in Now::FIELDS.iter().chain(Totals::FIELDS) {
                let (name, sample) = match kind(field.name) {
                    Kind::Counter(name) | Kind::NanosecondsSoFar(name) => {
                        (name, format!("\nmemfold_{name}_total "))
                    }
                    Kind::Gauge(name) | Kind::Nanoseconds(name) => {
                        (name, format!("\nmemfold_{name} "))
                    }
                };
                assert!(text.contains(&sample), "{sample} in {text}");
                assert!(text.contains(&format!("# HELP memfold_{name}")), "{name}");
            }
            for line in [
                "memfold_pages_out_total 123\n",
                "memfold_longest_pause_seconds 1.5\n",
                "memfold_resident_bytes 5242880\n",
                "memfold_exceeded_by_bytes 4096\n",
                "memfold_processes_unmanaged_total 3\n",
                "program=\"ev?il? ?[2Jname\"",
            ] {
                assert!(text.contains(line), "{line} in {text}");
            }
        }
        assert!(exposed(Format::OpenMetrics).ends_with("# EOF\n"));
    }

    #[test]
    fn what_is_not_exported_is_documented_as_such() {
        let document = |name| {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/");
            std::fs::read_to_string(format!("{folder}{name}")).unwrap()
        };
        let (statistics, usage) = (document("statistics.md"), document("usage.md"));
        let section = usage.split("## Metrics").nth(1).unwrap();
        let section = section.split("\n## ").next().unwrap();
        let text = exposed(Format::Text);
        let names = statistics.lines().filter_map(|line| {
            let (name, _) = line.strip_prefix("| `")?.split_once('`')?;
            Some(name)
        });
        let mut checked = 0;
        for name in names {
            let is_exported = [
                format!("\nmemfold_{name} "),
                format!("\nmemfold_{name}_total "),
            ]
            .iter()
            .any(|sample| text.contains(sample));
            let is_named = section.contains(&format!("`{name}`"));
            assert!(is_exported != is_named, "{name}: {is_exported}, {is_named}");
            checked += 1;
        }
        assert!(checked > 50, "{checked} names were found");
    }

    /// Runs Prometheus' tool with this input; returns what it says if it refuses it.
    fn promtool(arguments: &[&str], input: &str) -> Option<Result<(), String>> {
        use std::io::Write;
        let mut child = match Command::new("promtool")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
        {
            Ok(child) => child,
            Err(error) => {
                memfold_testing::skip(&format!("promtool (Debian: prometheus): {error}"));
                return None;
            }
        };
        let mut to = child.stdin.take().unwrap();
        to.write_all(input.as_bytes()).unwrap();
        drop(to);
        let output = child.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        // What it criticises without refusing it, it says.
        let silent = !arguments.contains(&"check") || said.trim().is_empty();
        let accepted = output.status.success() && silent;
        Some(if accepted { Ok(()) } else { Err(said) })
    }

    #[test]
    fn prometheus_parses_the_text_format_and_finds_nothing_to_criticise() {
        let Some(checked) = promtool(&["check", "metrics"], &exposed(Format::Text)) else {
            return;
        };
        checked.unwrap();
        let broken = exposed(Format::Text).replace("# HELP memfold_pages_out_total", "# x");
        promtool(&["check", "metrics"], &broken)
            .unwrap()
            .unwrap_err();
    }

    /// `promtool` reads OpenMetrics where it imports samples, which must have times.
    #[test]
    fn prometheus_parses_openmetrics() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("metrics");
        let to = folder.path().join("blocks");
        let import = ["tsdb", "create-blocks-from", "openmetrics"];
        let arguments = [&import[..], &[file.to_str().unwrap(), to.to_str().unwrap()]].concat();
        let dated: String = exposed(Format::OpenMetrics)
            .lines()
            .map(|line| {
                let time = if line.starts_with('#') {
                    ""
                } else {
                    " 1700000000"
                };
                format!("{line}{time}\n")
            })
            .collect();
        std::fs::write(&file, &dated).unwrap();
        let Some(checked) = promtool(&arguments, "") else {
            return;
        };
        checked.unwrap();
        std::fs::write(&file, dated.replace("# EOF", "")).unwrap();
        promtool(&arguments, "").unwrap().unwrap_err();
    }

    #[test]
    fn the_dashboard_asks_for_metrics_that_there_are() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/grafana-dashboard.json"
        );
        let dashboard: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let text = exposed(Format::Text);
        let mut asked = 0;
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let expression = target["expr"].as_str().unwrap();
                let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                for name in words.filter(|word| word.starts_with("memfold_")) {
                    assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
                    asked += 1;
                }
            }
        }
        assert!(asked > 10, "{asked}");
    }
}
