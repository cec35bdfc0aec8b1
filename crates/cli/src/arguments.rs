//! The command line: one definition for parsing, help, completions and manual pages.

use crate::address::Address;
use crate::remote::RemoteArguments;
use crate::run::observers::ObserverArguments;
use crate::summary::SummaryWhen;
use clap::builder::{FalseyValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use memfold_pager::{Algorithm, Floor, Size, SizeError};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// For `-V`: what a report of a bug should name.
const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("MEMFOLD_COMMIT"),
    ", needs Linux 5.14 or newer on x86-64 or aarch64)"
);

const EXAMPLES: &str = "\
Examples:
  memfold run --limit 2G -- ./program input.dat
  memfold run --limit 50% --stats run.json -- make -j8
  memfold doctor            what this host allows, and how to fix each gap
  memfold stat              statistics of what runs now
  memfold limit 4711 3G     another limit for the run with that PID
  memfold attach 4711 --limit 2G   a program that runs already

Exit status of `run`: the program's own; death by a signal is passed on as such.
126: the program cannot be executed; 127: it was not found; 125: memfold itself failed.";

const RUN_EXAMPLES: &str = "\
SIZE is a number with K, M, G or T (1024s; KB, KiB and Ki are the same), or a percentage of what
the host or the enclosing cgroup allows.

Examples:
  memfold run -- ./program                          under half of the allowed memory
  memfold run --limit 2G -- ./program --its-option
  memfold run --resident 200M -- redis-server       as a memory cgroup with zram counts
  memfold run --limit 1G --swap-file /var/tmp --swap-size 8G -- ./program
  memfold run --limit 1G --remote valkey://10.0.0.7 --remote-replicas 1 -- ./program
  memfold run --limit 1G --stats run.json --quiet -- sh -c 'make && make test'

memfold also waits for processes that the program leaves running (daemons) under the limit: a
first interrupt is passed on to them, a second one kills them.";

const ATTACH_EXAMPLES: &str = "\
The program runs on; memfold stays and holds its memory. Interrupt it (Ctrl-C, SIGTERM), or use memfold detach, to have
all of it brought back. A memfold that is killed takes the program with it, as part of its memory is gone.
Children that it forks come under the same limit; programs that it executes in them do not. You need the right to trace
it by ptrace: as root, or as its own user where kernel.yama.ptrace_scope is 0. Without CAP_SYS_PTRACE in memfold (see
memfold doctor: forks) only programs of Go's linker are taken: sudo setcap cap_sys_ptrace=ep \"$(command -v memfold)\"

Examples:
  memfold attach 4711 --limit 2G
  memfold attach 4711 --resident 500M --swap-file /var/tmp --swap-size 8G
  memfold detach 4711";

const SERVE_EXAMPLES: &str = "\
It serves until SIGTERM, SIGINT or SIGHUP. The contents are gone then; a flush has nothing to do.

Examples:
  memfold serve --nbd unix:disk.sock --size 16G --limit 4G
  nbdinfo \"nbd+unix:///?socket=$PWD/disk.sock\"
  qemu-system-x86_64 … -drive \"file=nbd+unix:///?socket=$PWD/disk.sock,format=raw,if=virtio,discard=unmap\"
  modprobe nbd && nbd-client -unix disk.sock /dev/nbd0 -swap && mkswap /dev/nbd0 && swapon -d /dev/nbd0";

/// Run any program in less memory than it needs: compressed swap in user space.
#[derive(Debug, Parser)]
#[command(name = "memfold", version = VERSION, about, after_help = EXAMPLES, max_term_width = 100)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The variable of `--stats-fd`.
pub const STATS_FD: &str = "MEMFOLD_STATS_FD";

/// Options that exclude each other. (clap would count variables, too.)
const EXCLUSIVE: [(&str, &str); 2] = [("quiet", "verbose"), ("stats", "stats_fd")];

