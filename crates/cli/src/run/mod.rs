//! `memfold run`.

mod attached;
mod attachments;
pub mod cpu_time;
mod descendants;
pub mod descriptors;
pub mod escalation;
mod executable;
pub mod home;
mod host_swap;
mod interpreter;
mod job;
pub mod limits;
mod metrics;
pub mod observers;
mod outcome;
mod process;
pub mod raise;
mod received;
pub mod runtime;
mod signals;
pub mod stats_file;
mod stats_place;
mod stillness;
mod thrashing;
mod timeline;
mod unmanaged;
mod watch;

use crate::arguments::{After, AttachArguments, HoldOptions, RunArguments};
use crate::control::{self, instance_of};
use crate::doctor;
use crate::failure::Failure;
use crate::format::{printable, shown};
use crate::instance::Instance;
use crate::live::{self, Server};
use crate::messages;
use crate::remote;
use crate::report::{Report, Statistics};
use crate::summary::{SummaryWhen, summary};
use attached::AttachedWatch;
use cpu_time::SinceAttached;
use limits::{limit, swap_file};
use memfold_pager::{Algorithm, AttachError, Options, Recompress, RemoteOptions, Supervisor};
use memfold_sys::probe::{self, Managed};
use memfold_sys::process::Process;
use nix::sys::signal::Signal;
use observers::Observers;
use outcome::Outcome;
use process::Original;
use rustix::fs::Mode;
use rustix::process::umask;
use signals::Signals;
use stats_file::StatsFile;
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use timeline::About;
use watch::{Watch, Watched};

/// The preload library, built by this crate's build script.
static AGENT: &[u8] = include_bytes!(env!("MEMFOLD_AGENT"));

/// Default age at which pages in an LZ4 pool are recompressed.
const RECOMPRESS_AFTER: Duration = Duration::from_secs(60);

/// `memfold run`: returns the program's exit status, or why it was not started.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    hold(&arguments.options, &Subject::Program(&arguments.program))
}

/// `memfold attach`: returns once the program has ended or is detached.
pub fn attach(arguments: &AttachArguments) -> Result<ExitCode, Failure> {
    let pid = arguments.pid;
    let process = Process::open(pid).map_err(|error| {
        let text = format!("cannot attach PID {pid}: {error}; is it the PID of a process?");
        Failure::own(text)
    })?;
    refuse_itself(pid, &process)?;
    hold(&arguments.options, &Subject::Process(Arc::new(process)))
}

/// Refuses memfold's own PID, which other commands take, in place of its program's.
fn refuse_itself(pid: i32, process: &Process) -> Result<(), Failure> {
    // Others are not asked for: each run may take a while to answer.
    let is_named = process
        .text("comm")
        .is_ok_and(|name| name.trim_end() == "memfold");
    let (true, Ok((_, own))) = (is_named, instance_of(Some(pid.cast_unsigned()))) else {
        return Ok(());
    };
    if own.pid() != pid.cast_unsigned() {
        return Ok(());
    }
    let holds = match &own {
        Instance::Run(run) => format!(
            "its program, PID {}, is under its limit already; memfold limit {pid} SIZE changes that",
            run.program_pid
        ),
        Instance::Disk(_) => {
            "it serves a disk, whose limit is set when it starts (memfold serve --limit)".to_owned()
        }
    };
    Err(Failure::own(format!(
        "cannot attach PID {pid}: it is memfold itself; {holds}"
    )))
}

/// What is held.
enum Subject<'a> {
    /// A program that is to be started, and its arguments.
    Program(&'a [OsString]),
    /// One that runs already.
    Process(Arc<Process>),
}

impl Subject<'_> {
    fn managed(&self) -> Managed {
        match self {
            Subject::Program(_) => Managed::Started,
            Subject::Process(_) => Managed::Attached,
        }
    }

    /// The program's name without its folder, fit for a terminal.
    fn name(&self) -> String {
        match self {
            Subject::Program(program) => program_name(program),
            Subject::Process(process) => {
                printable(process.text("comm").unwrap_or_default().trim_end())
            }
        }
    }

    /// The command line, fit for a terminal and not too long.
    fn command(&self) -> String {
        match self {
            Subject::Program(program) => command_line(program),
            Subject::Process(process) => {
                // The program chooses its length.
                const MOST: u64 = 4096;
                let mut words = Vec::new();
                if let Ok(file) = process.open_file("cmdline") {
                    let _ = file.take(MOST).read_to_end(&mut words);
                }
                let words = String::from_utf8_lossy(&words);
                shown(words.trim_end_matches('\0').replace('\0', " ").as_str())
            }
        }
    }
}

/// Holds programs until nothing is left to hold, and ends as the program did.
fn hold(arguments: &HoldOptions, subject: &Subject<'_>) -> Result<ExitCode, Failure> {
    let outcome = hold_to_the_end(arguments, subject)?;
    Ok(outcome.map_or(ExitCode::SUCCESS, Outcome::follow))
}

