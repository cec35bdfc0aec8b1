//! `--timeline`: a picture of the run, one file that loads nothing.
//!
//! A thread samples the statistics, at most every [`FIRST`] and so rarely that it takes less than
//! 1/[`SHARE`] of a CPU. The samples are bounded: when they are full, pairs become one and the distance
//! doubles.

mod page;
mod picture;
mod samples;
mod scale;

use crate::failure::Failure;
use crate::messages;
use crate::run::stats_file::StatsFile;
use memfold_pager::{Control, LatencyCounts};
use memfold_sys::thread::cpu_time;
use samples::{Sample, Samples};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The distance of samples at first. Less shows short runs finer and costs more.
const FIRST: Duration = Duration::from_millis(50);
/// Between two samples passes this many times the CPU time that the last one took, at least.
const SHARE: u32 = 2000;

/// The form of the file, by its name's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Html,
    Svg,
}

/// The file of `--timeline`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelinePath {
    path: PathBuf,
    form: Form,
}

/// Takes a path whose end says what to write.
pub fn parse(path: &str) -> Result<TimelinePath, String> {
    let form = match Path::new(path).extension().and_then(|end| end.to_str()) {
        Some("html" | "htm") => Form::Html,
        Some("svg") => Form::Svg,
        _ => return Err("give a name that ends in .html or .svg".to_owned()),
    };
    Ok(TimelinePath {
        path: path.into(),
        form,
    })
}

/// The file, which can be written.
#[derive(Debug)]
pub struct Timeline {
    file: StatsFile,
    form: Form,
}

/// What the picture is of.
#[derive(Debug, Clone, Default)]
pub struct About {
    /// The program and its arguments, for display.
    pub command: String,
    /// How the run ended, for display.
    pub outcome: String,
}

/// Samples until it is finished.
pub struct Recording {
    timeline: Timeline,
    stop: Sender<()>,
    thread: JoinHandle<Samples>,
}

impl Timeline {
    /// Makes sure that the file can be written.
    pub fn open(given: &TimelinePath) -> Result<Timeline, Failure> {
        messages::remember_warnings();
        Ok(Timeline {
            file: StatsFile::open_for("--timeline", &given.path)?,
            form: given.form,
        })
    }

    /// Samples from a thread of its own, which inherits that all signals are blocked.
    pub fn record(self, control: Control) -> io::Result<Recording> {
        let (stop, stopped) = channel::<()>();
        let thread = std::thread::Builder::new()
            .name("timeline".to_owned())
            .spawn(move || {
                let mut recorder = Recorder::new(control);
                let mut pause = Duration::ZERO;
                while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                    pause = recorder.sample();
                }
                recorder.sample();
                recorder.samples
            })?;
        Ok(Recording {
            timeline: self,
            stop,
            thread,
        })
    }
}

/// Takes samples.
struct Recorder {
    control: Control,
    samples: Samples,
    began: Instant,
    before: LatencyCounts,
}

impl Recorder {
    fn new(control: Control) -> Recorder {
        Recorder {
            before: control.latency(),
            control,
            samples: Samples::new(FIRST),
            began: Instant::now(),
        }
    }

    /// Takes one, and returns the time until the next.
    fn sample(&mut self) -> Duration {
        let began = cpu_time();
        let stats = self.control.stats();
        let counts = self.control.latency();
        let faults = counts.since(&self.before);
        let at = self.began.elapsed();
        self.samples.push(Sample {
            at,
            resident: stats.now.resident_bytes,
            pool: stats.now.pool_bytes + stats.now.metadata_bytes,
            file: stats.now.file_bytes,
            remote: stats.now.remote_bytes,
            limit: stats.totals.limit_bytes,
            resident_limit: stats.totals.resident_limit_bytes,
            faults: faults.total(),
            p50: faults.percentile(50),
            p99: faults.percentile(99),
        });
        self.before = counts;
        let pids = self.control.programs().into_iter().map(|usage| usage.pid);
        self.samples.programs.note(at, pids);
        let used = cpu_time().saturating_sub(began);
        self.samples.cpu += used;
        self.samples.distance().max(used * SHARE)
    }
}

impl Recording {
    /// Ends the samples, and draws and writes the picture.
    pub fn finish(self, about: &About) -> io::Result<()> {
        let _ = self.stop.send(());
        let samples = self
            .thread
            .join()
            .map_err(|_| io::Error::other("the thread that took the samples failed"))?;
        let warnings = messages::remembered();
        let picture = picture::draw(&samples, &warnings, about);
        let document = match self.timeline.form {
            Form::Svg => picture,
            Form::Html => page::html(&picture, &samples, &warnings, about),
        };
        self.timeline.file.write_document(document.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_what_is_written() {
        assert_eq!(parse("a/run.html").unwrap().form, Form::Html);
        assert_eq!(parse("run.svg").unwrap().form, Form::Svg);
        for path in ["run", "run.png", ".svg", "run.svg.txt", ""] {
            assert!(parse(path).is_err(), "{path}");
        }
    }
}