impl Arguments {
    /// Parses a command line and the variables that stand for options. An option overrides the variable of
    /// one that it excludes.
    ///
    /// # Errors
    /// If they are not understood, and to print help or the version.
    pub fn of(line: impl IntoIterator<Item = OsString>) -> Result<Arguments, clap::Error> {
        let mut command = without_empty_variables(Arguments::command());
        let mut matches = command.try_get_matches_from_mut(line)?;
        let overridden = match matches.subcommand() {
            Some(("run" | "attach", held)) => overridden(held, &mut command)?,
            _ => Vec::new(),
        };
        let mut arguments = Arguments::from_arg_matches_mut(&mut matches)
            .map_err(|error| error.format(&mut command))?;
        let options = match &mut arguments.command {
            Command::Run(run) => Some(&mut run.options),
            Command::Attach(attach) => Some(&mut attach.options),
            _ => None,
        };
        if let Some(options) = options {
            overridden.into_iter().for_each(|name| options.forget(name));
        }
        Ok(arguments)
    }
}

/// Has variables that are set to nothing count as not set: templates of CI systems make them.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|argument| match argument.get_env() {
        // What help shows; no variable has such a name.
        Some(name) if is_empty(name) => argument.env("(empty)"),
        _ => argument,
    });
    command.mut_subcommands(without_empty_variables)
}

/// Of each two options that exclude each other, the one that does not count.
fn overridden(
    run: &ArgMatches,
    command: &mut clap::Command,
) -> Result<Vec<&'static str>, clap::Error> {
    use ValueSource::{CommandLine, EnvVariable};
    let mut names = Vec::new();
    for (one, other) in EXCLUSIVE {
        match (run.value_source(one), run.value_source(other)) {
            (Some(CommandLine), Some(CommandLine)) => {
                let [one, other] = [one, other].map(|name| name.replace('_', "-"));
                let text = format!("the argument '--{other}' cannot be used with '--{one}'");
                return Err(command.error(ErrorKind::ArgumentConflict, text));
            }
            (Some(EnvVariable), Some(CommandLine)) => names.push(one),
            (Some(CommandLine), Some(EnvVariable)) => names.push(other),
            _ => {}
        }
    }
    Ok(names)
}

impl HoldOptions {
    /// Takes an option as not given.
    fn forget(&mut self, name: &str) {
        match name {
            "quiet" => self.quiet = false,
            "verbose" => self.verbose = false,
            "stats" => self.stats = None,
            _ => self.stats_fd = None,
        }
    }
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program and all that it starts under a memory limit
    #[command(after_help = RUN_EXAMPLES)]
    #[command(override_usage = "memfold run [OPTIONS] [--] PROGRAM [ARG]...")]
    Run(RunArguments),
    /// Take a running program under a memory limit, until it ends or is detached
    #[command(after_help = ATTACH_EXAMPLES)]
    Attach(AttachArguments),
    /// Bring all memory of a program back and let it go: it runs on without memfold
    Detach(DetachArguments),
    /// Show the statistics of the runs and disks of this user
    Stat(StatArguments),
    /// Watch the runs and disks of this user (? shows the keys)
    #[cfg(feature = "top")]
    Top(TopArguments),
    /// Change the limit of a run
    Limit(LimitArguments),
    /// Page out memory of a run now, whatever its limit is
    Reclaim(ReclaimArguments),
    /// Bring all pages of a run back from its swap file and its remote store, or all blocks of a disk from its swap
    /// file, and stop using them
    Swapoff(SwapOffArguments),
    /// Offer compressed memory as a disk, over the NBD protocol
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArguments),
    /// Check what this host allows, and show how to fix each gap
    Doctor(DoctorArguments),
    /// Print a completion script for a shell
    Completions(CompletionArguments),
    /// Print the manual page, or write all of them into a folder
    Man(ManArguments),
}

/// `memfold run`.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// How programs are held
    #[command(flatten)]
    pub options: HoldOptions,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM", num_args = 1..)]
    pub program: Vec<OsString>,
}

/// `memfold attach`.
#[derive(Debug, Args)]
pub struct AttachArguments {
    /// How the program is held
    #[command(flatten)]
    pub options: HoldOptions,
    /// PID of the program
    #[arg(value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: i32,
}

/// `memfold detach`.
#[derive(Debug, Args)]
pub struct DetachArguments {
    /// PID of a program under a limit
    pub pid: u32,
}

