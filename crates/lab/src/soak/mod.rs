//! Memory growth of memfold's own process, sampled from outside while a mix of programs runs under
//! it for a long time.

mod guests;
mod mix;
mod series;
mod supervisor;

pub use guests::{GUESTS, GUESTS_OPTIONS, run as run_guests};
pub use supervisor::{Supervisor, kibibytes, number};

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use self::{mix::Guest, series::Series, supervisor::COUNTERS};
use crate::{
    Options,
    host::{Scratch, while_running},
    kernel::{Progress, find_memfold, real_python, start_to_end_with_us},
    report::{Report, Row, rounded},
};

/// Printed once every program holds its full data.
const READY: &str = "ready";
/// memfold's limit: about half of what the programs hold together.
const LIMIT: &str = "128M";
/// Sampling interval.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
const DEFAULT_MINUTES: &str = "10";
/// Warm-up before the first sample, as a share of the sampling time. A larger share hides slower
/// initial growth.
const WARM_UP: f64 = 0.2;
/// The shortest warm-up.
const LEAST_WARM_UP: Duration = Duration::from_secs(15);
/// Share of the samples that may fail, as on a busy machine.
const MOST_MISSED: f64 = 0.1;
/// Progress lines printed over the whole run.
const LINES: usize = 10;

/// Runs the mix and reports memfold's counters at the start and the end, and their slope.
pub fn run(options: &Options) -> Result<Report> {
    let minutes = options.value("minutes").unwrap_or(DEFAULT_MINUTES);
    let time = minutes.parse().ok().map(|minutes: f64| minutes * 60.0);
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.filter(|time| *time >= 12 * SAMPLE_EVERY);
    let time =
        time.with_context(|| format!("--minutes takes a number of at least 0.2, not {minutes:?}"))?;
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
    for (counter, series) in COUNTERS.into_iter().zip(&series) {
        report.add(
            Row::new()
                .with("figure", counter)
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

    /// Samples memfold's counters after the warm-up.
    fn watch(&mut self, memfold: &Path, time: Duration) -> Result<[Series; COUNTERS.len()]> {
        let output = self
            .child
            .stdout
            .take()
            .context("memfold has no standard output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(
            line.trim() == READY,
            "not all programs could start: see the errors above"
        );
        let supervisor = Supervisor::new(memfold, self.child.id());
        let warm_up = time.mul_f64(WARM_UP).max(LEAST_WARM_UP);
        let steps = time.as_secs() / SAMPLE_EVERY.as_secs();
        let progress = Progress::new(steps as usize);
        progress.message(&format!("warming up for {} s", warm_up.as_secs()));
        self.sleep(Instant::now() + warm_up)?;
        let mut series: [Series; COUNTERS.len()] = Default::default();
        let mut missed = 0;
        let started = Instant::now();
        for step in 1..=steps as usize {
            self.sleep(started + SAMPLE_EVERY * step as u32)?;
            // The time of the sample, not its scheduled time.
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
                    ensure!(
                        missed <= most,
                        "cannot sample memfold, {missed} times so far: {error:#}"
                    );
                }
            }
            if step * LINES / steps as usize != (step - 1) * LINES / steps as usize {
                progress.message(&describe(seconds, &series));
            }
            progress.step();
        }
        progress.finish();
        Ok(series)
    }

    /// Sleeps until a time; fails if memfold exits before.
    fn sleep(&mut self, until: Instant) -> Result<()> {
        /// Interval between checks that memfold still runs.
        const POLL_INTERVAL: Duration = Duration::from_millis(100);
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }

    fn check(&mut self) -> Result<()> {
        let status = self.child.try_wait()?;
        ensure!(
            status.is_none(),
            "memfold or a program of the mix exited early: see the errors above"
        );
        Ok(())
    }

    /// Stops the programs, and with them memfold. All must exit with status 0.
    fn end(mut self) -> Result<()> {
        /// How long memfold may take to exit.
        const TIMEOUT: Duration = Duration::from_secs(60);
        drop(self.child.stdin.take());
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(
                Instant::now() < deadline,
                "memfold did not exit within {} s",
                TIMEOUT.as_secs()
            );
            std::thread::sleep(Duration::from_millis(20));
        };
        ensure!(status.success(), "the programs exited with {status}");
        Ok(())
    }
}

impl Drop for Mix {
    fn drop(&mut self) {
        // Both fail if it was reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The latest samples as a progress line.
fn describe(seconds: f64, series: &[Series]) -> String {
    let last = COUNTERS.into_iter().zip(series).map(|(counter, series)| {
        let value = series.last().unwrap_or_default();
        match counter.strip_suffix("_bytes") {
            Some(name) => format!("{name} {:.1} MiB", value / f64::from(1 << 20)),
            None => format!("{counter} {value}"),
        }
    });
    format!("{seconds:.0} s: {}", last.collect::<Vec<_>>().join(", "))
}
