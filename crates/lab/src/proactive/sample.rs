//! CPU time and memory of a run, read from outside.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result};

use crate::soak::{Supervisor, number};

/// CPU time of memfold and of all that runs under it, until now.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    ticks: u64,
}

impl Sample {
    /// Of the memfold with this PID, and its descendants.
    pub fn of(memfold: u32) -> Result<Self> {
        let mut ticks = 0;
        let mut left = vec![memfold];
        while let Some(pid) = left.pop() {
            let path = format!("/proc/{pid}/stat");
            let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            ticks += cpu_ticks(&stat).with_context(|| format!("{path} has no CPU time"))?;
            for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
                // A thread may have ended.
                let children = fs::read_to_string(task.path().join("children"));
                let children = children.unwrap_or_default();
                left.extend(children.split_whitespace().flat_map(str::parse::<u32>));
            }
        }
        Ok(Self { ticks })
    }

    /// The CPU time between two samples.
    pub fn since(self, before: Self) -> Duration {
        // SAFETY: sysconf touches no memory of ours.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let ticks = self.ticks.saturating_sub(before.ticks);
        Duration::from_secs_f64(ticks as f64 / per_second as f64)
    }
}

/// CPU time of a process and of the children that it reaped, by its `stat`.
fn cpu_ticks(stat: &str) -> Option<u64> {
    // The name may hold anything; what follows the last parenthesis is from the third field on.
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields = fields.split_whitespace().skip(11).take(4);
    let ticks: Vec<u64> = fields.map(str::parse).collect::<Result<_, _>>().ok()?;
    (ticks.len() == 4).then(|| ticks.iter().sum())
}

/// Resident memory, pool and tables of a run, in bytes.
pub fn memory(memfold: &Path, pid: u32) -> Result<f64> {
    let stat = Supervisor::new(memfold, pid).stat()?;
    let mut bytes = 0;
    for name in ["resident_bytes", "pool_bytes", "metadata_bytes"] {
        bytes += number(&stat, name)?;
    }
    Ok(bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_behind_any_name() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194560 1 0 0 0 30 12 5 3 20 0 1 0 9";
        assert_eq!(cpu_ticks(stat), Some(50));
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn the_cpu_time_of_this_process_grows() {
        let before = Sample::of(std::process::id()).unwrap();
        let began = std::time::Instant::now();
        let mut after = before;
        while after.since(before).is_zero() {
            assert!(began.elapsed() < Duration::from_secs(60));
            after = Sample::of(std::process::id()).unwrap();
        }
    }
}
