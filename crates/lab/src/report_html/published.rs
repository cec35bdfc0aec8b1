//! The published figures, each beside the corresponding measurement on this host.

mod frees;

use serde_json::Value;

use super::source::Experiments;

/// A published figure and the corresponding measurement.
#[derive(Debug)]
pub struct Line {
    /// What was measured.
    pub what: String,
    /// The published figures, before and after.
    pub published: &'static str,
    /// The published gain; above 1 is better.
    pub published_gain: Option<f64>,
    /// Experiment and variants of the two figures measured here.
    pub here: String,
    /// The replaced design, here.
    pub before: Option<f64>,
    /// memfold's, here.
    pub after: Option<f64>,
    /// Unit of both.
    pub unit: &'static str,
    /// Whether a larger figure is better.
    pub more_is_better: bool,
}

/// The lines of one mailing-list thread.
#[derive(Debug)]
pub struct Thread {
    /// Its subject and date.
    pub title: &'static str,
    /// Its lines.
    pub lines: Vec<Line>,
}

impl Line {
    /// The gain measured here; above 1 is better.
    pub fn gain(&self) -> Option<f64> {
        let (before, after) = (self.before?, self.after?);
        let gain = if self.more_is_better {
            after / before
        } else {
            before / after
        };
        Some(gain).filter(|gain| gain.is_finite())
    }
}

/// All mailing-list threads.
pub fn threads(all: &Experiments) -> Vec<Thread> {
    vec![
        Thread {
            title: "zsmalloc: deferred and lock-free frees (April 2026)",
            lines: frees::lines(all),
        },
        Thread {
            title: "mm, swap: swap table as swap cache (August 2025)",
            lines: swap_table(all),
        },
        Thread {
            title: "Virtual swap space (April 2026)",
            lines: virtual_slots(all),
        },
        Thread {
            title: "zsmalloc: chain length by more than one metric (January 2026)",
            lines: chains(all),
        },
        Thread {
            title: "mm: batched asynchronous release of swap entries at exit (August 2024)",
            lines: exit(all),
        },
    ]
}

