//! Real and synthetic workloads under memfold, zram and zswap, alternated.

mod backend;
mod build;
mod case;
mod measure;
mod metric;
mod programs;
mod progress;
pub mod redis;
mod scale;
mod speedups;
mod workload;

pub use backend::find_memfold;
pub use case::{GROUPS, names as workload_names};
pub use measure::start_to_end_with_us;
pub use metric::find as find_metric;
pub use programs::{find as find_program, real_python};
pub use progress::Progress;
pub use scale::Scale;
pub use workload::{WORKLOAD, WORKLOAD_OPTIONS, main as run_workload};

use std::{collections::BTreeMap, path::PathBuf, sync::OnceLock};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use self::{
    backend::{Allowance, Backend, Environment, Session},
    case::{Case, Job},
    metric::METRICS,
    speedups::{Speedups, comparison},
    workload::{Figures, WORKLOAD as SUBCOMMAND, Wrong},
};
use crate::{
    Options,
    host::Guardian,
    report::{Report, Row, Samples, rounded},
};

/// The options of `memfold-lab kernel`.
pub const OPTIONS: &[&str] = &[
    "against", "workload", "scale", "runs", "memfold", "python", "swap-dir",
];
/// The default of `--against`.
const AGAINST: &str = "native,zram:lz4,zram:lzo-rle,zswap,memfold,memfold-embedded";
/// The default of `--against` with `--equal-total`: how fast a program is in as many bytes, the pool included.
const AGAINST_IN_TOTAL: &str = "native,zram:lz4,memfold,memfold-total";
/// Consecutive OOM kills after which a backend is given up, before its first completed run. (The
/// OOM killer occasionally kills a program in a small cgroup although swap is free. Such a run is
/// counted and repeated.) A larger value retries longer.
const KILLS_ALLOWED: usize = 15;
/// The same after the first completed run. Larger, as runs of the same round are compared, and only
/// the last rounds may lack a backend.
const KILLS_ALLOWED_LATER: usize = 20;

/// A completed run, and the number of OOM-killed runs before it.
struct Run {
    figures: Figures,
    killed_before: usize,
    /// What it might take in total, in MiB, where that was given.
    total: Option<f64>,
    /// Notes for the report.
    remarks: Vec<String>,
}

/// State shared by all cases.
struct Suite {
    environment: Environment,
    scale: f64,
    python: Option<String>,
    sources: Option<build::Sources>,
    /// Output of the first run, by workload; later runs must match.
    expected: BTreeMap<String, String>,
}

/// Runs every case under every backend, alternated, round after round.
pub fn run(options: &Options) -> Result<Report> {
    let (against, every) = if options.has("equal-total") {
        let programs: Vec<&str> = programs::names().chain(["redis-get", "build"]).collect();
        (AGAINST_IN_TOTAL, programs.join(","))
    } else {
        (AGAINST, GROUPS.join(","))
    };
    let backends = options
        .list("against", against)
        .into_iter()
        .map(Backend::parse)
        .collect::<Result<Vec<_>>>()?;
    let scale = scale(options)?;
    let names = case::names(&options.list("workload", &every));
    let cases = case::cases(&names, scale)?;
    let rounds = options.number("runs", 5)?;
    ensure!(rounds > 0, "--runs takes at least 1");
    let mut suite = Suite::new(&backends, scale, options)?;
    let mut report = Report::new("kernel");
    report.fact("scale", scale);
    report.fact("host_facts", crate::host::Facts::now());
    let cases = suite.runnable(cases, &mut report);
    let runs = cases.iter().map(|case| {
        backends
            .iter()
            .filter(|backend| case.admits(backend))
            .count()
            * rounds
    });
    let progress = Progress::new(runs.sum());
    let mut speedups = Speedups::default();
    for case in &cases {
        let results = suite.alternate(case, &backends, rounds, &progress, &mut report)?;
        add_rows(case, &results, &mut report);
        speedups.add(case, &results);
    }
    speedups.add_to(&mut report, options.has("equal-total"));
    progress.finish();
    Ok(report)
}

