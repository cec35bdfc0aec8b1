//! What a program holds while it runs: by the kernel, and for the pool by `memfold stat`.

use std::{
    fs,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    host::while_running,
    kernel::start_to_end_with_us,
    soak::{kibibytes, number},
};

/// Time between two samples. Less costs the measured program CPU time.
const SAMPLE_EVERY: Duration = Duration::from_millis(40);
const MIB: f64 = (1 << 20) as f64;

/// What was held at one time, in MiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    pub seconds: f64,
    /// Anonymous pages of the program, as the kernel counts them (`RssAnon`).
    pub resident: f64,
    /// The compressed pool with swap tables and page states.
    pub pool: f64,
}

/// One run from its start to its end.
#[derive(Debug, Default)]
pub struct Series {
    pub samples: Vec<Sample>,
    /// Until the program exited.
    pub seconds: f64,
    /// The limit that memfold says it keeps.
    pub limit_mib: Option<f64>,
}

impl Series {
    /// The most of program and pool together, in MiB.
    pub fn peak(&self) -> f64 {
        let totals = self
            .samples
            .iter()
            .map(|sample| sample.resident + sample.pool);
        totals.fold(0.0, f64::max)
    }
}

/// Runs a command and samples it until it exits, which must be with success. With `memfold`, the
/// command is a run of it, and its program is sampled.
pub fn watch(command: &mut Command, memfold: Option<&Path>) -> Result<Series> {
    let started = Instant::now();
    let mut child = start_to_end_with_us(command, libc::SIGKILL)?;
    let series = while_running(child.id(), || sample_all(&mut child, started, memfold))?;
    if series.is_err() {
        // Both fail if it has ended.
        let _ = child.kill();
        let _ = child.wait();
    }
    series
}

fn sample_all(child: &mut Child, started: Instant, memfold: Option<&Path>) -> Result<Series> {
    let mut series = Series::default();
    loop {
        if let Some(status) = child.try_wait()? {
            series.seconds = started.elapsed().as_secs_f64();
            ensure!(status.success(), "the program ended with {status}");
            return Ok(series);
        }
        let seconds = started.elapsed().as_secs_f64();
        let stat = match memfold {
            Some(memfold) => stat(memfold, child.id())?,
            None => None,
        };
        let program = match (&stat, memfold) {
            (Some(stat), _) => u32::try_from(number(stat, "program_pid")?).ok(),
            (None, None) => Some(child.id()),
            // The run has not begun, or has ended.
            (None, Some(_)) => None,
        };
        if let Some(resident) = program.and_then(resident_mib) {
            let mut pool = 0.0;
            if let Some(stat) = &stat {
                let bytes = number(stat, "pool_bytes")? + number(stat, "metadata_bytes")?;
                pool = bytes as f64 / MIB;
                series.limit_mib = Some(number(stat, "limit_bytes")? as f64 / MIB);
            }
            series.samples.push(Sample {
                seconds,
                resident,
                pool,
            });
        }
        std::thread::sleep(SAMPLE_EVERY);
    }
}

/// What `memfold stat` says of a run; `None` where it knows no such run.
fn stat(memfold: &Path, pid: u32) -> Result<Option<Value>> {
    let output = Command::new(memfold)
        .args(["stat", "--json", &pid.to_string()])
        .output()
        .context("memfold stat cannot be started")?;
    if !output.status.success() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&output.stdout)?))
}

/// `None` if the process is gone.
fn resident_mib(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(kibibytes(&status, "RssAnon:")? as f64 / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_sampled_until_it_exits() {
        let series = watch(Command::new("sleep").arg("0.5"), None).unwrap();
        assert!(series.samples.len() >= 3, "{series:?}");
        assert!(series.peak() > 0.0 && series.seconds >= 0.5, "{series:?}");
        assert!(watch(&mut Command::new("false"), None).is_err());
    }
}
