//! Memory growth of memfold's own process, sampled from outside while a mix of programs runs under
//! it for a long time.

mod guests;
mod mix;
mod rest;
mod series;
mod supervisor;

pub use guests::{GUESTS, GUESTS_OPTIONS, run as run_guests};
pub use supervisor::{Supervisor, kibibytes, number};

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use self::{
    mix::Guest,
    rest::{REST, RESTING, WORK},
    series::Series,
    supervisor::COUNTERS,
};
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
/// How long the programs work between two rests, in which memfold's counters are sampled.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Interval of the counts of descriptors and threads in a rest.
const SETTLING_INTERVAL: Duration = Duration::from_millis(200);
/// As many equal counts in a row are taken as settled. A smaller value takes programs into account
/// that are exiting.
const SETTLED_COUNTS: usize = 4;
/// As many counts at most, settled or not.
const MOST_COUNTS: usize = 20;
/// Fewest samples, however long the rests take.
const LEAST_SAMPLES: usize = 2;
/// As many times a sample is tried again, and after how long: on a busy machine, `memfold stat` may
/// find no answer.
const RETRIES: usize = 3;
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long the programs may take to start. A smaller value fails on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// The same for a rest, which its own process gives up before.
const REST_TIMEOUT: Duration = rest::TIMEOUT.saturating_add(Duration::from_secs(30));
/// Interval between checks that memfold still runs.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The shortest run.
const LEAST_TIME: Duration = Duration::from_secs(12);
const DEFAULT_MINUTES: &str = "10";
/// Warm-up before the first sample, as a share of the sampling time. A larger share hides slower
/// initial growth.
const WARM_UP: f64 = 0.2;
/// The shortest warm-up.
const LEAST_WARM_UP: Duration = Duration::from_secs(15);
/// Progress lines printed over the whole run.
const LINES: usize = 10;

const EXITED_EARLY: &str = "memfold or a program of the mix exited early: see the errors above";

/// Runs the mix and reports memfold's counters at the start and the end, and their slope.
pub fn run(options: &Options) -> Result<Report> {
    let minutes = options.value("minutes").unwrap_or(DEFAULT_MINUTES);
    let time = minutes.parse().ok().map(|minutes: f64| minutes * 60.0);
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.filter(|time| *time >= LEAST_TIME);
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
    let unsettled = mix.unsettled;
    mix.end()?;
    if unsettled > 0 {
        report.note(format!(
            "in {unsettled} of {} rests the numbers of descriptors and threads did not settle within \
             {MOST_COUNTS} counts: these samples have programs that were exiting",
            series[0].len()
        ));
    }
    for (counter, series) in COUNTERS.into_iter().zip(&series) {
        report.add(
            Row::new()
                .with("figure", counter)
                .with("at_start", rounded(series.at_start()))
                .with("at_end", rounded(series.at_end()))
                .with("slope_per_hour", rounded(series.slope_per_hour()))
                .with("samples", series.len())
                .with("runs", 1)
                .with(
                    "spread",
                    Some(series.spread()).filter(|spread| spread.is_finite()),
                ),
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
    /// What the process that drives the programs prints.
    answers: Receiver<String>,
    /// Rests in which the counts did not settle.
    unsettled: usize,
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
        let mut child = start_to_end_with_us(&mut command, libc::SIGKILL)?;
        let output = child.stdout.take();
        let output = BufReader::new(output.context("memfold has no standard output")?);
        let (sender, answers) = channel();
        // Ends when memfold has exited, or nothing receives any more.
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            answers,
            unsettled: 0,
        })
    }

    /// Samples memfold's counters in rests after the warm-up.
    fn watch(&mut self, memfold: &Path, time: Duration) -> Result<[Series; COUNTERS.len()]> {
        self.expect(READY, START_TIMEOUT)?;
        let supervisor = Supervisor::new(memfold, self.child.id());
        let warm_up = time.mul_f64(WARM_UP).max(LEAST_WARM_UP);
        let steps = (time.as_secs() / SAMPLE_EVERY.as_secs()) as usize;
        let progress = Progress::new(steps);
        progress.message(&format!("warming up for {} s", warm_up.as_secs()));
        self.sleep(Instant::now() + warm_up)?;
        let mut series: [Series; COUNTERS.len()] = Default::default();
        let started = Instant::now();
        let mut shown = 0;
        while started.elapsed() < time || series[0].len() < LEAST_SAMPLES {
            self.sleep(Instant::now() + SAMPLE_EVERY)?;
            let sample = self.sample_at_rest(&supervisor)?;
            // The time of the sample, not its scheduled time.
            let seconds = started.elapsed().as_secs_f64();
            for (series, value) in series.iter_mut().zip(sample) {
                series.push(seconds, value);
            }
            let step = (steps as f64 * (seconds / time.as_secs_f64()).min(1.0)) as usize;
            if step * LINES / steps != shown * LINES / steps {
                progress.message(&describe(seconds, &series));
            }
            (shown..step).for_each(|_| progress.step());
            shown = step;
        }
        progress.finish();
        Ok(series)
    }

    /// Has the programs rest, and samples what memfold has then.
    fn sample_at_rest(&mut self, supervisor: &Supervisor) -> Result<[f64; COUNTERS.len()]> {
        self.ask(REST)?;
        self.expect(RESTING, REST_TIMEOUT)?;
        let mut counts = (supervisor.counts()?, 1);
        for _ in 1..MOST_COUNTS {
            self.sleep(Instant::now() + SETTLING_INTERVAL)?;
            let now = supervisor.counts()?;
            counts = (now, if now == counts.0 { counts.1 + 1 } else { 1 });
            if counts.1 == SETTLED_COUNTS {
                break;
            }
        }
        if counts.1 < SETTLED_COUNTS {
            self.unsettled += 1;
        }
        let sample = self.sample(supervisor)?;
        self.ask(WORK)?;
        Ok(sample)
    }

    fn sample(&mut self, supervisor: &Supervisor) -> Result<[f64; COUNTERS.len()]> {
        for _ in 0..RETRIES {
            if let Ok(sample) = supervisor.sample() {
                return Ok(sample);
            }
            self.sleep(Instant::now() + RETRY_INTERVAL)?;
        }
        supervisor.sample()
    }

    /// Asks the process that drives the programs for something.
    fn ask(&mut self, request: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("no standard input")?;
        writeln!(input, "{request}").context(EXITED_EARLY)
    }

    /// Waits for an answer, `timeout` at most.
    fn expect(&mut self, answer: &str, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.answers.recv_timeout(POLL_INTERVAL) {
                Ok(line) => {
                    ensure!(
                        line.trim() == answer,
                        "the process that drives the programs printed {line:?} instead of {answer:?}"
                    );
                    return Ok(());
                }
                Err(RecvTimeoutError::Disconnected) => bail!(EXITED_EARLY),
                Err(RecvTimeoutError::Timeout) => self.check()?,
            }
            ensure!(
                Instant::now() < deadline,
                "the process that drives the programs did not print {answer:?} within {} s: it or memfold \
                 hangs, or the machine is too busy",
                timeout.as_secs()
            );
        }
    }

    /// Sleeps until a time; fails if memfold exits before.
    fn sleep(&mut self, until: Instant) -> Result<()> {
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(POLL_INTERVAL));
        }
    }

    fn check(&mut self) -> Result<()> {
        let status = self.child.try_wait()?;
        ensure!(status.is_none(), EXITED_EARLY);
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
            thread::sleep(Duration::from_millis(20));
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
