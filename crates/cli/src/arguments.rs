//! The command line: one definition for parsing, help, completions and manual pages.

use crate::size::Size;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  memfold run --limit 2G -- ./program input.dat
  memfold run --limit 50% --stats run.json -- make -j8
  memfold doctor            what this host allows, and how to fix each gap
  memfold stat              statistics of what runs now

Exit status of `run`: the program's own; death by a signal is passed on as such.
126: the program cannot be executed; 127: it was not found; 125: memfold itself failed.";

const RUN_EXAMPLES: &str = "\
SIZE is a number with K, M, G or T (1024s), or a percentage of what the host or the
enclosing cgroup allows.

Examples:
  memfold run -- ./program                          under half of the allowed memory
  memfold run --limit 2G -- ./program --its-option
  memfold run --resident 200M -- redis-server       as a memory cgroup with zram counts
  memfold run --limit 1G --swap-file /var/tmp --swap-size 8G -- ./program
  memfold run --limit 1G --stats run.json --quiet -- sh -c 'make && make test'

memfold also waits for processes that the program leaves running (daemons) under the limit: a
first interrupt is passed on to them, a second one kills them.";

/// Run any program in less memory than it needs: compressed swap in user space.
#[derive(Debug, Parser)]
#[command(name = "memfold", version, about, after_help = EXAMPLES, max_term_width = 100)]
#[command(disable_help_subcommand = true)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program and all that it starts under a memory limit
    #[command(after_help = RUN_EXAMPLES)]
    #[command(override_usage = "memfold run [OPTIONS] [--] PROGRAM [ARG]...")]
    Run(RunArguments),
    /// Show the statistics of the runs of this user
    Stat(StatArguments),
    /// Watch the runs of this user (q ends it)
    #[cfg(feature = "top")]
    Top(TopArguments),
    /// Bring all pages of a run back from its swap file, and stop using the file
    Swapoff(SwapOffArguments),
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
    /// Limit on all that memfold manages: resident pages, compressed pool, metadata
    /// [default: 50%, unless --resident is given]
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Size>,
    /// Limit on the resident pages alone
    #[arg(long, value_name = "SIZE")]
    pub resident: Option<Size>,
    /// Compression algorithm of the pool
    #[arg(long, value_enum, default_value_t = Algorithm::Lz4)]
    pub algo: Algorithm,
    /// Write pages that do not fit to an unlinked, encrypted file in DIR
    #[arg(long, value_name = "DIR", requires = "swap_size")]
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub swap_file: Option<PathBuf>,
    /// Maximum size of the swap file
    #[arg(long, value_name = "SIZE", requires = "swap_file")]
    pub swap_size: Option<Size>,
    /// Recompress pages with Zstandard that were swapped out this long ago, or `off`
    /// [default: 1m with lz4, off with zstd]
    #[arg(long, value_name = "DURATION")]
    pub recompress_after: Option<After>,
    /// Write pages to the swap file that were swapped out this long ago, or `off`: only when there is no
    /// room for them
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    pub writeback_after: After,
    /// Store pages without a checksum
    #[arg(long)]
    pub no_checksum: bool,
    /// Write the statistics of the run to FILE as JSON when it ends (`-`: standard output)
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// Print neither warnings nor the summary
    #[arg(short, long)]
    pub quiet: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM", num_args = 1..)]
    #[arg(value_hint = clap::ValueHint::CommandWithArguments)]
    pub program: Vec<OsString>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// The fastest
    Lz4,
    /// Smaller and slower
    Zstd,
}

impl From<Algorithm> for memfold_pager::Algorithm {
    fn from(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Lz4 => Self::Lz4,
            Algorithm::Zstd => Self::Zstd,
        }
    }
}

/// `memfold stat`.
#[derive(Debug, Args)]
pub struct StatArguments {
    /// Print JSON: one object with PID, else an array
    #[arg(long)]
    pub json: bool,
    /// PID of a `memfold run`, or of the program it started
    pub pid: Option<u32>,
}

/// `memfold top`.
#[cfg(feature = "top")]
#[derive(Debug, Args)]
pub struct TopArguments {
    /// PID of a `memfold run`, or of the program it started
    pub pid: Option<u32>,
}

/// `memfold swapoff`.
#[derive(Debug, Args)]
pub struct SwapOffArguments {
    /// PID of a `memfold run`, or of the program it started; not needed if there is one
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
    /// Write memfold.1, memfold-run.1 and so on into this folder
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

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
            assert_eq!(run.limit, Some(Size::Bytes(2 << 30)));
            assert_eq!(run.program, ["sort", "--limit", "-r"]);
        }
        assert_eq!(run(&["--", "sh", "--", "-x"]).program, ["sh", "--", "-x"]);
    }

    #[test]
    fn times_are_given_as_people_write_them() {
        let line = ["--recompress-after", "90s", "--writeback-after", "off", "x"];
        let run = run(&line);
        let ninety = Duration::from_secs(90);
        assert_eq!(run.recompress_after, Some(After(Some(ninety))));
        assert_eq!(run.writeback_after, After(None));
        assert_eq!("1h 30m".parse(), Ok(After(Some(60 * ninety))));
        for text in ["", "soon", "10ms", "0s", "-3s"] {
            assert!(text.parse::<After>().is_err(), "{text}");
        }
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
