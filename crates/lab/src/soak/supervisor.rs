//! Memory and descriptors of memfold's own process, read from outside.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The counters, by their names in the report.
pub const COUNTERS: [&str; 7] = [
    "descriptors",
    "threads",
    "mappings",
    "heap_bytes",
    "table_bytes",
    "pool_bytes",
    "unowned_pool_bytes",
];

/// A running supervisor.
#[derive(Debug)]
pub struct Supervisor {
    memfold: PathBuf,
    pid: u32,
}

impl Supervisor {
    /// The supervisor with this PID; `memfold` is the binary to run `stat` with.
    pub fn new(memfold: &Path, pid: u32) -> Self {
        let memfold = memfold.to_owned();
        Self { memfold, pid }
    }

    /// Numbers of descriptors and threads.
    pub fn counts(&self) -> Result<[u64; 2]> {
        Ok([self.count("fd")?, self.count("task")?])
    }

    /// Reads all counters, in the order of [`COUNTERS`].
    pub fn sample(&self) -> Result<[f64; COUNTERS.len()]> {
        let maps = self.read("maps")?;
        let status = self.read("status")?;
        let anonymous = kibibytes(&status, "RssAnon:").context("status has no RssAnon")? * 1024;
        let stat = self.stat()?;
        let (pool, tables) = (
            number(&stat, "pool_bytes")?,
            number(&stat, "metadata_bytes")?,
        );
        let [descriptors, threads] = self.counts()?;
        let counters = [
            descriptors,
            threads,
            maps.lines().count() as u64,
            // The rest: heap with the page states, stacks, buffers.
            anonymous.saturating_sub(pool + tables),
            tables,
            pool,
            pool.saturating_sub(owned(&stat)?),
        ];
        Ok(counters.map(|counter| counter as f64))
    }

    fn path(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.pid)
    }

    fn read(&self, name: &str) -> Result<String> {
        let path = self.path(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    }

    fn count(&self, folder: &str) -> Result<u64> {
        let path = self.path(folder);
        let entries = fs::read_dir(&path).with_context(|| format!("cannot read {path}"))?;
        Ok(entries.count() as u64)
    }

    /// What `memfold stat` prints.
    pub fn stat(&self) -> Result<Value> {
        let output = Command::new(&self.memfold)
            .args(["stat", "--json", &self.pid.to_string()])
            .output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "memfold stat: {}", error.trim());
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// Bytes of the pool that the programs' pages take. The rest is what the allocator wastes, and what
/// no program has.
fn owned(stat: &Value) -> Result<u64> {
    let programs = stat["programs"].as_array();
    let programs = programs.context("memfold stat prints no programs")?;
    let bytes = programs
        .iter()
        .map(|program| program["pool_bytes"].as_u64());
    { bytes }
        .sum::<Option<u64>>()
        .context("memfold stat prints no pool_bytes of a program")
}

/// A number of what `memfold stat` prints.
pub fn number(stat: &Value, name: &str) -> Result<u64> {
    let value = stat[name].as_u64();
    value.with_context(|| format!("memfold stat prints no {name}"))
}

/// A size in KiB in the text of a file of `/proc`, by the name before it, colon included.
pub fn kibibytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
