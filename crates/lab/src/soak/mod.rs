//! Whether memfold grows: a mix of real programs runs under it for a long time, and its own process
//! is looked at from outside.

mod guests;
mod mix;
mod series;
mod supervisor;

pub use guests::{GUESTS, GUESTS_OPTIONS, run as run_guests};

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use self::{
    mix::Guest,
    series::Series,
    supervisor::{FIGURES, Supervisor},
};
use crate::{
    Options,
    host::{Scratch, while_running},
    kernel::{Progress, find_memfold, real_python, start_to_end_with_us},
    report::{Report, Row, rounded},
};

/// What the programs say when all of them hold what they will hold.
const READY: &str = "ready";
/// About half of what the programs hold together.
const LIMIT: &str = "128M";
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
const DEFAULT_MINUTES: &str = "10";
/// Before the first sample: this share of the time they are taken, and at least so much.
const WARM_UP: f64 = 0.2;
const LEAST_WARM_UP: Duration = Duration::from_secs(15);
/// A sample can be missed on a busy machine, but not many.
const MOST_MISSED: f64 = 0.1;
/// How often the run is told of where there is no terminal.
const LINES: usize = 10;

/// Runs the mix, and reports what memfold held at the start and at the end, and how it grew.
pub fn run(options: &Options) -> Result<Report> {
    let minutes = options.value("minutes").unwrap_or(DEFAULT_MINUTES);
    let time = minutes.parse().ok().map(|minutes: f64| minutes * 60.0);
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.filter(|time| *time >= 12 * SAMPLE_EVERY);
    let time =
        time.with_context(|| format!("--minutes takes a number, at least 0.2, not {minutes:?}"))?;
    let memfold = find_memfold(options.value("memfold"))?;
    let folder = Scratch::new()?;
    let mut report = Report::new("soak");
    let mut guests = Vec::new();
    for guest in Guest::ALL {
        match guest.missing() {
            Some(why) => report.note(why),
            None => {
                guests::write(guest, folder.path())?;
                guests.push(guest);
            }
        }
    }
    let mut mix = Mix::start(&memfold, folder.path(), &guests)?;
    let pid = mix.child.id();
    let series = while_running(pid, || mix.watch(&memfold, time))??;
    mix.end()?;
    for (figure, series) in FIGURES.into_iter().zip(&series) {
        report.add(
            Row::new()
                .with("figure", figure)
                .with("at_start", rounded(series.at_start()))
                .with("at_end", rounded(series.at_end()))
                .with("slope_per_hour", rounded(series.slope_per_hour()))
                .with("samples", series.len()),
        );
    }
    let names: Vec<_> = guests.iter().map(|guest| guest.name()).collect();
    report.fact("programs", names);
    report.fact("minutes", time.as_secs_f64() / 60.0);
    Ok(report)
}

/// memfold and the programs under it.
struct Mix {
    child: Child,
}

impl Mix {
    fn start(memfold: &Path, folder: &Path, guests: &[Guest]) -> Result<Self> {
        let names: Vec<_> = guests.iter().map(|guest| guest.name()).collect();
        let mut command = Command::new(memfold);
        command
            .args(["run", "--quiet", "--limit", LIMIT, "--"])
            .arg(std::env::current_exe()?)
            .args([GUESTS, "--guests", &names.join(","), "--folder"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if guests.contains(&Guest::Python) {
            command.arg("--python").arg(real_python("python3")?);
        }
        let child = start_to_end_with_us(&mut command, libc::SIGKILL)?;
        Ok(Self { child })
    }

    /// Samples what memfold holds, once everything is warm.
    fn watch(&mut self, memfold: &Path, time: Duration) -> Result<[Series; FIGURES.len()]> {
        let output = self.child.stdout.take().context("memfold has no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line.trim() == READY, "the programs could not all start");
        let supervisor = Supervisor::new(memfold, self.child.id());
        let warm_up = time.mul_f64(WARM_UP).max(LEAST_WARM_UP);
        let steps = time.as_secs() / SAMPLE_EVERY.as_secs();
        let progress = Progress::new(steps as usize);
        progress.tell(&format!("warming up for {} s", warm_up.as_secs()));
        self.sleep(Instant::now() + warm_up)?;
        let mut series: [Series; FIGURES.len()] = Default::default();
        let mut missed = 0;
        let started = Instant::now();
        for step in 1..=steps as usize {
            self.sleep(started + SAMPLE_EVERY * step as u32)?;
            // When it is taken, not when it should be.
            let seconds = started.elapsed().as_secs_f64();
            match supervisor.sample() {
                Ok(sample) => {
                    for (series, value) in series.iter_mut().zip(sample) {
                        series.push(seconds, value);
                    }
                }
                Err(error) => {
                    self.check()?;
                    missed += 1;
                    let most = (steps as f64 * MOST_MISSED) as usize;
                    ensure!(missed <= most, "memfold cannot be looked at: {error:#}");
                }
            }
            if step * LINES / steps as usize != (step - 1) * LINES / steps as usize {
                progress.tell(&describe(seconds, &series));
            }
            progress.step();
        }
        progress.finish();
        Ok(series)
    }

    /// Until then, or until memfold ends.
    fn sleep(&mut self, until: Instant) -> Result<()> {
        const LOOK: Duration = Duration::from_millis(100);
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    fn check(&mut self) -> Result<()> {
        let status = self.child.try_wait()?;
        ensure!(
            status.is_none(),
            "memfold or a program of the mix ended early: see above"
        );
        Ok(())
    }

    /// Has the programs end, which must go well, and memfold with them.
    fn end(mut self) -> Result<()> {
        const PATIENCE: Duration = Duration::from_secs(60);
        drop(self.child.stdin.take());
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(Instant::now() < deadline, "memfold does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        ensure!(status.success(), "the programs ended with {status}");
        Ok(())
    }
}

impl Drop for Mix {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What was seen last.
fn describe(seconds: f64, series: &[Series]) -> String {
    let last = FIGURES.into_iter().zip(series).map(|(figure, series)| {
        let value = series.last().unwrap_or_default();
        match figure.strip_suffix("_bytes") {
            Some(name) => format!("{name} {:.1} MiB", value / f64::from(1 << 20)),
            None => format!("{figure} {value}"),
        }
    });
    format!("{seconds:.0} s: {}", last.collect::<Vec<_>>().join(", "))
}