/// Returns how the program ended, which is not known of one that was attached.
fn hold_to_the_end(
    arguments: &HoldOptions,
    subject: &Subject<'_>,
) -> Result<Option<Outcome>, Failure> {
    // Before any descriptor is opened that could have its number.
    let stats_fd = arguments
        .stats_fd
        .map(StatsFile::of_descriptor)
        .transpose()?;
    messages::show(messages::level(arguments.quiet, arguments.verbose))
        .map_err(|error| Failure::own(format!("cannot start the message thread: {error}")))?;
    doctor::check()?;
    let stats_file = match arguments.stats.as_deref() {
        Some(path) => Some(StatsFile::open(path)?),
        None => stats_fd,
    };
    let observers = Observers::open(&arguments.observers)?;
    let home = runtime::prepare().map_err(|reasons| {
        let remedy = runtime::remedy();
        Failure::own(format!(
            "cannot create a folder for the run: {reasons}; {remedy}"
        ))
    })?;
    let mut options = options(arguments, subject.managed(), home.path())?;
    limits::note(arguments, options.limit);
    let signals =
        Signals::block().map_err(|error| Failure::own(format!("cannot block signals: {error}")))?;
    let original = process::harden()?;
    let store = remote::open(&arguments.remote);
    // It may have waited for the store for long.
    if let Some(signal) = signals.asks_to_end() {
        return Ok(Some(Outcome::Killed(signal as i32)));
    }
    let store = store?;
    options.remote = store.as_ref().map(|store| RemoteOptions {
        tier: store.tier(),
        keep_copies: arguments.remote.remote_keep_copy,
    });
    // What the supervisor makes is the user's own, from its first moment on.
    let mask = umask(Mode::RWXG | Mode::RWXO);
    let supervisor = Supervisor::start(options)
        .map_err(|error| Failure::own(format!("cannot start the supervisor: {error}")));
    umask(mask);
    let supervisor = supervisor?;
    home.stay();
    let started = Instant::now();
    let (name, command) = (subject.name(), subject.command());
    let ended = supervise(
        (arguments, subject),
        &supervisor,
        (&signals, &original),
        observers,
    );
    let stats = supervisor.stop();
    home.stay();
    // Removes all pages from it.
    drop(store);
    messages::flush();
    let Watched {
        outcome,
        unmanaged,
        programs,
    } = ended?;
    let statistics = Statistics::new(&stats, cpu_time::cpu_seconds(), unmanaged, programs);
    let ending = Ending {
        name,
        command,
        outcome,
        wall_seconds: started.elapsed().as_secs_f64(),
        statistics,
    };
    ending.report(arguments, stats_file);
    messages::flush();
    Ok(outcome)
}