/// Parses `--scale`; 1 is the published sizes.
pub fn scale(options: &Options) -> Result<f64> {
    let scale = options.value("scale").unwrap_or("1");
    let parsed = scale.parse().ok();
    parsed
        .filter(|scale: &f64| scale.is_finite() && *scale > 0.0)
        .with_context(|| format!("--scale takes a number above 0, not {scale:?}"))
}

impl Suite {
    fn new(backends: &[Backend], scale: f64, options: &Options) -> Result<Self> {
        let any = |wanted: fn(&Backend) -> bool| backends.iter().any(wanted);
        let guardian = any(Backend::is_kernel).then(Guardian::start).transpose()?;
        let memfold = if any(Backend::is_memfold) {
            find_memfold(options.value("memfold"))?
        } else {
            PathBuf::new()
        };
        Ok(Self {
            environment: Environment {
                guardian,
                memfold,
                swap_folder: PathBuf::from(options.value("swap-dir").unwrap_or("/var/tmp")),
                at_rest: OnceLock::new(),
            },
            scale,
            python: options.value("python").map(str::to_owned),
            sources: None,
            expected: BTreeMap::new(),
        })
    }

    /// The cases that can run on this host. The others are skipped with a note.
    fn runnable(&mut self, cases: Vec<Case>, report: &mut Report) -> Vec<Case> {
        let mut runnable = Vec::new();
        for case in cases {
            match self.missing(&case) {
                None => runnable.push(case),
                Some(why) => {
                    eprintln!("memfold-lab: SKIPPED {}: {why}", case.workload);
                    report.note(format!("SKIPPED {}: {why}", case.workload));
                }
            }
        }
        runnable
    }

    fn missing(&mut self, case: &Case) -> Option<String> {
        match &case.job {
            Job::Synthetic { .. } => None,
            Job::Program(program) => program.missing(self.python.as_deref()),
            Job::Redis(_) => redis::Load::missing(),
            Job::Build(project) => {
                let missing = project.missing();
                if missing.is_some() || self.sources.is_some() {
                    return missing;
                }
                match build::Sources::fetch(self.scale) {
                    Ok(sources) => {
                        self.sources = Some(sources);
                        None
                    }
                    Err(error) => Some(format!("{error:#}")),
                }
            }
        }
    }

    fn alternate<'c>(
        &mut self,
        case: &Case,
        backends: &'c [Backend],
        rounds: usize,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<Vec<(&'c Backend, Vec<Run>)>> {
        let mut results: Vec<(&Backend, Vec<Run>)> = backends
            .iter()
            .filter(|backend| case.admits(backend))
            .map(|backend| (backend, Vec::new()))
            .collect();
        // Of the kernel's last run: what the program's anonymous memory and its zram took together at
        // the most, in MiB.
        let mut total = None;
        let mut given_up: Vec<String> = Vec::new();
        for round in 1..=rounds {
            for (backend, runs) in &mut results {
                if given_up.contains(&backend.to_string()) {
                    continue;
                }
                let kills_allowed = if runs.is_empty() {
                    KILLS_ALLOWED
                } else {
                    KILLS_ALLOWED_LATER
                };
                let allowance = match (*backend, total) {
                    (Backend::MemfoldTotal, Some(total)) => Allowance::Total(total),
                    (Backend::MemfoldTotal, None) => {
                        progress.skip(rounds - round + 1);
                        given_up.push(backend.to_string());
                        report.note(format!(
                            "SKIPPED memfold-total, {}: no run under zram:lz4 came before it",
                            case.workload
                        ));
                        continue;
                    }
                    _ => case.allowance,
                };
                let run = self
                    .run_once(case, (backend, allowance), kills_allowed)
                    .with_context(|| format!("{} under {backend}", case.workload))?;
                match run {
                    Some(run) => {
                        progress.done(case, backend, round, rounds, &run.figures);
                        if backend.is_reference() {
                            total = run.figures.get("peak_counted_mib");
                        }
                        runs.push(run);
                    }
                    None => {
                        progress.skip(rounds - round + 1);
                        given_up.push(backend.to_string());
                        report.note(format!(
                            "GIVEN UP {}, {} MB, in round {round}: under {backend} the OOM killer \
                             killed it {kills_allowed} times in a row although swap was free",
                            case.workload, case.megabytes
                        ));
                    }
                }
            }
        }
        Ok(results)
    }