/// A line with medians of `kernel` under zram:lz4 and memfold.
fn against_zram(
    all: &Experiments,
    what: &str,
    published: (&'static str, Option<f64>),
    (workload, processes, metric): (&str, u64, &str),
    unit: &'static str,
) -> Line {
    let figure = |backend| all.kernel(backend, workload, processes, metric);
    let embedded = "memfold-embedded";
    let (ours, name) = match figure(embedded) {
        Some(_) => (embedded, "embedded"),
        None => ("memfold", "memfold run"),
    };
    // A workload's name has its size at scale 1, so print the actual size too.
    let wanted = [
        ("workload", workload.into()),
        ("processes", processes.into()),
    ];
    let megabytes = all.find("kernel", &wanted);
    let size = megabytes.map_or(String::new(), |row| format!(" ({} MB)", row["megabytes"]));
    Line {
        what: what.to_owned(),
        published: published.0,
        published_gain: published.1,
        here: format!("{workload} × {processes}{size}, {metric}: zram (lz4), {name}"),
        before: figure("zram:lz4"),
        after: figure(ours),
        unit,
        more_is_better: unit.ends_with("/s"),
    }
}

fn swap_table(all: &Experiments) -> Vec<Line> {
    let mut lines = swap_table_end_to_end(all);
    lines.extend(swap_table_operations(all));
    lines.extend(swap_table_usemem(all));
    lines.push(swap_table_memory(all));
    lines
}

/// A field of one variant of the experiment `table`.
fn of_table(
    all: &Experiments,
    variant: &str,
    wanted: &[(&str, Value)],
    field: &str,
) -> Option<f64> {
    let mut wanted = wanted.to_vec();
    wanted.push(("variant", variant.into()));
    all.number("table", &wanted, field)
}

fn swap_table_end_to_end(all: &Experiments) -> Vec<Line> {
    vec![
        against_zram(
            all,
            "usemem, 31 × 1 GB in 4 GB: throughput",
            ("4775 → 6381 MB/s", Some(1.336)),
            ("usemem", 4, "throughput_mib_per_s"),
            "MiB/s",
        ),
        against_zram(
            all,
            "the same: system time (CPU time here)",
            ("220.9 → 160.4 s", Some(1.377)),
            ("usemem", 4, "cpu_total_s"),
            "s",
        ),
        against_zram(
            all,
            "the same: time to free",
            ("174.5 → 132.1 ms", Some(1.32)),
            ("usemem", 4, "free_ms"),
            "ms",
        ),
        against_zram(
            all,
            "Redis GET with BGSAVE, pipelined",
            ("271 → 290 k/s", Some(1.07)),
            ("redis-get-bgsave", 1, "requests_pipelined_per_s"),
            "1/s",
        ),
        against_zram(
            all,
            "building under a limit: time (a Rust crate here)",
            ("814 → 793 s", Some(1.026)),
            ("build", 1, "rust_seconds"),
            "s",
        ),
    ]
}

fn swap_table_operations(all: &Experiments) -> Vec<Line> {
    let table =
        |variant: &str, wanted: &[(&str, Value)]| of_table(all, variant, wanted, "mops_per_s");
    let mut lines = Vec::new();
    let rivals = [
        ("tree-lock-free", "without a lock, as the kernel's"),
        ("tree", "under the lock of its tree"),
    ];
    for (tree, how) in rivals {
        for threads in [1_u64, 2] {
            let wanted = [("op", "look-up".into()), ("threads", threads.into())];
            lines.push(Line {
                what: format!("look-ups in the swap cache, {threads} at once; before: {how}"),
                published: "not published alone",
                published_gain: None,
                here: format!("table, look-up, {threads} threads: {tree}, swap-table"),
                before: table(tree, &wanted),
                after: table("swap-table", &wanted),
                unit: "M/s",
                more_is_better: true,
            });
        }
    }
    for op in ["insert", "delete"] {
        let wanted = [("op", op.into()), ("threads", 2_u64.into())];
        lines.push(Line {
            what: format!("the same: {op}, 2 at once"),
            published: "not published alone",
            published_gain: None,
            here: format!("table, {op}, 2 threads: tree-lock-free, swap-table"),
            before: table("tree-lock-free", &wanted),
            after: table("swap-table", &wanted),
            unit: "M/s",
            more_is_better: true,
        });
    }
    lines
}

fn swap_table_usemem(all: &Experiments) -> Vec<Line> {
    let table = |variant: &str, field: &str| {
        let wanted = [("op", "usemem".into()), ("threads", 2.into())];
        of_table(all, variant, &wanted, field)
    };
    let mut lines = Vec::new();
    for (what, figures, gain, field, unit) in [
        (
            "throughput",
            "+33.6 % (31 × 1 GB), +23.7 % (32 × 1.5 GB)",
            1.336,
            "mb_per_s",
            "MB/s",
        ),
        (
            "CPU time",
            "−27 %, −17 % (system time)",
            1.377,
            "cpu_seconds",
            "s",
        ),
        ("time to free", "−24 %, −5 %", 1.32, "free_ms", "ms"),
    ] {
        lines.push(Line {
            what: format!("usemem over the two designs alone, 2 threads: {what}"),
            published: figures,
            published_gain: Some(gain),
            here: "table, usemem, 2 threads: tree-lock-free, swap-table".to_owned(),
            before: table("tree-lock-free", field),
            after: table("swap-table", field),
            unit,
            more_is_better: unit.ends_with("/s"),
        });
    }
    lines
}

fn swap_table_memory(all: &Experiments) -> Line {
    let full = [("fill", "full".into())];
    let static_slot = all.kernel("zram:lz4", "memhog", 1, "bytes_per_slot_at_rest");
    Line {
        what: "memory per slot, full".to_owned(),
        published: "3 static + 8 → 8 bytes, none static",
        published_gain: Some(11.0 / 8.0),
        here: match static_slot {
            Some(bytes) => {
                format!("table: tree, swap-table (zram's own tables at rest: {bytes:.1})")
            }
            None => "table: tree, swap-table".to_owned(),
        },
        before: of_table(all, "tree", &full, "bytes_per_slot"),
        after: of_table(all, "swap-table", &full, "bytes_per_slot"),
        unit: "bytes",
        more_is_better: false,
    }
}

fn virtual_slots(all: &Experiments) -> Vec<Line> {
    let line = |workload: &str, variant: &str, what: &str, figures: &'static str, gain| {
        let wanted = [("variant", variant.into()), ("workload", workload.into())];
        let ratio = all.number("virtual", &wanted, "ratio_to_fixed");
        Line {
            what: format!("{workload}: {what}"),
            published: figures,
            published_gain: gain,
            here: format!("virtual: fixed, {variant}; 1.00× is no cost"),
            before: ratio.map(|_| 1.0),
            after: ratio,
            unit: "× time",
            more_is_better: false,
        }
    };
    let mut lines = Vec::new();
    for (workload, published) in [
        (
            "usemem",
            [
                ("+4.8 % time", 1.048),
                ("+2.4 % time", 1.024),
                ("+0.4 % time", 1.004),
            ],
        ),
        (
            "memhog",
            [
                ("+3.1 % time", 1.031),
                ("−0.8 % time", 0.992),
                ("−0.8 % time", 0.992),
            ],
        ),
    ] {
        let variants = [
            ("virtual-without-any", "virtual slots, no optimisation"),
            ("virtual-without-recent-cluster", "without recent clusters"),
            ("virtual", "all three optimisations"),
        ];
        for ((variant, what), (figure, time)) in variants.into_iter().zip(published) {
            lines.push(line(workload, variant, what, figure, Some(1.0 / time)));
        }
        lines.push(line(workload, "ours", "ours", "not there", None));
    }
    lines
}