/// Starts or attaches the program and watches until nothing is left to hold.
fn supervise(
    (arguments, subject): (&HoldOptions, &Subject<'_>),
    supervisor: &Supervisor,
    (signals, original): (&Signals, &Original),
    observers: Observers,
) -> Result<Watched, Failure> {
    let folder = supervisor.directory();
    let listen = |name: &str| {
        Server::bind(folder, name).map_err(|error| {
            Failure::own(format!("cannot listen in {}: {error}", folder.display()))
        })
    };
    // Before the program starts: once it is visible, its statistics may be asked for.
    let (server, commands) = (listen(live::SOCKET)?, listen(control::SOCKET)?);
    let unmanaged = Arc::new(AtomicU64::new(0));
    let command = subject.command();
    let observing = observers.start(supervisor, &subject.name(), &unmanaged)?;
    let name = arguments.name.as_deref().map(shown);
    if supervisor.carries() {
        if let Some(bugs) = probe::move_bugs(subject.managed()).forbid {
            log::warn!("{bugs}");
        }
        log::warn!(
            "UFFDIO_MOVE is not used here (memfold doctor says why): what a device writes to a page while memfold takes it \
             away is lost; programs that read with O_DIRECT or have io_uring's fixed buffers must lock them (mlock)"
        );
    }
    let watched = match (signals.asks_to_end(), subject) {
        (Some(signal), _) => Watched::not_started(signal, name),
        (None, Subject::Program(program)) => {
            let preload = supervisor.preload_path();
            let program = process::start(program, preload, signals, original)?;
            signals.program_started();
            let watch = Watch {
                supervisor,
                signals,
                server,
                commands,
                program,
                command: command.clone(),
                name,
                unmanaged,
            };
            watch.until_done()
        }
        (None, Subject::Process(process)) => {
            // A second signal must not end memfold from here on: the program would end with it.
            signals.escalation().disable();
            let cpu_time = SinceAttached::new(process.clone());
            if let Some(signal) = attach_to(supervisor, signals, process)? {
                Watched::not_started(signal, name)
            } else {
                let watch = AttachedWatch {
                    supervisor,
                    signals,
                    server,
                    commands,
                    process: process.clone(),
                    command: command.clone(),
                    name,
                    cpu_time,
                };
                watch.until_done()
            }
        }
    };
    let outcome = watched.outcome;
    observing.finish(&About {
        command,
        outcome: match outcome {
            Some(Outcome::Killed(signal)) => format!("killed by signal {signal}"),
            Some(Outcome::Exited(code)) => format!("status {code}"),
            None => "ended or detached".to_owned(),
        },
    });
    Ok(watched)
}

/// Attaches a process, unless a signal asks memfold to end before a thread of it could be stopped: returns that.
fn attach_to(
    supervisor: &Supervisor,
    signals: &Signals,
    process: &Arc<Process>,
) -> Result<Option<Signal>, Failure> {
    /// A thread may have no CPU on which to stop, or be where nothing interrupts it.
    const PATIENCE: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(2);
    let since = Instant::now();
    loop {
        match supervisor.attacher().attach(process) {
            Ok(()) => return Ok(None),
            Err(AttachError::Busy) if since.elapsed() < PATIENCE => {}
            Err(error) => {
                let pid = process.pid();
                let text = format!("cannot attach PID {pid}: {error}");
                return Err(Failure::own(text));
            }
        }
        if let Some(signal) = signals.asks_to_end() {
            return Ok(Some(signal));
        }
        std::thread::sleep(PAUSE);
    }
}

/// How a run ended.
struct Ending {
    name: String,
    command: String,
    outcome: Option<Outcome>,
    wall_seconds: f64,
    statistics: Statistics,
}

impl Ending {
    /// Writes the report and the summary. The program's exit status stays what it is if the
    /// report cannot be written: that is logged.
    fn report(self, arguments: &HoldOptions, stats_file: Option<StatsFile>) {
        for line in summary(&self.name, &self.statistics, when(arguments)) {
            messages::print(&line);
        }
        let Some(file) = stats_file else { return };
        let report = Report {
            exit_code: self.outcome.map(Outcome::exit_code),
            signal: self.outcome.and_then(Outcome::signal),
            wall_seconds: self.wall_seconds,
            command: self.command,
            memfold_version: env!("CARGO_PKG_VERSION"),
            limit_kept: self.statistics.is_limit_kept(),
            statistics: self.statistics,
        };
        if let Err(error) = file.write(&report) {
            log::error!("cannot write --stats: {error}; the statistics of this run are lost");
        }
    }
}

fn options(
    arguments: &HoldOptions,
    managed: Managed,
    runtime_dir: &Path,
) -> Result<Options, Failure> {
    let limit = limit(arguments)?;
    Ok(Options {
        limit,
        floor: arguments.floor,
        algorithm: arguments.algo,
        checksum: !arguments.no_checksum,
        swap_file: swap_file(arguments.swap_file.as_deref(), arguments.swap_size)?,
        remote: None,
        recompress: match (arguments.recompress_after, arguments.algo) {
            (Some(After(after)), _) => after.map(|after| Recompress {
                after,
                under_pressure: false,
            }),
            (None, Algorithm::Lz4) => Some(Recompress {
                after: RECOMPRESS_AFTER,
                under_pressure: true,
            }),
            // The pool is nearly as dense as it would be.
            (None, _) => None,
        },
        writeback_after: arguments.writeback_after.0,
        proactive: arguments.proactive,
        prepare_forks: arguments.prepare_forks,
        track_accesses: arguments.track_accesses,
        managed,
        agent_image: AGENT,
        runtime_dir: runtime_dir.to_owned(),
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
    let words: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
    shown(&words.join(" "))
}

/// When the summary is printed.
fn when(arguments: &HoldOptions) -> SummaryWhen {
    match arguments.summary {
        SummaryWhen::Auto if arguments.quiet => SummaryWhen::Never,
        SummaryWhen::Auto if arguments.verbose => SummaryWhen::Always,
        when => when,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_is_quiet_unless_a_summary_is_asked_for() {
        use crate::arguments::{Arguments, Command};
        use clap::Parser;
        for (line, expected) in [
            (&["true"][..], SummaryWhen::Auto),
            (&["-q", "true"], SummaryWhen::Never),
            (&["-v", "true"], SummaryWhen::Always),
            (&["-q", "--summary", "always", "true"], SummaryWhen::Always),
            (&["-v", "--summary=never", "true"], SummaryWhen::Never),
        ] {
            let all = ["memfold", "run"].iter().chain(line);
            let Command::Run(arguments) = Arguments::parse_from(all).command else {
                panic!("{line:?}");
            };
            assert_eq!(when(&arguments.options), expected, "{line:?}");
        }
    }

    #[test]
    fn names_do_not_steer_the_terminal() {
        let program = ["/usr/bin/so\u{1b}[31mrt".into(), "-n\n".into()];
        assert_eq!(program_name(&program), "so?[31mrt");
        assert_eq!(command_line(&program), "/usr/bin/so?[31mrt -n ");
    }
}
