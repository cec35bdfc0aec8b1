//! `memfold run`.

mod cpu_time;
mod descendants;
pub mod descriptors;
mod escalation;
mod home;
mod outcome;
mod process;
mod raise;
mod received;
pub mod runtime;
mod signals;
mod stats_file;
mod stats_place;
mod unmanaged;
mod watch;

use crate::arguments::{After, Algorithm, RunArguments};
use crate::doctor;
use crate::failure::Failure;
use crate::format::{self, printable};
use crate::live::{self, Server};
use crate::messages;
use crate::report::{self, Report, Statistics};
use crate::size::Size;
use crate::swapoff;
use memfold_pager::{Limit, Options, Supervisor, SwapFileOptions};
use memfold_sys::probe;
use outcome::Outcome;
use process::Original;
use rustix::fs::Mode;
use rustix::process::umask;
use signals::Signals;
use stats_file::StatsFile;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use watch::Watch;

/// The preload library, built by this crate's build script.
static AGENT: &[u8] = include_bytes!(env!("MEMFOLD_AGENT"));

/// Below this a program's own code and stacks do not fit.
const LEAST_LIMIT: u64 = 16 << 20;

/// A smaller swap file is not worth its name.
const LEAST_SWAP: u64 = 1 << 20;

/// Default age at which pages in an LZ4 pool are recompressed.
const RECOMPRESS_AFTER: Duration = Duration::from_secs(60);

const DEFAULT_LIMIT: Size = Size::Percent(50.0);

/// `memfold run`: returns the program's exit status, or why it was not started.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    messages::show(arguments.quiet)
        .map_err(|error| Failure::own(format!("cannot start the message thread: {error}")))?;
    doctor::check()?;
    let stats_file = arguments
        .stats
        .as_deref()
        .map(StatsFile::open)
        .transpose()?;
    let home = runtime::prepare().map_err(|reasons| {
        let remedy = runtime::remedy();
        Failure::own(format!(
            "cannot create a folder for the run: {reasons}; {remedy}"
        ))
    })?;
    let options = options(arguments, home.path())?;
    let signals =
        Signals::block().map_err(|error| Failure::own(format!("cannot block signals: {error}")))?;
    let original = process::harden()?;
    // What the supervisor makes is the user's own, from its first moment on.
    let mask = umask(Mode::RWXG | Mode::RWXO);
    let supervisor = Supervisor::start(options)
        .map_err(|error| Failure::own(format!("cannot start the supervisor: {error}")));
    umask(mask);
    let supervisor = supervisor?;
    home.stay();
    let started = Instant::now();
    let ended = supervise(arguments, &supervisor, &signals, &original);
    let stats = supervisor.stop();
    home.stay();
    messages::flush();
    let (outcome, unmanaged) = ended?;
    let statistics = Statistics::new(&stats, cpu_time::cpu_seconds(), unmanaged);
    let ending = Ending {
        outcome,
        wall_seconds: started.elapsed().as_secs_f64(),
        statistics,
    };
    ending.report(arguments, stats_file);
    messages::flush();
    Ok(outcome.follow())
}

/// Starts the program and watches until nothing is left to hold.
fn supervise(
    arguments: &RunArguments,
    supervisor: &Supervisor,
    signals: &Signals,
    original: &Original,
) -> Result<(Outcome, u64), Failure> {
    let folder = supervisor.directory();
    let listen = |name: &str| {
        Server::bind(folder, name).map_err(|error| {
            Failure::own(format!("cannot listen in {}: {error}", folder.display()))
        })
    };
    // Before the program starts: once it is visible, its statistics may be asked for.
    let (server, commands) = (listen(live::SOCKET)?, listen(swapoff::SOCKET)?);
    let preload = supervisor.preload_path();
    let program = process::start(&arguments.program, preload, signals, original)?;
    let watch = Watch {
        supervisor,
        signals,
        server,
        commands,
        program,
        command: command_line(&arguments.program),
    };
    Ok(watch.until_done())
}

/// How a run ended.
struct Ending {
    outcome: Outcome,
    wall_seconds: f64,
    statistics: Statistics,
}

impl Ending {
    /// Writes the report and the summary. The program's exit status stays what it is if the
    /// report cannot be written: that is logged.
    fn report(self, arguments: &RunArguments, stats_file: Option<StatsFile>) {
        let name = program_name(&arguments.program);
        if let Some(line) = report::summary(&name, &self.statistics) {
            log::info!("{line}");
        }
        let Some(file) = stats_file else { return };
        let report = Report {
            exit_code: self.outcome.exit_code().into(),
            signal: self.outcome.signal(),
            wall_seconds: self.wall_seconds,
            statistics: self.statistics,
        };
        if let Err(error) = file.write(&report) {
            log::error!("cannot write the statistics to --stats: {error}");
        }
    }
}

