//! The charts of a report.

use serde_json::Value;

use super::{
    chart::{Bar, Chart, Cluster},
    source::Experiments,
};

/// The backends, in the order of the bars.
const SHOWN: [&str; 6] = [
    "native",
    "zram:lz4",
    "zram:lzo-rle",
    "zswap",
    "memfold",
    "memfold-embedded",
];

/// The charts for which there are figures.
pub fn plots(all: &Experiments) -> Vec<Chart> {
    let mut charts = vec![
        Chart {
            file: "munmap-sizes",
            title: "munmap of swapped-out memory: wall time of the caller".to_owned(),
            axis: "ms (log)".to_owned(),
            clusters: [64, 128, 192, 256, 512]
                .into_iter()
                .filter_map(|size| kernel(all, &format!("munmap-{size}"), 1, None, "munmap_ms"))
                .collect(),
        },
        Chart {
            file: "munmap-processes",
            title: "munmap of 256 MB swapped out (scaled), by several processes at once".to_owned(),
            axis: "ms (log)".to_owned(),
            clusters: (1..=4)
                .filter_map(|processes| {
                    let mut cluster = kernel(all, "munmap-256", processes, None, "munmap_ms")?;
                    cluster.label = format!("{processes} at once");
                    Some(cluster)
                })
                .collect(),
        },
        swapping(
            all,
            "swap-speed",
            "Page-out and swap-in: throughput",
            "throughput_mib_per_s",
            "MiB/s (log)",
        ),
        swapping(
            all,
            "swap-latency",
            "Page-out and swap-in: p99 latency",
            "latency_p99_us",
            "µs (log)",
        ),
    ];
    let times = [
        ("cpython", "seconds"),
        ("node", "seconds"),
        ("numpy", "seconds"),
        ("build", "c_seconds"),
        ("build", "rust_seconds"),
        ("usemem", "seconds"),
        ("memhog", "seconds"),
        ("zipf", "seconds"),
    ];
    charts.push(Chart {
        file: "programs",
        title: "Programs in less memory than they need: wall time".to_owned(),
        axis: "s (log)".to_owned(),
        clusters: times
            .into_iter()
            .filter_map(|(workload, metric)| {
                let processes = if workload == "usemem" { 4 } else { 1 };
                let mut cluster = kernel(all, workload, processes, None, metric)?;
                cluster.label = match metric.strip_suffix("_seconds") {
                    Some(language) => format!("{workload} ({language})"),
                    None => workload.to_owned(),
                };
                Some(cluster)
            })
            .collect(),
    });
    charts.push(embedded(all));
    charts.push(redis(all));
    charts.push(frees(all));
    charts.push(growth(all));
    charts.retain(|chart| !chart.clusters.is_empty());
    charts
}

fn swapping(all: &Experiments, file: &'static str, title: &str, metric: &str, axis: &str) -> Chart {
    let mut clusters = Vec::new();
    for data in ["phrases", "recorded"] {
        for workload in ["page-out", "swap-in-sequential", "swap-in-random"] {
            if let Some(mut cluster) = kernel(all, workload, 1, Some(data), metric) {
                cluster.label = format!("{} ({data})", workload.replace("swap-in-", "in, "));
                clusters.push(cluster);
            }
        }
    }
    Chart {
        file,
        title: title.to_owned(),
        axis: axis.to_owned(),
        clusters,
    }
}

fn embedded(all: &Experiments) -> Chart {
    let cases = [
        "page-out",
        "swap-in-sequential",
        "swap-in-strided",
        "swap-in-random",
        "swap-in-sparse",
    ];
    let clusters = cases.into_iter().filter_map(|name| {
        let workload = format!("embedded-{name}");
        let mut cluster = kernel(all, &workload, 1, None, "throughput_mib_per_s")?;
        cluster.label = name.into();
        Some(cluster)
    });
    Chart {
        file: "embedded",
        title: "Explicit page-out by a program: the library, and MADV_PAGEOUT".to_owned(),
        axis: "MiB/s (log)".to_owned(),
        clusters: clusters.collect(),
    }
}

