//! The command line: one definition for parsing, help, completions and manual pages.

use crate::size::Size;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  memfold run --limit 2G -- ./program input.dat
  memfold run --limit 50% --stats run.json -- make -j8
  memfold doctor            what this host allows, and what mends each gap
  memfold top               watch what runs now

Exit status of `run`: the program's own; death by a signal is passed on as such.
126: the program cannot be executed; 127: it was not found; 125: memfold itself failed.";

const RUN_EXAMPLES: &str = "\
SIZE is a number with K, M, G or T (1024s), or a percentage of what the host or the
enclosing cgroup allows.

Examples:
  memfold run -- ./program                          under half of the allowed memory
  memfold run --limit 2G -- ./program --its-option
  memfold run --resident 200M -- redis-server       as a memory cgroup with zram counts
  memfold run --limit 1G --stats run.json --quiet -- sh -c 'make && make test'

memfold waits for what the program leaves behind as well (daemons), as long as it is under
the limit; a first interrupt then passes the signal on to it, a second one kills it.";

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
    /// Show the figures of the runs of this user
    Stat(StatArguments),
    /// Watch the runs of this user (q ends it)
    Top(TopArguments),
    /// Tell what this host allows, and what mends each gap
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
    /// Keep no checksum of the stored pages
    #[arg(long)]
    pub no_checksum: bool,
    /// Write the figures of the run to FILE as JSON when it ends
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

/// Compression algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// The fastest
    Lz4,
    /// Smaller and slower
    Zstd,
}

/// `memfold stat`.
#[derive(Debug, Args)]
pub struct StatArguments {
    /// Print JSON: one object with PID, else an array
    #[arg(long)]
    pub json: bool,
    /// Process number of a `memfold run`, or of the program it started
    pub pid: Option<u32>,
}

/// `memfold top`.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Process number of a `memfold run`, or of the program it started
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
    fn a_mistyped_option_is_not_taken_for_the_program() {
        for line in [
            &["--limt", "2G", "--", "true"][..],
            &["--limit", "lots", "true"],
            &[],
        ] {
            let arguments = ["memfold", "run"].iter().chain(line);
            assert!(Arguments::try_parse_from(arguments).is_err(), "{line:?}");
        }
    }
}
