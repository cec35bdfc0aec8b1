//! What `memfold run --proactive` gives back of programs that use a small part of their memory, and what it costs
//! them.

mod program;
mod sample;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use self::{
    program::{Program, Running},
    sample::Sample,
};
use crate::{
    Options,
    host::{Scratch, while_running},
    kernel::{Progress, find_memfold},
    report::{Report, Row, Samples, rounded},
};

const DEFAULT_RUNS: usize = 5;
const DEFAULT_SECONDS: &str = "20";
/// The part of the time under load before anything is measured: compilers of node and the JVM compile.
const WARM_UP: f64 = 1.0 / 3.0;
/// Samples of the memory at the end of a phase, and the interval between them.
const MEMORY_SAMPLES: u32 = 3;
const SAMPLE_EVERY: Duration = Duration::from_millis(500);

/// How each run goes.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Length of the load, and of the idle time after it.
    phase: Duration,
    /// Requests a second; as many as the program answers if there is none.
    rate: Option<usize>,
}

/// The figures of one run.
#[derive(Debug, Clone, Copy)]
struct Figures {
    /// Resident memory, pool and tables at the end of the load.
    loaded_bytes: f64,
    /// The same at the end of the idle time.
    idle_bytes: f64,
    requests_per_s: f64,
    /// CPU time of the program and of memfold, for each request.
    cpu_us: f64,
}

/// The figures of all runs of a program in one mode.
#[derive(Debug, Default)]
struct Runs {
    loaded_bytes: Samples,
    idle_bytes: Samples,
    requests_per_s: Samples,
    cpu_us: Samples,
}

impl Runs {
    fn push(&mut self, figures: Figures) {
        self.loaded_bytes.push(figures.loaded_bytes);
        self.idle_bytes.push(figures.idle_bytes);
        self.requests_per_s.push(figures.requests_per_s);
        self.cpu_us.push(figures.cpu_us);
    }
}

/// Runs the programs without and with `--proactive` in turn.
pub fn run(options: &Options) -> Result<Report> {
    let names = options.list("program", Program::NAMES);
    let programs = names.into_iter().map(Program::parse);
    let programs: Vec<Program> = programs.collect::<Result<_>>()?;
    let runs = options.number("runs", DEFAULT_RUNS)?;
    ensure!(runs > 0, "--runs must be at least 1");
    let plan = plan(options)?;
    let memfold = find_memfold(options.value("memfold"))?;
    let folder = Scratch::new()?;
    let mut report = Report::new("proactive");
    let progress = Progress::new(programs.len() * runs * 2);
    for program in programs {
        if let Some(why) = program.missing() {
            report.note(why);
            progress.skip(runs * 2);
            continue;
        }
        program.write(folder.path())?;
        let (mut without, mut with) = (Runs::default(), Runs::default());
        for round in 0..runs {
            let first = round % 2 == 1;
            for is_proactive in [first, !first] {
                let figures = measure(program, &memfold, folder.path(), (is_proactive, plan))?;
                let mode = if is_proactive { "with" } else { "without" };
                progress.message(&format!(
                    "{} {mode}, round {}/{runs}: {:.0} MiB idle, {:.1} µs of CPU time a request",
                    program.name(),
                    round + 1,
                    figures.idle_bytes / f64::from(1 << 20),
                    figures.cpu_us,
                ));
                progress.step();
                if is_proactive {
                    &mut with
                } else {
                    &mut without
                }
                .push(figures);
            }
        }
        report.add(row(program, &without, &with));
    }
    progress.finish();
    report.note(
        "memory is resident, pool and tables; ratios are with --proactive over without, of the same round; \
         goals: idle memory at most 0.8, CPU time a request below 1.02",
    );
    report.fact("seconds", plan.phase.as_secs_f64());
    report.fact("rate", plan.rate);
    report.fact("runs", runs);
    Ok(report)
}

fn plan(options: &Options) -> Result<Plan> {
    let phase = options.seconds("seconds", DEFAULT_SECONDS)?;
    let rate = options.value("rate").map(|_| options.number("rate", 0));
    let rate = rate.transpose()?;
    ensure!(rate != Some(0), "--rate must be at least 1");
    Ok(Plan { phase, rate })
}

fn row(program: Program, without: &Runs, with: &Runs) -> Row {
    let mebibytes = without.idle_bytes.median() / f64::from(1 << 20);
    let mut row = Row::new()
        .with("program", program.name())
        .with("idle_mib", rounded(mebibytes));
    for (ratio, spread, samples, of) in [
        (
            "idle_memory_ratio",
            "idle_memory_spread",
            "idle_memory_ratios",
            (|runs| &runs.idle_bytes) as fn(&Runs) -> &Samples,
        ),
        (
            "loaded_memory_ratio",
            "loaded_memory_spread",
            "loaded_memory_ratios",
            |runs| &runs.loaded_bytes,
        ),
        ("cpu_ratio", "cpu_spread", "cpu_ratios", |runs| &runs.cpu_us),
        (
            "requests_ratio",
            "requests_spread",
            "requests_ratios",
            |runs| &runs.requests_per_s,
        ),
    ] {
        let ratios = of(with).ratio_to(of(without));
        row = row
            .measured(ratio, &ratios)
            .with(spread, ratios.spread())
            .with(samples, ratios.values());
    }
    row.measured("requests_per_s", &without.requests_per_s)
        .measured("cpu_us_per_request", &without.cpu_us)
}

/// One run: started, loaded, left idle, ended.
fn measure(
    program: Program,
    memfold: &Path,
    folder: &Path,
    (is_proactive, plan): (bool, Plan),
) -> Result<Figures> {
    let mut running = Running::start(program, memfold, folder, is_proactive)?;
    let figures = while_running(running.pid(), || -> Result<Figures> {
        running.fill()?;
        serve(&mut running, plan.phase.mul_f64(WARM_UP), plan.rate)?;
        let before = Sample::of(running.pid())?;
        let began = Instant::now();
        let requests = serve(&mut running, plan.phase.mul_f64(1.0 - WARM_UP), plan.rate)?;
        let seconds = began.elapsed().as_secs_f64();
        let after = Sample::of(running.pid())?;
        let loaded_bytes = memory(&running, memfold)?;
        std::thread::sleep(plan.phase);
        Ok(Figures {
            loaded_bytes,
            idle_bytes: memory(&running, memfold)?,
            requests_per_s: requests as f64 / seconds,
            cpu_us: after.since(before).as_secs_f64() * 1e6 / requests as f64,
        })
    })?;
    let figures = figures.with_context(|| program.name())?;
    running.end().with_context(|| program.name())?;
    Ok(figures)
}

/// Makes requests for so long. Returns how many were answered.
fn serve(running: &mut Running, time: Duration, rate: Option<usize>) -> Result<usize> {
    let began = Instant::now();
    let mut requests = 0;
    while began.elapsed() < time {
        if let Some(rate) = rate {
            let due = began + Duration::from_secs_f64(requests as f64 / rate as f64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        running.ask()?;
        requests += 1;
    }
    Ok(requests)
}

/// The mean of some samples of the memory.
fn memory(running: &Running, memfold: &Path) -> Result<f64> {
    let mut sum = 0.0;
    for _ in 0..MEMORY_SAMPLES {
        sum += sample::memory(memfold, running.pid())?;
        std::thread::sleep(SAMPLE_EVERY);
    }
    Ok(sum / f64::from(MEMORY_SAMPLES))
}
