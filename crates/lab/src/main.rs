//! `memfold-lab`: experiments on compressed swap. Designs that were published stand beside those
//! that replace them here, with the published figures, in one run on this machine.

mod before;
mod chain;
mod clock;
mod contents;
mod exit;
mod free;
mod host;
mod kernel;
mod mapping;
mod pool;
mod random;
mod report;
mod report_html;
mod table;
mod trace;
mod virtual_slots;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use lexopt::prelude::*;

const USAGE: &str = "\
Usage: memfold-lab EXPERIMENT [--json] [OPTIONS]

Experiments:
  chain    how long zspages should be: the kernel's two policies and ours
  pool     memory taken for each stored byte, against mimalloc and jemalloc
             [--trace LIST]
  free     what freeing costs the caller and all processors, and when the memory is back
             [--megabytes LIST] [--threads LIST] [--compactor LIST] [--cpus LIST]
             [--variant LIST] [--runs N]
  kernel   workloads under memfold and under this host's own swap, in turn
             [--against native,zram:lz4,zram:lzo-rle,zswap,memfold,memfold-embedded]
             [--workload LIST]
             [--scale F] [--runs N] [--memfold PATH] [--python PATH] [--swap-dir DIR]
  report   a page of all experiments, with plots, beside the published figures
             --out DIR [--from FILES] [--experiments LIST] [options of kernel]
  table    the swap table against a tree for every 64 MB under a lock with a byte map
             [--threads LIST] [--slots N] [--megabytes N] [--runs N]
  virtual  virtual slots against slots with a fixed backend, each measure on and off
             [--workload LIST] [--variant LIST] [--threads N] [--megabytes N] [--runs N]
  exit     programs are killed, mostly swapped out, while another starts: synchronous release,
           the gather, and this host's zram (needs root)
             [--programs N] [--megabytes N] [--newcomer-megabytes N] [--variant LIST] [--runs N]
  trace    record the compressed page sizes of a running process
             --pid PID --algo lz4|zstd --output FILE [--pages N]

LISTs are separated by commas. --json prints one JSON object.
";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            host::wait_if_leaving();
            eprintln!("memfold-lab: {error:#}");
            ExitCode::from(125)
        }
    }
}

/// What the command line says after the experiment's name.
#[derive(Debug, Default)]
pub struct Options {
    json: bool,
    flags: Vec<String>,
    values: Vec<(String, String)>,
}

/// The options that take no value.
const FLAGS: &[&str] = &["markdown"];

impl Options {
    fn parse(parser: &mut lexopt::Parser, known: &[&str]) -> Result<Self> {
        let mut options = Self::default();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("json") => options.json = true,
                Long(name) if known.contains(&name) && FLAGS.contains(&name) => {
                    options.flags.push(name.to_owned());
                }
                Long(name) if known.contains(&name) => {
                    let name = name.to_owned();
                    options.values.push((name, parser.value()?.string()?));
                }
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(options)
    }

    /// As if they had been given.
    #[cfg(test)]
    pub fn of(values: &[(&str, &str)]) -> Self {
        let owned = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Self {
            json: true,
            flags: Vec::new(),
            values: values.iter().map(owned).collect(),
        }
    }

    /// Whether an option that takes no value was given.
    pub fn has(&self, name: &str) -> bool {
        self.flags.iter().any(|given| given == name)
    }

    /// These, where nothing else was given.
    pub fn or(mut self, defaults: &[(&str, &str)]) -> Self {
        for &(name, value) in defaults {
            if self.value(name).is_none() {
                self.values.push((name.to_owned(), value.to_owned()));
            }
        }
        self
    }

    /// The last value given for an option.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values
            .iter()
            .rev()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// A list, or what it is by default.
    pub fn list<'a>(&'a self, name: &str, default: &'a str) -> Vec<&'a str> {
        self.value(name)
            .unwrap_or(default)
            .split(',')
            .map(str::trim)
            .collect()
    }

    /// A number, or what it is by default.
    pub fn number(&self, name: &str, default: usize) -> Result<usize> {
        let Some(value) = self.value(name) else {
            return Ok(default);
        };
        value
            .parse()
            .with_context(|| format!("--{name} takes a number, not {value:?}"))
    }

    /// A list of numbers, or what it is by default.
    pub fn numbers(&self, name: &str, default: &str) -> Result<Vec<usize>> {
        self.list(name, default)
            .into_iter()
            .map(|value| {
                value
                    .parse()
                    .with_context(|| format!("--{name} takes numbers, not {value:?}"))
            })
            .collect()
    }
}

fn run() -> Result<()> {
    let mut parser = lexopt::Parser::from_env();
    let experiment = match parser.next()? {
        Some(Value(name)) => name,
        Some(Long("help") | Short('h')) => OsString::from("help"),
        Some(other) => return Err(other.unexpected().into()),
        None => bail!("no experiment given\n\n{USAGE}"),
    };
    let experiment = experiment.string()?;
    match experiment.as_str() {
        "help" => print!("{USAGE}"),
        "chain" => {
            let options = Options::parse(&mut parser, &[])?;
            chain::run()?.print(options.json);
        }
        "pool" => {
            let options = Options::parse(&mut parser, &["trace"])?;
            pool::run(&options)?.print(options.json);
        }
        pool::CHILD => {
            let options = Options::parse(&mut parser, &["variant", "trace"])?;
            pool::run_child(&options)?;
        }
        "free" => {
            let known = [
                "megabytes",
                "threads",
                "compactor",
                "cpus",
                "variant",
                "runs",
            ];
            let options = Options::parse(&mut parser, &known)?;
            free::run(&options)?.print(options.json);
        }
        "kernel" => {
            let options = Options::parse(&mut parser, kernel::OPTIONS)?;
            kernel::run(&options)?.print(options.json);
        }
        "report" => {
            let known = [kernel::OPTIONS, report_html::OPTIONS].concat();
            report_html::run(Options::parse(&mut parser, &known)?)?;
        }
        kernel::WORKLOAD => kernel::run_workload(&mut parser)?,
        host::GUARDIAN => host::guard()?,
        "table" => {
            let options = Options::parse(&mut parser, &["threads", "slots", "megabytes", "runs"])?;
            table::run(&options)?.print(options.json);
        }
        "virtual" => {
            let known = ["workload", "variant", "threads", "megabytes", "runs"];
            let options = Options::parse(&mut parser, &known)?;
            virtual_slots::run(&options)?.print(options.json);
        }
        "exit" => {
            let known = [
                "programs",
                "megabytes",
                "newcomer-megabytes",
                "variant",
                "runs",
            ];
            let options = Options::parse(&mut parser, &known)?;
            exit::run(&options)?.print(options.json);
        }
        exit::PROGRAM => exit::hold(&Options::parse(&mut parser, &["pages"])?)?,
        exit::NEWCOMER => exit::start(&Options::parse(&mut parser, &["pages"])?)?,
        "trace" => {
            let options = Options::parse(&mut parser, &["pid", "algo", "output", "pages"])?;
            record(&options)?;
        }
        other => bail!("unknown experiment {other:?}\n\n{USAGE}"),
    }
    Ok(())
}

fn record(options: &Options) -> Result<()> {
    let pid = options.value("pid").context("--pid is missing")?;
    let pid = pid
        .parse()
        .with_context(|| format!("{pid:?} is no process id"))?;
    let algorithm = trace::Algorithm::parse(options.value("algo").context("--algo is missing")?)?;
    let output = PathBuf::from(options.value("output").context("--output is missing")?);
    trace::record(pid, algorithm, options.number("pages", 16_384)?, &output)
}