    /// Repeats a run until it completes; `None` after `kills_allowed` OOM kills in a row.
    fn run_once(
        &mut self,
        case: &Case,
        (backend, allowance): (&Backend, Allowance),
        kills_allowed: usize,
    ) -> Result<Option<Run>> {
        for killed_before in 0..kills_allowed {
            let bytes = case.swap_bytes();
            let session = Session::start(backend, allowance, bytes, &self.environment)?;
            match self.run_in(case, backend, &session) {
                Ok(mut figures) => {
                    // The OOM killer chose a child and the parent went on: not a complete run.
                    if session.was_killed()? {
                        continue;
                    }
                    figures.0.extend(session.costs()?.0);
                    // Backends evict in different ways, which is not what is measured: only the
                    // cost of the timed part is comparable.
                    if matches!(case.job, Job::Synthetic { evicts: true, .. }) {
                        let whole =
                            |name: &str| name.starts_with("cpu_") || name.starts_with("peak_");
                        figures.0.retain(|(name, _)| !whole(name));
                    }
                    return Ok(Some(Run {
                        figures,
                        killed_before,
                        total: match allowance {
                            Allowance::Total(mebibytes) => Some(mebibytes),
                            Allowance::Resident(_) | Allowance::Ample => None,
                        },
                        remarks: session.remark().into_iter().collect(),
                    }));
                }
                // A program whose part was killed may go on, and print something else.
                Err(_) if session.was_killed()? => {}
                Err(error) => return Err(error),
            }
            eprintln!(
                "memfold-lab: {} under {backend}: OOM-killed, will repeat",
                case.workload
            );
        }
        Ok(None)
    }

    fn run_in(&mut self, case: &Case, backend: &Backend, session: &Session) -> Result<Figures> {
        match &case.job {
            Job::Synthetic { .. } => synthetic(case, backend, session),
            Job::Redis(load) => load.run(session),
            Job::Program(program) => {
                let (figures, output) = program.run(session, self.python.as_deref())?;
                self.compare(case, output)?;
                Ok(figures)
            }
            Job::Build(project) => {
                let sources = self
                    .sources
                    .as_ref()
                    .context("the sources of build were not fetched")?;
                let (figures, output) = project.run(session, sources)?;
                self.compare(case, output)?;
                Ok(figures)
            }
        }
    }

    /// Fails if a run's output differs from the first run's.
    fn compare(&mut self, case: &Case, output: String) -> Result<()> {
        let expected = self
            .expected
            .entry(case.workload.clone())
            .or_insert_with(|| output.clone());
        if *expected != output {
            bail!(Wrong(format!("output {output:?}, expected {expected:?}")));
        }
        Ok(())
    }
}