fn options(arguments: &RunArguments, runtime_dir: &Path) -> Result<Options, Failure> {
    let limit = limit(arguments)?;
    Ok(Options {
        limit,
        algorithm: arguments.algo.into(),
        checksum: !arguments.no_checksum,
        swap_file: swap_file(arguments)?,
        recompress_after: match (arguments.recompress_after, arguments.algo) {
            (Some(After(after)), _) => after,
            (None, Algorithm::Lz4) => Some(RECOMPRESS_AFTER),
            // The pool is nearly as dense as it would be.
            (None, Algorithm::Zstd) => None,
        },
        writeback_after: arguments.writeback_after.0,
        agent_image: AGENT,
        runtime_dir: runtime_dir.to_owned(),
    })
}

fn swap_file(arguments: &RunArguments) -> Result<Option<SwapFileOptions>, Failure> {
    let (Some(directory), Some(size)) = (&arguments.swap_file, arguments.swap_size) else {
        return Ok(None);
    };
    let bytes = in_bytes("--swap-size", size, LEAST_SWAP)?;
    Ok(Some(SwapFileOptions {
        directory: directory.clone(),
        bytes,
    }))
}

/// A size in bytes, or why it is refused.
fn in_bytes(name: &str, size: Size, least: u64) -> Result<u64, Failure> {
    let allowance = match size {
        Size::Bytes(_) => 0,
        Size::Percent(_) => {
            let allowance = probe::memory_allowance().map_err(|error| {
                Failure::own(format!(
                    "cannot read how much memory the host allows: {error}"
                ))
            })?;
            allowance.bytes
        }
    };
    let bytes = size.bytes_of(allowance);
    if bytes < least {
        return Err(Failure::own(format!(
            "{name}: {} is too little; give at least {}",
            format::bytes(bytes),
            format::bytes(least)
        )));
    }
    Ok(bytes)
}

fn limit(arguments: &RunArguments) -> Result<Limit, Failure> {
    let total = match (arguments.limit, arguments.resident) {
        (None, None) => Some(DEFAULT_LIMIT),
        (total, _) => total,
    };
    let bytes = |name: &str, size: Option<Size>| {
        size.map(|size| in_bytes(name, size, LEAST_LIMIT))
            .transpose()
    };
    Ok(Limit {
        total_bytes: bytes("--limit", total)?,
        resident_bytes: bytes("--resident", arguments.resident)?,
    })
}

/// The program's name without its folder, fit for a terminal.
fn program_name(program: &[OsString]) -> String {
    let name = program
        .first()
        .map(Path::new)
        .and_then(Path::file_name)
        .unwrap_or_default();
    printable(&name.to_string_lossy())
}

/// The command line, fit for a terminal and not too long.
fn command_line(program: &[OsString]) -> String {
    const LONGEST: usize = 200;
    let words: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
    printable(&words.join(" ")).chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(limit: Option<Size>, resident: Option<Size>) -> RunArguments {
        RunArguments {
            limit,
            resident,
            algo: Algorithm::Lz4,
            no_checksum: false,
            swap_file: None,
            swap_size: None,
            recompress_after: None,
            writeback_after: After(None),
            stats: None,
            quiet: false,
            program: vec!["true".into()],
        }
    }

    #[test]
    fn half_is_the_default_only_where_nothing_is_said() {
        let allowed = probe::memory_allowance().unwrap().bytes;
        let none = limit(&arguments(None, None)).unwrap();
        assert_eq!(
            (none.total_bytes, none.resident_bytes),
            (Some(allowed / 2), None)
        );
        let resident = limit(&arguments(None, Some(Size::Bytes(LEAST_LIMIT)))).unwrap();
        assert_eq!(
            (resident.total_bytes, resident.resident_bytes),
            (None, Some(LEAST_LIMIT))
        );
    }

    #[test]
    fn too_little_is_refused_in_one_line() {
        for (total, resident) in [
            (Some(Size::Bytes(1 << 20)), None),
            (None, Some(Size::Bytes(0))),
        ] {
            let failure = limit(&arguments(total, resident)).unwrap_err().to_string();
            assert!(
                failure.contains("at least 16.0 MiB") && !failure.contains('\n'),
                "{failure}"
            );
        }
    }

    #[test]
    fn names_do_not_steer_the_terminal() {
        let program = ["/usr/bin/so\u{1b}[31mrt".into(), "-n\n".into()];
        assert_eq!(program_name(&program), "so?[31mrt");
        assert_eq!(command_line(&program), "/usr/bin/so?[31mrt -n ");
    }
}