/// How programs are held: under which limit, where pages go, what watches them.
#[derive(Debug, Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an option of its own"
)]
pub struct HoldOptions {
    /// Limit on all that memfold manages: resident pages, compressed pool, metadata; at least 16M
    /// [default: 50%, unless --resident is given]
    #[arg(long, value_name = "SIZE", env = "MEMFOLD_LIMIT")]
    pub limit: Option<Size>,
    /// Limit on the resident pages alone; at least 16M
    #[arg(long, value_name = "SIZE", env = "MEMFOLD_RESIDENT")]
    pub resident: Option<Size>,
    /// Where the limit cannot be held, as what is out is larger than it even when compressed: keep this share of the
    /// programs' memory resident
    #[arg(long, value_name = "PERCENT", default_value_t, env = "MEMFOLD_FLOOR")]
    pub floor: Floor,
    /// Compression algorithm of the pool
    #[arg(long, value_parser = algorithms(), default_value_t, env = "MEMFOLD_ALGO")]
    pub algo: Algorithm,
    /// Write pages that do not fit to an unlinked, encrypted file in DIR
    #[arg(
        long,
        value_name = "DIR",
        requires = "swap_size",
        env = "MEMFOLD_SWAP_FILE"
    )]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub swap_file: Option<PathBuf>,
    /// Maximum size of the swap file; at least 1M
    #[arg(
        long,
        value_name = "SIZE",
        requires = "swap_file",
        env = "MEMFOLD_SWAP_SIZE"
    )]
    pub swap_size: Option<Size>,
    /// Where pages go that fit into neither
    #[command(flatten)]
    pub remote: RemoteArguments,
    /// Recompress pages with Zstandard that were swapped out this long ago, or `off`
    /// [default: with lz4 1m, or sooner while memory is short and CPUs are idle; off with zstd]
    #[arg(long, value_name = "DURATION", env = "MEMFOLD_RECOMPRESS_AFTER")]
    pub recompress_after: Option<After>,
    /// Write pages to the swap file or the remote store that were swapped out this long ago, or `off`:
    /// only when there is no room for them
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10m",
        env = "MEMFOLD_WRITEBACK_AFTER"
    )]
    pub writeback_after: After,
    /// Compress what stays cold though the limit has room for it, as long as programs hardly wait for memory
    #[arg(long, env = "MEMFOLD_PROACTIVE", value_parser = FalseyValueParser::new())]
    pub proactive: bool,
    /// Have the programs' library prepare forks also where the kernel reports them, which takes `CAP_SYS_PTRACE`
    #[arg(long, env = "MEMFOLD_PREPARE_FORKS", value_parser = FalseyValueParser::new())]
    pub prepare_forks: bool,
    /// Ask the kernel which pages are accessed (Linux 7.3 or newer), so that fewer evicted pages refault. Programs that fork may
    /// then exceed the limit by copies of what they share
    #[arg(long, env = "MEMFOLD_TRACK_ACCESSES", value_parser = FalseyValueParser::new())]
    pub track_accesses: bool,
    /// Store pages without a checksum
    #[arg(long, env = "MEMFOLD_NO_CHECKSUM", value_parser = FalseyValueParser::new())]
    pub no_checksum: bool,
    /// Write the statistics of the run to FILE as JSON when it ends (`-`: standard output)
    #[arg(long, value_name = "FILE")]
    #[arg(env = "MEMFOLD_STATS", value_hint = clap::ValueHint::FilePath)]
    pub stats: Option<PathBuf>,
    /// Write them to this open descriptor, which the program does not get (but 0, 1 and 2)
    #[arg(long, value_name = "N", env = STATS_FD)]
    #[arg(value_parser = clap::value_parser!(i32).range(0..))]
    pub stats_fd: Option<i32>,
    /// What watches the run
    #[command(flatten)]
    pub observers: ObserverArguments,
    /// A name for the run, for the summary, stat and the JSON
    #[arg(long, value_name = "NAME", env = "MEMFOLD_NAME", value_hint = clap::ValueHint::Other)]
    pub name: Option<String>,
    /// When to print the summary at the end
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = SummaryWhen::Auto)]
    #[arg(env = "MEMFOLD_SUMMARY")]
    pub summary: SummaryWhen,
    /// Print neither warnings nor, without --summary always, the summary
    #[arg(short, long)]
    #[arg(env = "MEMFOLD_QUIET", value_parser = FalseyValueParser::new())]
    pub quiet: bool,
    /// Print the limit at the start, the summary at the end, and more messages
    #[arg(short, long)]
    #[arg(env = "MEMFOLD_VERBOSE", value_parser = FalseyValueParser::new())]
    pub verbose: bool,
}