fn synthetic(case: &Case, backend: &Backend, session: &Session) -> Result<Figures> {
    let Job::Synthetic {
        name,
        arguments,
        evicts,
    } = &case.job
    else {
        bail!("{} is not a synthetic workload", case.workload);
    };
    let mut words = vec![SUBCOMMAND.to_owned(), (*name).to_owned()];
    let mut add = |option: &str, value: String| words.extend([format!("--{option}"), value]);
    add("megabytes", case.megabytes.to_string());
    add("processes", case.processes.to_string());
    if let Some(data) = case.data {
        add("data", data.to_owned());
    }
    if case.is_embedded() {
        let memory = if backend.is_kernel() {
            "kernel"
        } else {
            "memfold"
        };
        add("memory", memory.to_owned());
    } else if *evicts {
        add("evict", backend.eviction().to_owned());
        if let Allowance::Resident(megabytes) = case.allowance {
            add("limit-megabytes", megabytes.to_string());
        }
    }
    words.extend(arguments.iter().cloned());
    let program = std::env::current_exe()?.into_os_string();
    let ended = measure::run(session.command(&program, &words)?, |stop| {
        session.watch(stop);
    })?;
    let mut figures = Figures::from_output(&ended.output)?;
    figures.0.extend(ended.figures.0);
    Ok(figures)
}

fn samples(runs: &[Run], name: &str) -> Samples {
    let mut samples = Samples::default();
    for value in runs.iter().filter_map(|run| run.figures.get(name)) {
        samples.push(value);
    }
    samples
}

/// Adds one row per backend and metric.
fn add_rows(case: &Case, results: &[(&Backend, Vec<Run>)], report: &mut Report) {
    let reference = results.iter().find(|(backend, _)| backend.is_reference());
    for metric in METRICS {
        for (backend, runs) in results {
            let measured = samples(runs, metric.name);
            if measured.is_empty() {
                continue;
            }
            let ratio = reference
                .map(|(_, runs)| samples(runs, metric.name))
                .filter(|samples| !samples.is_empty())
                .map(|samples| {
                    let (ours, theirs) = measured.medians_beside(&samples);
                    rounded(metric.times_better(ours, theirs))
                })
                .filter(|ratio| ratio.is_finite());
            let resident = match case.allowance {
                Allowance::Resident(megabytes)
                    if !matches!(backend, Backend::Native | Backend::MemfoldTotal) =>
                {
                    Some(megabytes)
                }
                _ => None,
            };
            let in_total = **backend == Backend::MemfoldTotal;
            let totals = runs.iter().filter_map(|run| run.total);
            let totals = totals.collect::<Samples>();
            let killed: usize = runs.iter().map(|run| run.killed_before).sum();
            let row = Row::new()
                .with("contestant", backend.to_string())
                .with("workload", case.workload.clone())
                .with("megabytes", case.megabytes)
                .with("processes", case.processes)
                .with("data", case.data)
                .with("resident_megabytes", resident)
                .with(
                    "total_megabytes",
                    Some(totals.median())
                        .filter(|total| total.is_finite())
                        .map(rounded),
                )
                .with(
                    "comparison",
                    (in_total || resident.is_some()).then(|| comparison(in_total)),
                )
                .with("metric", metric.name)
                .measured("value", &measured)
                .with("unit", metric.unit)
                .with("ratio_to_zram", ratio)
                .with("runs", runs.len())
                .with(
                    "spread",
                    Some(measured.spread()).filter(|spread| spread.is_finite()),
                )
                .with("killed", killed)
                .with("values", measured.values());
            report.add(row);
        }
    }
    for remark in results
        .iter()
        .flat_map(|(_, runs)| runs)
        .flat_map(|run| run.remarks.clone())
    {
        report.note_once(remark);
    }
    for (backend, runs) in results {
        if let Some(remark) = redis::remark(&samples(runs, "save_share")) {
            report.note(format!("{}, {backend}: {remark}", case.workload));
        }
    }
}

/// Whether a row is a resource cost, rather than latency or throughput.
pub fn is_cost(row: &Value) -> bool {
    let name = row["metric"].as_str().unwrap_or_default();
    find_metric(name).is_some_and(|metric| metric.cost)
}

/// Cases, backends and metrics, for tests that look them up in reports.
#[cfg(test)]
pub mod known {
    pub use super::{backend::Backend, case::cases, metric::METRICS};
}