fn redis(all: &Experiments) -> Chart {
    let cases = [
        ("redis-get", "requests_per_s", "GET"),
        ("redis-get", "requests_settled_per_s", "GET, settled"),
        ("redis-get", "requests_pipelined_per_s", "GET, 16 in flight"),
        ("redis-get-bgsave", "requests_per_s", "GET, BGSAVE"),
        (
            "redis-get-bgsave",
            "requests_pipelined_per_s",
            "GET, BGSAVE, 16",
        ),
    ];
    let clusters = cases.into_iter().filter_map(|(workload, metric, label)| {
        let mut cluster = kernel(all, workload, 1, None, metric)?;
        cluster.label = label.into();
        Some(cluster)
    });
    Chart {
        file: "redis",
        title: "Redis with more than half of its keys swapped out".to_owned(),
        axis: "requests / s (log)".to_owned(),
        clusters: clusters.collect(),
    }
}

/// The variants of `free` in the chart.
pub const FREES: [&str; 5] = [
    "pool-lock",
    "outside-lock",
    "class-index",
    "deferred",
    "bulk",
];

fn frees(all: &Experiments) -> Chart {
    let mut clusters = Vec::new();
    for (field, label) in [
        ("caller_ns_per_free", "the caller"),
        ("cpu_ns_per_free", "all CPUs"),
    ] {
        for threads in [1_u64, 2, 4] {
            let bars = FREES.into_iter().filter_map(|variant| {
                let wanted = [
                    ("variant", variant.into()),
                    ("threads", threads.into()),
                    ("compactor", false.into()),
                    ("cpus", "idle".into()),
                ];
                let value = all.number("free", &wanted, field)?;
                Some(Bar {
                    name: variant.to_owned(),
                    value,
                    runs: Vec::new(),
                })
            });
            let bars: Vec<Bar> = bars.collect();
            if !bars.is_empty() {
                clusters.push(Cluster {
                    label: format!("{label}, {threads} threads"),
                    bars,
                });
            }
        }
    }
    Chart {
        file: "free",
        title: "Freeing compressed objects: pool lock, outside lock, class index, deferred, bulk"
            .to_owned(),
        axis: "ns per free (log)".to_owned(),
        clusters,
    }
}

fn growth(all: &Experiments) -> Chart {
    let clusters = all.rows("growth").filter_map(|row| {
        let bars = [
            ("wall", "wall_ratio", "wall_ratios"),
            ("cpu", "cpu_ratio", "cpu_ratios"),
        ];
        let bars = bars.into_iter().filter_map(|(name, ratio, ratios)| {
            let runs = row[ratios].as_array().into_iter().flatten();
            Some(Bar {
                name: name.to_owned(),
                value: row[ratio].as_f64()?,
                runs: runs.filter_map(Value::as_f64).collect(),
            })
        });
        let bars: Vec<Bar> = bars.collect();
        let label = format!("{}: wall, CPU", row["size"].as_str()?);
        let label = match row["grown"].as_str()? {
            "bytes" => label,
            grown => label.replacen(':', &format!(" {grown}:"), 1),
        };
        (!bars.is_empty()).then_some(Cluster { label, bars })
    });
    Chart {
        file: "growth",
        title: "Cost of a page over size".to_owned(),
        axis: "times the small case (log)".to_owned(),
        clusters: clusters.collect(),
    }
}

/// The bars of all backends for one workload.
fn kernel(
    all: &Experiments,
    workload: &str,
    processes: u64,
    data: Option<&str>,
    metric: &str,
) -> Option<Cluster> {
    let row = |backend: &str| {
        all.rows("kernel").find(|row| {
            row["contestant"] == backend
                && row["workload"] == workload
                && row["processes"] == processes
                && row["metric"] == metric
                && data.is_none_or(|data| row["data"] == data)
        })
    };
    let bars: Vec<Bar> = SHOWN
        .into_iter()
        .filter_map(|backend| {
            let row = row(backend)?;
            let runs = row["values"].as_array().into_iter().flatten();
            Some(Bar {
                name: backend.to_owned(),
                value: row["value"].as_f64().filter(|value| *value > 0.0)?,
                runs: runs
                    .filter_map(Value::as_f64)
                    .filter(|run| *run > 0.0)
                    .collect(),
            })
        })
        .collect();
    if bars.is_empty() {
        return None;
    }
    let megabytes = row(&bars[0].name)?["megabytes"].as_u64().unwrap_or(0);
    Some(Cluster {
        label: format!("{megabytes} MB"),
        bars,
    })
}
