//! What memfold costs over size: the same work for each page in more bytes, processes, mappings or threads.

mod case;
mod measure;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub use case::LEAST_SCALE;

use self::{
    case::{Case, Dimension},
    measure::{Figures, Setup, available_bytes, compile, measure},
};
use crate::{
    Options,
    host::Scratch,
    kernel::{Progress, Scale, find_memfold, scale},
    report::{Report, Row, Samples},
};

const DEFAULT_RUNS: usize = 5;
const DEFAULT_SECONDS: &str = "3";
/// Goal: the cost of a page, as a multiple of that in the small case.
const COST_GOAL: f64 = 1.15;
/// Goal: memfold's own memory in per cent of what it manages.
const OWN_GOAL: f64 = 1.0;
/// Goal: CPU time at rest in per cent of a CPU.
const REST_GOAL: f64 = 1.0;

/// The figures of all runs of a case.
#[derive(Debug, Default)]
struct Runs {
    wall_us: Samples,
    cpu_us: Samples,
    program_us: Samples,
    memfold_us: Samples,
    pages_in: Samples,
    pages_out: Samples,
    own_mebibytes: Samples,
    own_percent: Samples,
    rest_percent: Samples,
}

impl Runs {
    fn push(&mut self, figures: Figures) {
        self.wall_us.push(figures.wall_us);
        self.cpu_us.push(figures.program_us + figures.memfold_us);
        self.program_us.push(figures.program_us);
        self.memfold_us.push(figures.memfold_us);
        self.pages_in.push(figures.pages_in);
        self.pages_out.push(figures.pages_out);
        self.own_mebibytes
            .push(figures.own_bytes / f64::from(1 << 20));
        self.own_percent
            .push(figures.own_bytes / figures.managed_bytes * 100.0);
        self.rest_percent.push(figures.rest_percent);
    }
}

/// Runs each grown case and the small one in turn.
pub fn run(options: &Options) -> Result<Report> {
    let names = options.list("dimension", Dimension::NAMES);
    let dimensions = names.into_iter().map(Dimension::parse);
    let dimensions: Vec<Dimension> = dimensions.collect::<Result<_>>()?;
    let runs = options.number("runs", DEFAULT_RUNS)?;
    ensure!(runs > 0, "--runs must be at least 1");
    let scale = Scale(scale(options)?);
    let largest = options.value("megabytes").is_some();
    let largest = largest
        .then(|| options.number("megabytes", 0))
        .transpose()?;
    let rest = options.seconds("seconds", DEFAULT_SECONDS)?;
    let cases = dimensions.into_iter().map(|dimension| {
        let case = Case::grown(dimension, scale, largest)?;
        Ok((dimension, case))
    });
    let cases: Vec<(Dimension, Case)> = cases.collect::<Result<_>>()?;
    let folder = Scratch::new()?;
    let setup = Setup {
        memfold: find_memfold(options.value("memfold"))?,
        program: compile(folder.path())?,
        rest,
        is_spoilt: options.value("spoil").is_some(),
    };
    let small = Case::small(scale)?;
    let mut report = Report::new("growth");
    let progress = Progress::new(cases.len() * runs * 2);
    let mut of_small = Runs::default();
    let mut rows = Vec::new();
    for (dimension, case) in cases {
        let (needed, available) = (case.needed_bytes(), available_bytes()?);
        if needed > available {
            report.note(format!(
                "{} is left out: {} takes {} MiB of memory, and {} are available",
                dimension.name(),
                case.size(dimension),
                needed >> 20,
                available >> 20
            ));
            rows.push(sizes(dimension, small, case).with("runs", 0));
            progress.skip(runs * 2);
            continue;
        }
        let mut both = [Runs::default(), Runs::default()];
        for round in 0..runs {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for index in order {
                let case = [small, case][index];
                let figures = measure(case, &setup).with_context(|| dimension.name())?;
                let which = ["small", "grown"][index];
                progress.message(&describe(dimension, which, (round + 1, runs), &figures));
                progress.step();
                both[index].push(figures);
                if index == 0 {
                    of_small.push(figures);
                }
            }
        }
        let [small_runs, grown_runs] = &both;
        rows.push(compared(
            sizes(dimension, small, case),
            small_runs,
            grown_runs,
        ));
    }
    progress.finish();
    if !of_small.wall_us.is_empty() {
        report.add(by_itself(small, &of_small));
    }
    rows.into_iter().for_each(|row| report.add(row));
    explain(&mut report);
    report.fact("scale", scale.0);
    report.fact("runs", runs);
    report.fact("rest_seconds", setup.rest.as_secs_f64());
    Ok(report)
}