impl ValueEnum for SummaryWhen {
    fn value_variants<'a>() -> &'a [SummaryWhen] {
        &[SummaryWhen::Auto, SummaryWhen::Always, SummaryWhen::Never]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            SummaryWhen::Auto => PossibleValue::new("auto").help(
                "If pages went out, the limit was not kept, or more than that was used outside of it",
            ),
            SummaryWhen::Always => PossibleValue::new("always").help("After each run"),
            SummaryWhen::Never => PossibleValue::new("never").help("After none"),
        })
    }
}

/// A size that a run is asked to apply: checked here, understood there.
#[derive(Debug, Clone, PartialEq)]
pub struct SizeText {
    /// As it was written.
    pub text: String,
    /// What it means.
    pub size: Size,
}

impl FromStr for SizeText {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<SizeText, SizeError> {
        let (text, size) = (text.to_owned(), text.parse()?);
        Ok(SizeText { text, size })
    }
}

/// An age at which something is done: a time such as `90s` or `1h 30m`, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct After(pub Option<Duration>);

impl FromStr for After {
    type Err = String;

    fn from_str(text: &str) -> Result<After, String> {
        if text == "off" {
            return Ok(After(None));
        }
        let after = humantime::parse_duration(text)
            .map_err(|error| format!("{error}; give a time such as 90s, 10m or 1h, or off"))?;
        if after < Duration::from_secs(1) {
            return Err("too short; give at least 1s, or off".to_owned());
        }
        Ok(After(Some(after)))
    }
}

/// Compression algorithms, as `--algo` names and describes them.
fn algorithms() -> impl TypedValueParser<Value = Algorithm> {
    let value =
        |algorithm: &Algorithm| PossibleValue::new(algorithm.name()).help(algorithm.description());
    let values = Algorithm::ALL.iter().map(value);
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Algorithm>())
}

/// `memfold stat`.
#[derive(Debug, Args)]
pub struct StatArguments {
    /// Print JSON: one object with PID, else an array
    #[arg(long)]
    pub json: bool,
    /// Print a line (with --json, an object a line) for each every second, or every SECONDS
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
    pub watch: Option<u16>,
    /// PID of a `memfold run`, of the program it started, or of a `memfold serve`
    pub pid: Option<u32>,
}

/// `memfold limit`.
#[derive(Debug, Args)]
pub struct LimitArguments {
    /// PID of a `memfold run`, or of the program it started
    #[arg(index = 1)]
    pub pid: u32,
    /// The new limit; a percentage is of what the host or cgroup of the run allows
    #[arg(index = 2)]
    pub size: SizeText,
    /// Limit the resident pages alone
    #[arg(long)]
    pub resident: bool,
}

/// `memfold reclaim`.
#[derive(Debug, Args)]
pub struct ReclaimArguments {
    /// PID of a `memfold run`, or of the program it started
    #[arg(index = 1)]
    pub pid: u32,
    /// How much of its resident memory to page out, also as a percentage of it [default: all that can be]
    #[arg(index = 2)]
    pub size: Option<SizeText>,
}

/// `memfold top`.
#[cfg(feature = "top")]
#[derive(Debug, Args)]
pub struct TopArguments {
    /// PID of a `memfold run`, of the program it started, or of a `memfold serve`
    pub pid: Option<u32>,
}

/// `memfold serve`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of the command line")]
pub struct ServeArguments {
    /// Where clients connect: unix:PATH (this user's clients alone) or HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    #[cfg_attr(not(feature = "ublk"), arg(required = true))]
    #[cfg_attr(feature = "ublk", arg(required_unless_present = "ublk"))]
    pub nbd: Option<Address>,
    /// Make a block device of this machine, /dev/ublkb0 or the next, as root and with the kernel's
    /// ublk driver
    #[cfg(feature = "ublk")]
    #[arg(long)]
    pub ublk: bool,
    /// Size of the disk, which may be larger than its limit and than all memory; at most 1024T
    #[arg(long, value_name = "SIZE")]
    pub size: Size,
    /// Limit on the memory of the disk: compressed blocks, tables, map; at least 4M. Writes that find no
    /// room fail with ENOSPC [default: 50%]
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Size>,
    /// Compression algorithm
    #[arg(long, value_parser = algorithms(), default_value_t)]
    pub algo: Algorithm,
    /// Write blocks that do not fit to an unlinked, encrypted file in DIR
    #[arg(long, value_name = "DIR", requires = "swap_size")]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub swap_file: Option<PathBuf>,
    /// Maximum size of the swap file; at least 1M
    #[arg(long, value_name = "SIZE", requires = "swap_file")]
    pub swap_size: Option<Size>,
    /// Where blocks go that fit into neither
    #[command(flatten)]
    pub remote: RemoteArguments,
    /// Compress blocks with Zstandard, together with neighbours, that were neither read nor written for this
    /// long, while CPUs are idle, or `off`
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    pub recompress_after: After,
    /// Store blocks without a checksum
    #[arg(long)]
    pub no_checksum: bool,
    /// Listen at an address that other machines can reach. NBD knows no password
    #[arg(long)]
    pub allow_everybody: bool,
    /// Write statistics to FILE as JSON at the end (`-`: standard output)
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub stats: Option<PathBuf>,
    /// Print errors only
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print why clients are disconnected
    #[arg(short, long)]
    pub verbose: bool,
}