fn chains(all: &Experiments) -> Vec<Line> {
    let whole = |variant: &str, field: &str| {
        let wanted = [("variant", variant.into()), ("class_size", Value::Null)];
        all.number("chain", &wanted, field)
    };
    let class = |variant: &str, size: u64| {
        let wanted = [("variant", variant.into()), ("class_size", size.into())];
        all.number("chain", &wanted, "spanning")
    };
    let line = |what: &str, published, gain, before, after, unit, more_is_better| Line {
        what: what.to_owned(),
        published,
        published_gain: gain,
        here: "chain: min-waste, ours".to_owned(),
        before,
        after,
        unit,
        more_is_better,
    };
    let both = |field: &str| (whole("min-waste", field), whole("ours", field));
    let (used, ours_used) = both("utilisation");
    let (spanning, ours_spanning) = both("spanning");
    let (copied, ours_copied) = both("bytes_copied");
    vec![
        line(
            "339,598 objects: utilisation",
            "97.3 → 96.8 %",
            Some(0.995),
            used,
            ours_used,
            "%",
            true,
        ),
        line(
            "the same: objects that span pages",
            "110,377 → 103,256",
            Some(1.069),
            spanning,
            ours_spanning,
            "",
            false,
        ),
        line(
            "the same: bytes copied to read them",
            "278.3 → 265.4 MB",
            Some(1.049),
            copied,
            ours_copied,
            "bytes",
            false,
        ),
        line(
            "class 368: spanning objects per zspage",
            "7 → 0",
            None,
            class("min-waste", 368),
            class("ours", 368),
            "",
            false,
        ),
        line(
            "class 640: spanning objects per zspage",
            "4 → 2",
            Some(2.0),
            class("min-waste", 640),
            class("ours", 640),
            "",
            false,
        ),
    ]
}

