//! The synthetic workloads. Each is a process of its own, so that any backend can run it; it
//! verifies every byte it wrote and prints its figures as one line of JSON.

mod area;
mod data;
mod embedded;
mod exit;
mod fill;
mod latency;
mod usemem;
mod worker;
mod workers;
mod zipf;

pub use data::Data;

use std::{
    fmt,
    io::{Write, stdout},
};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use crate::Options;

/// The hidden subcommand that runs a workload.
pub const WORKLOAD: &str = "workload";
/// Exit status of a workload that read back wrong data.
pub const WRONG_RESULT: i32 = 3;

/// Options of the workloads.
pub const WORKLOAD_OPTIONS: &[&str] = &[
    "megabytes",
    "processes",
    "data",
    "evict",
    "limit-megabytes",
    "order",
    "operations",
    "memory",
    "spoil",
];

/// A workload read back wrong data.
#[derive(Debug)]
pub struct Wrong(pub String);

impl fmt::Display for Wrong {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "WRONG RESULT: {}", self.0)
    }
}

impl std::error::Error for Wrong {}

/// Figures by metric name.
#[derive(Debug, Default, Clone)]
pub struct Figures(pub Vec<(String, f64)>);

impl Figures {
    /// Adds a figure.
    pub fn with(mut self, name: &str, value: f64) -> Self {
        self.0.push((name.to_owned(), value));
        self
    }

    /// The figure of that name.
    pub fn get(&self, name: &str) -> Option<f64> {
        let found = self.0.iter().find(|(one, _)| one == name);
        found.map(|(_, value)| *value)
    }

    fn to_json(&self) -> Value {
        let pairs = self
            .0
            .iter()
            .map(|(name, value)| (name.clone(), (*value).into()));
        Value::Object(pairs.collect::<Map<_, _>>())
    }

    /// Parses the last line of `output`, printed by [`report`].
    pub fn from_output(output: &str) -> Result<Self> {
        let line = output
            .lines()
            .next_back()
            .context("the workload printed nothing")?;
        let value: Value = serde_json::from_str(line)
            .with_context(|| format!("the workload printed {line:?} instead of JSON"))?;
        let object = value
            .as_object()
            .context("the workload printed no JSON object")?;
        let number = |(name, value): (&String, &Value)| Some((name.clone(), value.as_f64()?));
        Ok(Self(object.iter().filter_map(number).collect()))
    }
}

/// Prints figures as one line of JSON.
fn report(figures: &Figures) -> Result<()> {
    let mut stdout = stdout().lock();
    writeln!(stdout, "{}", figures.to_json())?;
    stdout.flush()?;
    Ok(())
}

/// Runs a workload.
pub fn main(name: &str, options: &Options) -> Result<()> {
    let done = match name {
        "munmap" => workers::munmap(options),
        "swap-in" => workers::swap_in(options),
        "page-out" => fill::page_out(options),
        "memhog" => fill::memhog(options),
        "usemem" => usemem::run(options),
        "usemem-process" => return usemem::process(options),
        "embedded" => embedded::run(options),
        "zipf" => zipf::run(options),
        "exit" => exit::run(options),
        "newcomer" => exit::newcomer(options),
        "worker" => return or_wrong(worker::run(options)),
        "ballast" => return worker::ballast(options),
        other => bail!("unknown workload {other:?}"),
    };
    or_wrong(done.and_then(|figures| report(&figures)))
}

/// Exits with [`WRONG_RESULT`] on a [`Wrong`] error; returns others.
fn or_wrong(done: Result<()>) -> Result<()> {
    if let Err(error) = &done
        && error.is::<Wrong>()
    {
        eprintln!("memfold-lab: {error:#}");
        std::process::exit(WRONG_RESULT);
    }
    done
}

/// `--megabytes`, in pages.
fn pages(options: &Options) -> Result<usize> {
    let megabytes = options.number("megabytes", 64)?;
    Ok((megabytes << 20) / zsmalloc::PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_last_line() {
        let figures = Figures::default()
            .with("seconds", 1.5)
            .with("munmap_ms", 2.0);
        let output = format!("progress\n{}\n", figures.to_json());
        let read = Figures::from_output(&output).unwrap();
        assert_eq!(read.get("seconds"), Some(1.5));
        assert_eq!(read.get("munmap_ms"), Some(2.0));
        assert!(Figures::from_output("killed").is_err());
    }
}