fn describe(
    dimension: Dimension,
    which: &str,
    (round, runs): (usize, usize),
    figures: &Figures,
) -> String {
    format!(
        "{}, {which}, round {round}/{runs}: {:.1} µs, of CPU time {:.1} + {:.1} µs a page; at rest {:.2} % of a CPU",
        dimension.name(),
        figures.wall_us,
        figures.program_us,
        figures.memfold_us,
        figures.rest_percent
    )
}

/// The columns that say which case a row is of.
fn sizes(dimension: Dimension, small: Case, case: Case) -> Row {
    Row::new()
        .with("grown", dimension.name())
        .with("small_size", small.size(dimension))
        .with("size", case.size(dimension))
        .with("megabytes", case.bytes() >> 20)
}

fn by_itself(small: Case, runs: &Runs) -> Row {
    let row = Row::new()
        .with("grown", "nothing")
        .with("small_size", Value::Null)
        .with("size", Value::Null)
        .with("megabytes", small.bytes() >> 20);
    let row = costs(row, runs);
    row.with("misses", missed(None, runs))
}

/// The columns of a grown case beside the small one of the same rounds.
fn compared(row: Row, small: &Runs, grown: &Runs) -> Row {
    let wall = grown.wall_us.ratio_to(&small.wall_us);
    let cpu = grown.cpu_us.ratio_to(&small.cpu_us);
    let mut row = row;
    for (names, ratios) in [
        (
            ["wall_ratio", "wall_least", "wall_most", "wall_ratios"],
            &wall,
        ),
        (["cpu_ratio", "cpu_least", "cpu_most", "cpu_ratios"], &cpu),
    ] {
        row = row
            .measured(names[0], ratios)
            .with(names[1], ratios.least())
            .with(names[2], ratios.most())
            .with(names[3], ratios.values());
    }
    let misses = missed(Some((&wall, &cpu)), grown);
    costs(row, grown).with("misses", misses)
}

fn costs(row: Row, runs: &Runs) -> Row {
    row.measured("wall_us", &runs.wall_us)
        .measured("program_cpu_us", &runs.program_us)
        .measured("memfold_cpu_us", &runs.memfold_us)
        .measured("pages_in", &runs.pages_in)
        .measured("pages_out", &runs.pages_out)
        .measured("own_mib", &runs.own_mebibytes)
        .measured("own_percent", &runs.own_percent)
        .measured("rest_percent", &runs.rest_percent)
        .with("runs", runs.wall_us.len())
        .with("spread", runs.wall_us.spread())
}

/// The goals that a case misses, by their medians.
fn missed(ratios: Option<(&Samples, &Samples)>, runs: &Runs) -> String {
    let mut missed = Vec::new();
    if let Some((wall, cpu)) = ratios {
        if wall.median() > COST_GOAL {
            missed.push("wall");
        }
        if cpu.median() > COST_GOAL {
            missed.push("cpu");
        }
    }
    if runs.own_percent.median() > OWN_GOAL {
        missed.push("own");
    }
    if runs.rest_percent.median() >= REST_GOAL {
        missed.push("rest");
    }
    if missed.is_empty() {
        return "none".to_owned();
    }
    missed.join("+")
}

fn explain(report: &mut Report) {
    report.note(
        "times are for each page that came in during one visit to all pages (as many went out); ratios are to the \
         small case of the same round: median, least, most; cpu is of the programs and of memfold",
    );
    report.note(
        "own: memfold's anonymous and shared memory and its page tables without the pool, in per cent of the programs' \
         memory, in and out; rest: CPU time of memfold's process while all programs sleep, in per cent of a CPU",
    );
    report.note(format!(
        "goals: wall and cpu at most {COST_GOAL}, own at most {OWN_GOAL} %, rest below {REST_GOAL} %"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(wall_us: f64, own_bytes: f64, rest_percent: f64) -> Runs {
        let mut runs = Runs::default();
        for factor in [0.9, 1.0, 1.3] {
            runs.push(Figures {
                pages_in: 100.0,
                pages_out: 100.0,
                wall_us: wall_us * factor,
                program_us: 1.0,
                memfold_us: 2.0,
                own_bytes,
                managed_bytes: 1000.0,
                rest_percent,
            });
        }
        runs
    }

    #[test]
    fn a_row_names_the_goals_that_it_misses() {
        let small = runs(4.0, 5.0, 0.5);
        let ratios = |grown: &Runs| {
            let wall = grown.wall_us.ratio_to(&small.wall_us);
            let cpu = grown.cpu_us.ratio_to(&small.cpu_us);
            missed(Some((&wall, &cpu)), grown)
        };
        assert_eq!(missed(None, &small), "none");
        assert_eq!(ratios(&runs(4.5, 10.0, 0.99)), "none");
        assert_eq!(ratios(&runs(4.7, 10.1, 0.2)), "wall+own");
        assert_eq!(ratios(&runs(4.0, 1.0, 1.0)), "rest");
    }
}
