//! Real and synthetic workloads under memfold and under this host's own swap, in turn.

mod build;
mod case;
mod contestant;
mod measure;
mod metric;
mod programs;
mod progress;
pub mod redis;
mod scale;
mod workload;

pub use case::{GROUPS, names as workload_names};
pub use contestant::find_memfold;
pub use measure::start_to_end_with_us;
pub use metric::find as find_metric;
pub use programs::{find as find_program, real_python};
pub use progress::Progress;
pub use workload::{WORKLOAD, WORKLOAD_OPTIONS, main as run_workload};

use std::{collections::BTreeMap, path::PathBuf, sync::OnceLock};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use self::{
    case::{Case, Job},
    contestant::{Allowance, Contestant, Session, Setting},
    metric::METRICS,
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
const AGAINST: &str = "native,zram:lz4,zram:lzo-rle,zswap,memfold,memfold-embedded";
/// The kernel now and then kills a program in a cgroup that is small against it, although swap is
/// free. Such a run is counted and repeated, but not for ever: so often in a row before the first that
/// ends well.
const KILLS_ALLOWED: usize = 5;
/// So often in a row after it. (Only the last rounds may lack a contestant, as the runs of a round are
/// compared.)
const KILLS_ALLOWED_LATER: usize = 20;

/// One run's figures, and how many runs before it the kernel killed.
struct Run {
    figures: Figures,
    killed_before: usize,
    remark: Option<String>,
}

/// What all cases share.
struct Suite {
    setting: Setting,
    scale: f64,
    python: Option<String>,
    sources: Option<build::Sources>,
    /// What programs print without a limit, by workload.
    expected: BTreeMap<String, String>,
}

/// Runs every case with every contestant, in turn, round after round.
pub fn run(options: &Options) -> Result<Report> {
    let contestants = options
        .list("against", AGAINST)
        .into_iter()
        .map(Contestant::parse)
        .collect::<Result<Vec<_>>>()?;
    let scale = scale(options)?;
    let every = GROUPS.join(",");
    let names = case::names(&options.list("workload", &every));
    let cases = case::cases(&names, scale)?;
    let rounds = options.number("runs", 5)?;
    ensure!(rounds > 0, "--runs is at least 1");
    let mut suite = Suite::new(&contestants, scale, options)?;
    let mut report = Report::new("kernel");
    report.fact("scale", scale);
    report.fact("host_facts", crate::host::Facts::now());
    let cases = suite.runnable(cases, &mut report);
    let runs = cases.iter().map(|case| {
        contestants
            .iter()
            .filter(|contestant| case.admits(contestant))
            .count()
            * rounds
    });
    let progress = Progress::new(runs.sum());
    for case in &cases {
        let results = suite.alternate(case, &contestants, rounds, &progress, &mut report)?;
        add_rows(case, &results, &mut report);
    }
    progress.finish();
    Ok(report)
}

/// How large everything is; 1 is the published sizes.
pub fn scale(options: &Options) -> Result<f64> {
    let scale = options.value("scale").unwrap_or("1");
    let parsed = scale.parse().ok();
    parsed
        .filter(|scale: &f64| scale.is_finite() && *scale > 0.0)
        .with_context(|| format!("--scale takes a number above 0, not {scale:?}"))
}

impl Suite {
    fn new(contestants: &[Contestant], scale: f64, options: &Options) -> Result<Self> {
        let any = |wanted: fn(&Contestant) -> bool| contestants.iter().any(wanted);
        let guardian = any(Contestant::is_kernel)
            .then(Guardian::start)
            .transpose()?;
        let memfold = if any(|one| *one == Contestant::Memfold) {
            find_memfold(options.value("memfold"))?
        } else {
            PathBuf::new()
        };
        Ok(Self {
            setting: Setting {
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

    /// The cases that can run here; what the others lack is said aloud and in the report.
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
        contestants: &'c [Contestant],
        rounds: usize,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<Vec<(&'c Contestant, Vec<Run>)>> {
        let mut results: Vec<(&Contestant, Vec<Run>)> = contestants
            .iter()
            .filter(|contestant| case.admits(contestant))
            .map(|contestant| (contestant, Vec::new()))
            .collect();
        let mut given_up: Vec<String> = Vec::new();
        for round in 1..=rounds {
            for (contestant, runs) in &mut results {
                if given_up.contains(&contestant.to_string()) {
                    continue;
                }
                let kills_allowed = match runs.is_empty() {
                    true => KILLS_ALLOWED,
                    false => KILLS_ALLOWED_LATER,
                };
                let run = self
                    .run_once(case, contestant, kills_allowed)
                    .with_context(|| format!("{} under {contestant}", case.workload))?;
                match run {
                    Some(run) => {
                        progress.done(case, contestant, round, rounds, &run.figures);
                        runs.push(run);
                    }
                    None => {
                        progress.left_out(rounds - round + 1);
                        given_up.push(contestant.to_string());
                        report.note(format!(
                            "GIVEN UP {}, {} MB, in round {round}: under {contestant} the kernel killed \
                             it {kills_allowed} times in a row for want of memory, although swap was free",
                            case.workload, case.megabytes
                        ));
                    }
                }
            }
        }
        Ok(results)
    }

    /// One run that counts; none if the kernel killed each of several.
    fn run_once(
        &mut self,
        case: &Case,
        contestant: &Contestant,
        kills_allowed: usize,
    ) -> Result<Option<Run>> {
        for killed_before in 0..kills_allowed {
            let bytes = case.swap_bytes();
            let session = Session::start(contestant, case.allowance, bytes, &self.setting)?;
            match self.run_in(case, contestant, &session) {
                Ok(mut figures) => {
                    // A process whose parent outlived the kernel's choice: not a whole run either.
                    if session.was_killed()? {
                        continue;
                    }
                    figures.0.extend(session.costs()?.0);
                    // Getting the memory out differs between contestants, and is not what was
                    // asked: only the timed part's cost is comparable.
                    if matches!(case.job, Job::Synthetic { evicts: true, .. }) {
                        let whole =
                            |name: &str| name.starts_with("cpu_") || name.starts_with("peak_");
                        figures.0.retain(|(name, _)| !whole(name));
                    }
                    return Ok(Some(Run {
                        figures,
                        killed_before,
                        remark: session.remark(),
                    }));
                }
                Err(error) if !error.is::<Wrong>() && session.was_killed()? => {}
                Err(error) => return Err(error),
            }
            eprintln!(
                "memfold-lab: {} under {contestant}: killed by the kernel",
                case.workload
            );
        }
        Ok(None)
    }

    fn run_in(
        &mut self,
        case: &Case,
        contestant: &Contestant,
        session: &Session,
    ) -> Result<Figures> {
        match &case.job {
            Job::Synthetic { .. } => synthetic(case, contestant, session),
            Job::Redis(load) => load.run(session),
            Job::Program(program) => {
                let (figures, output) = program.run(session, self.python.as_deref())?;
                self.compare(case, output)?;
                Ok(figures)
            }
            Job::Build(project) => {
                let sources = self.sources.as_ref().context("nothing was fetched")?;
                let (figures, output) = project.run(session, sources)?;
                self.compare(case, output)?;
                Ok(figures)
            }
        }
    }

    /// Every run of a program must come to the first run's result.
    fn compare(&mut self, case: &Case, output: String) -> Result<()> {
        let expected = self
            .expected
            .entry(case.workload.clone())
            .or_insert_with(|| output.clone());
        if *expected != output {
            bail!(Wrong(format!("{output:?}, but before {expected:?}")));
        }
        Ok(())
    }
}

fn synthetic(case: &Case, contestant: &Contestant, session: &Session) -> Result<Figures> {
    let Job::Synthetic {
        name,
        arguments,
        evicts,
    } = &case.job
    else {
        bail!("{} is not synthetic", case.workload);
    };
    let mut words = vec![SUBCOMMAND.to_owned(), (*name).to_owned()];
    let mut add = |option: &str, value: String| words.extend([format!("--{option}"), value]);
    add("megabytes", case.megabytes.to_string());
    add("processes", case.processes.to_string());
    if let Some(data) = case.data {
        add("data", data.to_owned());
    }
    if case.is_embedded() {
        let memory = if contestant.is_kernel() {
            "kernel"
        } else {
            "memfold"
        };
        add("memory", memory.to_owned());
    } else if *evicts {
        add("evict", contestant.eviction().to_owned());
        if let Allowance::Resident(megabytes) = case.allowance {
            add("limit-megabytes", megabytes.to_string());
        }
    }
    words.extend(arguments.iter().cloned());
    let program = std::env::current_exe()?.into_os_string();
    let ended = measure::run(session.command(&program, &words)?, |stop| {
        session.watch(stop)
    })?;
    let mut figures = Figures::from_output(&ended.output)?;
    figures.0.extend(ended.figures.0);
    Ok(figures)
}

/// One row for each contestant and metric.
fn add_rows(case: &Case, results: &[(&Contestant, Vec<Run>)], report: &mut Report) {
    let samples = |runs: &[Run], name: &str| {
        let mut samples = Samples::default();
        for value in runs.iter().filter_map(|run| run.figures.get(name)) {
            samples.push(value);
        }
        samples
    };
    let reference = results
        .iter()
        .find(|(contestant, _)| contestant.is_reference());
    for metric in METRICS {
        for (contestant, runs) in results {
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
                Allowance::Resident(megabytes) if **contestant != Contestant::Native => {
                    Some(megabytes)
                }
                _ => None,
            };
            let killed: usize = runs.iter().map(|run| run.killed_before).sum();
            let row = Row::new()
                .with("contestant", contestant.to_string())
                .with("workload", case.workload.clone())
                .with("megabytes", case.megabytes)
                .with("processes", case.processes)
                .with("data", case.data)
                .with("resident_megabytes", resident)
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
        .filter_map(|run| run.remark.clone())
    {
        report.note_once(remark);
    }
}

/// Whether a row tells what the host pays rather than what a user feels.
pub fn is_cost(row: &Value) -> bool {
    let name = row["metric"].as_str().unwrap_or_default();
    find_metric(name).is_some_and(|metric| metric.cost)
}

/// Every case, contestants' names and metrics: for who looks them up in what is printed.
#[cfg(test)]
pub mod known {
    pub use super::{case::cases, contestant::Contestant, metric::METRICS};
}