/// `memfold swapoff`.
#[derive(Debug, Args)]
pub struct SwapOffArguments {
    /// PID of a `memfold run`, of the program it started, or of a `memfold serve`; not needed if there is
    /// one of them
    pub pid: Option<u32>,
}

/// `memfold doctor`.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `memfold completions`.
#[derive(Debug, Args)]
pub struct CompletionArguments {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// `memfold man`.
#[derive(Debug, Args)]
pub struct ManArguments {
    /// Write memfold.1, memfold-run.1 and so on into this folder, which is made if need be
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &[&str]) -> RunArguments {
        let arguments = ["memfold", "run"].iter().chain(line);
        match Arguments::try_parse_from(arguments)
            .expect("parses")
            .command
        {
            Command::Run(run) => run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_program_keeps_its_own_options() {
        for line in [
            &["--limit", "2G", "--", "sort", "--limit", "-r"][..],
            &["--limit", "2G", "sort", "--limit", "-r"][..],
        ] {
            let run = run(line);
            assert_eq!(run.options.limit, Some(Size::Bytes(2 << 30)));
            assert_eq!(run.program, ["sort", "--limit", "-r"]);
        }
        assert_eq!(run(&["--", "sh", "--", "-x"]).program, ["sh", "--", "-x"]);
    }

    #[test]
    fn times_are_given_as_people_write_them() {
        let line = ["--recompress-after", "90s", "--writeback-after", "off", "x"];
        let run = run(&line);
        let ninety = Duration::from_secs(90);
        assert_eq!(run.options.recompress_after, Some(After(Some(ninety))));
        assert_eq!(run.options.writeback_after, After(None));
        assert_eq!("1h 30m".parse(), Ok(After(Some(60 * ninety))));
        for text in ["", "soon", "10ms", "0s", "-3s"] {
            assert!(text.parse::<After>().is_err(), "{text}");
        }
    }

    #[test]
    fn options_that_exclude_each_other_are_refused() {
        for line in [["-q", "-v"], ["--stats=a", "--stats-fd=3"]] {
            let all = ["memfold", "run"].iter().chain(&line).chain(&["true"]);
            let error = Arguments::of(all.map(Into::into)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{line:?}");
        }
    }

    #[test]
    fn times_of_watching_are_whole_seconds() {
        let stat = |line: &[&str]| {
            let arguments = ["memfold", "stat"].iter().chain(line);
            match Arguments::try_parse_from(arguments).map(|all| all.command) {
                Ok(Command::Stat(stat)) => Some((stat.watch, stat.pid)),
                _ => None,
            }
        };
        assert_eq!(stat(&["--watch", "7"]), Some((Some(1), Some(7))));
        assert_eq!(stat(&["--watch=5"]), Some((Some(5), None)));
        assert_eq!(stat(&["--watch=0"]), None);
    }

    #[test]
    fn a_mistyped_option_is_not_taken_for_the_program() {
        for line in [
            &["--limt", "2G", "--", "true"][..],
            &["--limit", "lots", "true"],
            &["--swap-file", "/tmp", "true"],
            &["--swap-size", "1G", "true"],
            &[],
        ] {
            let arguments = ["memfold", "run"].iter().chain(line);
            assert!(Arguments::try_parse_from(arguments).is_err(), "{line:?}");
        }
    }
}