fn exit(all: &Experiments) -> Vec<Line> {
    let figure =
        |variant: &str, field: &str| all.number("exit", &[("variant", variant.into())], field);
    let line = |what: &str, published, gain, field: &str, before: &str| Line {
        what: what.to_owned(),
        published,
        published_gain: gain,
        here: format!("exit, {field}: {before}, gather"),
        before: figure(before, field),
        after: figure("gather", field),
        unit: "ms",
        more_is_better: false,
    };
    let unpublished = "not published";
    vec![
        line(
            "cold start of the next program (its preview there: 352 → 205 ms, 1.72×)",
            "1512 → 1204 ms",
            Some(1.26),
            "newcomer_ms",
            "sync",
        ),
        line(
            "the same; before: slots freed in bulk",
            unpublished,
            None,
            "newcomer_ms",
            "sync-bulk",
        ),
        line(
            "until the killed programs have exited",
            unpublished,
            None,
            "gone_ms",
            "sync-bulk",
        ),
        line(
            "until their memory is freed",
            unpublished,
            None,
            "returned_ms",
            "sync-bulk",
        ),
        line(
            "CPU time of all but the next program",
            unpublished,
            None,
            "cpu_ms",
            "sync-bulk",
        ),
        against_zram(
            all,
            "cold start while six programs exit (zram, memfold)",
            ("1512 → 1204 ms", Some(1.26)),
            ("exit", 6, "newcomer_ms"),
            "ms",
        ),
        against_zram(
            all,
            "until the six have exited",
            ("not published", None),
            ("exit", 6, "gone_ms"),
            "ms",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::{super::source::Experiment, *};
    use crate::kernel::{GROUPS, known};

    /// A `kernel` report with all its cases and metrics.
    fn all_of_kernel() -> Experiments {
        let mut rows = Vec::new();
        for case in known::cases(GROUPS, 1.0).unwrap() {
            for backend in ["zram:lz4", "memfold", "memfold-embedded"] {
                if !case.admits(&known::Backend::parse(backend).unwrap()) {
                    continue;
                }
                for metric in known::METRICS {
                    rows.push(json!({ "contestant": backend, "workload": case.workload,
                        "processes": case.processes, "metric": metric.name, "value": 2.0 }));
                }
            }
        }
        Experiments(vec![Experiment {
            name: "kernel".to_owned(),
            file: PathBuf::new(),
            json: json!({ "experiment": "kernel", "rows": rows }),
        }])
    }

    /// `tests/experiments/report.rs` checks the lines of the other experiments.
    #[test]
    fn every_line_about_kernel_names_an_existing_case_and_metric() {
        let all = all_of_kernel();
        let lines = threads(&all).into_iter().flat_map(|thread| thread.lines);
        let mut seen = 0;
        for line in lines.filter(|line| line.here.contains("zram (lz4)")) {
            assert_eq!(line.gain(), Some(1.0), "{line:?}");
            seen += 1;
        }
        assert!(seen > 10);
    }

    #[test]
    fn a_gain_is_above_one_if_memfold_is_better() {
        let json = json!({ "experiment": "kernel", "rows": [
            { "contestant": "zram:lz4", "workload": "munmap-64", "processes": 1,
              "metric": "munmap_ms", "value": 10.0 },
            { "contestant": "memfold", "workload": "munmap-64", "processes": 1,
              "metric": "munmap_ms", "value": 0.5 },
            { "contestant": "zram:lz4", "workload": "usemem", "processes": 4,
              "metric": "throughput_mib_per_s", "value": 100.0 },
            { "contestant": "memfold", "workload": "usemem", "processes": 4,
              "metric": "throughput_mib_per_s", "value": 50.0 },
        ] });
        let all = Experiments(vec![Experiment {
            name: "kernel".to_owned(),
            file: PathBuf::new(),
            json,
        }]);
        let lines: Vec<Line> = threads(&all)
            .into_iter()
            .flat_map(|thread| thread.lines)
            .collect();
        let gain = |what: &str| {
            let line = lines.iter().find(|line| line.what.contains(what));
            line.unwrap_or_else(|| panic!("no line about {what}"))
                .gain()
        };
        assert_eq!(gain("munmap of 64 MB"), Some(20.0));
        assert_eq!(gain("31 × 1 GB"), Some(0.5));
        assert_eq!(gain("BGSAVE"), None, "not measured, so no gain");
    }
}
