//! The command line: one definition for parsing, help, completions and the manual pages.

use std::time::Duration;

use crate::output::say;

use anyhow::{Context, Result, bail};
use clap::{
    Arg, ArgAction, ArgMatches, Command, ValueEnum, ValueHint, builder::PossibleValuesParser,
    error::ErrorKind,
};

use crate::{
    chain, exit, free, growth,
    help::{EXAMPLES, GROWTH_NOTES, KERNEL_NOTES, REPORT_NOTES},
    host, kernel, picture, policy, pool, proactive,
    report::Report,
    report_html, simulate, soak, table, trace, virtual_slots,
};

/// The options given on the command line.
#[derive(Debug, Default)]
pub struct Options {
    /// Whether `--json` was given.
    pub json: bool,
    flags: Vec<String>,
    values: Vec<(String, String)>,
}

impl Options {
    fn of_matches(matches: &ArgMatches) -> Self {
        let mut options = Self::default();
        for id in matches.ids().map(clap::Id::as_str) {
            if let Ok(Some(value)) = matches.try_get_one::<String>(id) {
                options.values.push((id.to_owned(), value.clone()));
            } else if matches!(matches.try_get_one::<bool>(id), Ok(Some(true))) {
                options.flags.push(id.to_owned());
            }
        }
        options.json = options.has("json");
        options
    }

    /// Options with these values, as if given on the command line.
    #[cfg(test)]
    pub fn of(values: &[(&str, &str)]) -> Self {
        Self::default().or(values)
    }

    /// Whether a flag was given.
    pub fn has(&self, name: &str) -> bool {
        self.flags.iter().any(|given| given == name)
    }

    /// Adds defaults for options that were not given.
    pub fn or(mut self, defaults: &[(&str, &str)]) -> Self {
        for &(name, value) in defaults {
            if self.value(name).is_none() {
                self.values.push((name.to_owned(), value.to_owned()));
            }
        }
        self
    }

    /// The value given for an option.
    pub fn value(&self, name: &str) -> Option<&str> {
        let found = self.values.iter().find(|(given, _)| given == name);
        found.map(|(_, value)| value.as_str())
    }

    /// A comma-separated list, or `default`.
    pub fn list<'a>(&'a self, name: &str, default: &'a str) -> Vec<&'a str> {
        self.value(name)
            .unwrap_or(default)
            .split(',')
            .map(str::trim)
            .collect()
    }

    /// The elements of `all` that an option lists, in the order of the list; all if it is not given.
    pub fn named<T: Copy>(
        &self,
        option: &str,
        all: &[(&'static str, T)],
    ) -> Result<Vec<(&'static str, T)>> {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        let names = names.join(",");
        self.list(option, &names)
            .into_iter()
            .map(|wanted| {
                let found = all.iter().find(|(name, _)| *name == wanted);
                found
                    .copied()
                    .with_context(|| format!("unknown {option} {wanted:?}; use one of {names}"))
            })
            .collect()
    }

    /// A number, or `default`.
    pub fn number(&self, name: &str, default: usize) -> Result<usize> {
        let Some(value) = self.value(name) else {
            return Ok(default);
        };
        value
            .parse()
            .with_context(|| format!("--{name} takes a number, not {value:?}"))
    }

    /// A time in seconds, at least one, or `default`.
    pub fn seconds(&self, name: &str, default: &str) -> Result<Duration> {
        let given = self.value(name).unwrap_or(default);
        let seconds = given.parse().ok().filter(|seconds| *seconds >= 1.0);
        seconds
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .with_context(|| format!("--{name} takes a number of at least 1, not {given:?}"))
    }

    /// A comma-separated list of numbers, or `default`.
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

/// An option with a value.
fn option(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    let hint = match value {
        "DIR" => ValueHint::DirPath,
        "PATH" | "FILE" | "FILES" => ValueHint::FilePath,
        _ => ValueHint::Other,
    };
    Arg::new(name)
        .long(name)
        .value_name(value)
        .value_hint(hint)
        .allow_hyphen_values(true)
        .overrides_with(name)
        .help(help)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    let flag = Arg::new(name).long(name).action(ArgAction::SetTrue);
    flag.overrides_with(name).help(help)
}

/// An experiment that prints a table or JSON.
fn experiment(name: &'static str, about: &'static str) -> Command {
    let json = flag("json", "Print one JSON object");
    Command::new(name).about(about).arg(json)
}

fn runs(help: &'static str) -> Arg {
    option("runs", "N", help)
}

fn memfold() -> Arg {
    let help = "The memfold binary [default: the one beside memfold-lab]";
    option("memfold", "PATH", help)
}

/// The options of `kernel`; `report` passes them on.
fn kernel_options() -> [Arg; 7] {
    [
        option("against", "LIST", "The backends [default: all]"),
        option("workload", "LIST", "The workloads [default: all]"),
        option(
            "scale",
            "F",
            "Factor on all sizes; 1 is the published sizes [default: 1]",
        ),
        runs("Rounds; every backend runs once in each [default: 5]"),
        memfold(),
        option(
            "python",
            "PATH",
            "The Python interpreter; numpy needs one with NumPy (bench/numpy-venv) [default: python3]",
        ),
        option(
            "swap-dir",
            "DIR",
            "Folder for zswap's swap file [default: /var/tmp]",
        ),
    ]
}

/// The whole command line.
pub fn command() -> Command {
    Command::new("memfold-lab")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Experiments on compressed swap: published designs beside memfold's")
        .after_help(EXAMPLES)
        .max_term_width(100)
        .disable_help_subcommand(true)
        .subcommand_required(true)
        .subcommand_value_name("EXPERIMENT")
        .subcommand_help_heading("Experiments")
        .subcommands(designs())
        .subcommands(comparisons())
        .subcommands(on_memfold())
        .subcommands(describing())
        .subcommands(hidden())
}

fn designs() -> [Command; 6] {
    [
        experiment(
            "chain",
            "zspage length by size class: the kernel's two policies and memfold's",
        ),
        experiment(
            "pool",
            "Resident bytes per stored byte: zsmalloc, mimalloc and jemalloc",
        )
        .arg(option("trace", "LIST", "Recorded sizes [default: all]")),
        experiment(
            "free",
            "Cost of a free: caller, CPU time of all threads, time until the memory is freed",
        )
        .args([
            option("megabytes", "LIST", "[default: 64,128,256,512]"),
            option("threads", "LIST", "[default: 1,2,4]"),
            option("compactor", "LIST", "on, off [default: both]"),
            option("cpus", "LIST", "idle, busy [default: both]"),
            option("huge-pages", "LIST", "on, off [default: on]"),
            option("variant", "LIST", "[default: all]"),
            runs("Rounds [default: 5]"),
        ]),
        experiment(
            "table",
            "The swap table against a locked tree per 64 MB with a byte map",
        )
        .args([
            option("threads", "LIST", "[default: 1,2,4]"),
            option("slots", "N", "Slots of the swap space [default: 1048576]"),
            option(
                "megabytes",
                "N",
                "Memory of each usemem thread [default: 128]",
            ),
            runs("Rounds [default: 5]"),
        ]),
        experiment(
            "virtual",
            "Virtual slots against slots with a fixed backend, without each optimisation in turn",
        )
        .args([
            option("workload", "LIST", "[default: all]"),
            option("variant", "LIST", "[default: all]"),
            option("threads", "N", "[default: 1]"),
            option("megabytes", "N", "[default: 32]"),
            runs("Rounds [default: 11]"),
        ]),
        experiment(
            "exit",
            "Kill mostly swapped-out programs while another starts: synchronous release, the \
             gather, and this host's zram (needs root)",
        )
        .args([
            option("programs", "N", "Programs to kill [default: 12]"),
            option("megabytes", "N", "Memory of each [default: 256]"),
            option("newcomer-megabytes", "N", "[default: 64]"),
            option("variant", "LIST", "[default: all]"),
            runs("Rounds [default: 5]"),
        ]),
    ]
}

fn comparisons() -> [Command; 4] {
    let out = option("out", "DIR", "Folder for the page, plots and JSON");
    [
        experiment(
            "kernel",
            "Workloads under memfold, zram and zswap, alternated",
        )
        .args(kernel_options())
        .arg(flag(
            "equal-total",
            "Whole programs, with as many bytes in total as zram takes",
        ))
        .after_help(KERNEL_NOTES),
        experiment(
            "policy",
            "Replacement policies on page traces of real programs: refaults over the optimum's",
        )
        .args([
            option(
                "trace",
                "LIST",
                "Recorded and generated traces, or files [default: all]",
            ),
            option("policy", "LIST", "[default: all]"),
            option(
                "share",
                "LIST",
                "Memory in per cent of the pages [default: 33,45,50,80]",
            ),
            option(
                "out",
                "DIR",
                "Write a plot of refaults over the memory for each trace",
            ),
            option(
                "record",
                "FILE",
                "Write a trace of the page numbers from standard input (bench/page-trace)",
            ),
        ]),
        Command::new("report")
            .about("Run most experiments; one HTML page with plots and the published figures")
            .args([
                out,
                option(
                    "from",
                    "FILES",
                    "Read JSON of earlier runs instead of measuring",
                ),
                option(
                    "experiments",
                    "LIST",
                    "[default: chain,pool,free,table,virtual,exit,growth,kernel]",
                ),
                flag(
                    "markdown",
                    "Print the table of docs/measurements.md; run only the workloads it needs",
                ),
            ])
            .args(kernel_options().map(|option| option.help_heading("Options passed to kernel")))
            .after_help(REPORT_NOTES),
        Command::new("picture")
            .about("The README's picture: memory of sort over time, alone and under a limit")
            .args([
                option("out", "FILE", "The SVG to write"),
                option("limit", "SIZE", "The limit [default: 128M]"),
                option("lines", "N", "Lines to sort [default: 4000000]"),
                memfold(),
            ]),
    ]
}

/// Experiments on memfold alone.
fn on_memfold() -> [Command; 4] {
    [
        experiment(
            "soak",
            "Memory growth of memfold itself in a long run of mixed programs",
        )
        .args([
            option(
                "minutes",
                "N",
                "Length of sampling, after a warm-up of a fifth of it [default: 10]",
            ),
            memfold(),
        ]),
        experiment(
            "proactive",
            "What --proactive gives back of programs that use a part of their memory, and its cost",
        )
        .args([
            option("program", "LIST", "redis, node, jvm [default: all]"),
            option(
                "seconds",
                "N",
                "Length of the load, and of the idle time after it [default: 20]",
            ),
            option(
                "rate",
                "N",
                "Requests a second [default: as many as the program answers]",
            ),
            runs("Rounds; each program runs without and with it in each [default: 5]"),
            memfold(),
        ]),
        experiment(
            "growth",
            "Cost of a page over size: more bytes, processes, mappings and threads",
        )
        .args(growth_options())
        .after_help(GROWTH_NOTES),
        experiment(
            "simulate",
            "The pager under a simulated kernel: schedules by seed, each page checked",
        )
        .args([
            option("minutes", "N", "How long [default: 1]"),
            option("seed", "N", "The first seed [default: 0]"),
            option("threads", "N", "Threads [default: one for each CPU]"),
            option("bug", "NAME", "Put a bug of the past back"),
            flag(
                "trace",
                "Print what happens in the executions of one seed; there are no rows",
            ),
        ]),
    ]
}

fn growth_options() -> [Arg; 7] {
    [
        option(
            "dimension",
            "LIST",
            "bytes, processes, mappings, threads [default: all]",
        ),
        option(
            "scale",
            "F",
            "Factor on all sizes; 1 is 625 MiB against 16 GiB, 200 processes, 10,000 mappings, 64 threads; at least 0.11 [default: 1]",
        ),
        option(
            "megabytes",
            "N",
            "Size to which bytes grow, in MiB [default: 16384 times the scale]",
        ),
        option(
            "seconds",
            "N",
            "How long memfold is watched at rest [default: 3]",
        ),
        runs("Rounds; the small and the grown case run once in each [default: 5]"),
        memfold(),
        // Tests that a wrong byte fails the experiment.
        option("spoil", "VALUE", "").hide(true),
    ]
}

fn describing() -> [Command; 3] {
    let shells = clap_complete::Shell::value_variants();
    let shells = shells.iter().filter_map(ValueEnum::to_possible_value);
    [
        Command::new("trace")
            .about("Record the compressed sizes of a running process's pages")
            .args([
                option("pid", "PID", "The process to read").required(true),
                option("algo", "NAME", "lz4 or zstd").required(true),
                option("output", "FILE", "The file to write").required(true),
                option("pages", "N", "Maximum number of pages [default: 16384]"),
            ]),
        Command::new("completions")
            .about("Print a completion script for a shell")
            .arg(
                Arg::new("shell")
                    .required(true)
                    .value_parser(PossibleValuesParser::new(shells)),
            ),
        Command::new("man")
            .about("Print the manual page, or write all pages to a folder")
            .arg(option(
                "dir",
                "DIR",
                "Write memfold-lab.1 and the subcommands' pages here",
            )),
    ]
}

/// Subcommands that the lab starts itself; hidden from the help.
fn hidden() -> [Command; 6] {
    let values = |name: &'static str, options: &[&'static str]| {
        let options = options.iter().map(|name| option(name, "VALUE", ""));
        Command::new(name).hide(true).args(options)
    };
    [
        values(pool::CHILD, &["variant", "trace"]),
        values(kernel::WORKLOAD, kernel::WORKLOAD_OPTIONS).arg(Arg::new("name").required(true)),
        values(host::GUARDIAN, &[]),
        values(soak::GUESTS, soak::GUESTS_OPTIONS),
        values(exit::PROGRAM, &["pages"]),
        values(exit::NEWCOMER, &["pages"]),
    ]
}

/// Runs the subcommand.
pub fn run(matches: &ArgMatches) -> Result<()> {
    let (name, matches) = matches.subcommand().context("no experiment given")?;
    let options = Options::of_matches(matches);
    let print = |report: Report| report.print(options.json);
    match name {
        "chain" => print(chain::run()?),
        "policy" => policy::run(&options)?.map_or(Ok(()), print),
        "pool" => print(pool::run(&options)?),
        "free" => print(free::run(&options)?),
        "table" => print(table::run(&options)?),
        "virtual" => print(virtual_slots::run(&options)?),
        "exit" => print(exit::run(&options)?),
        "kernel" => print(kernel::run(&options)?),
        "soak" => print(soak::run(&options)?),
        "proactive" => print(proactive::run(&options)?),
        "growth" => print(growth::run(&options)?),
        "simulate" => simulate::run(&options),
        "report" => report_html::run(options),
        "picture" => picture::run(&options),
        "trace" => trace::run(&options),
        "completions" => {
            let shell = matches
                .get_one::<String>("shell")
                .context("no shell given")?;
            let shell = clap_complete::Shell::from_str(shell, false);
            let shell = shell.map_err(anyhow::Error::msg)?;
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "memfold-lab", &mut script);
            say(&script)
        }
        "man" => match options.value("dir") {
            Some(folder) => clap_mangen::generate_to(command(), folder)
                .with_context(|| format!("cannot write the manual pages to {folder}")),
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(command()).render(&mut page)?;
                say(&page)
            }
        },
        pool::CHILD => pool::run_child(&options),
        kernel::WORKLOAD => {
            let workload = options.value("name").context("no workload given")?;
            kernel::run_workload(workload, &options)
        }
        host::GUARDIAN => host::guard(),
        soak::GUESTS => soak::run_guests(&options),
        exit::PROGRAM => exit::hold(&options),
        exit::NEWCOMER => exit::start(&options),
        other => bail!("unknown experiment {other:?}"),
    }
}

/// A usage error as one line: clap's message up to the first blank line.
pub fn one_line(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::MissingSubcommand {
        return "no experiment given (see memfold-lab --help)".to_owned();
    }
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    let lines: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    let text = lines.join(" ");
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    format!("{text} (see memfold-lab --help)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<(String, Options), clap::Error> {
        let words = ["memfold-lab"].iter().chain(line);
        let matches = command().try_get_matches_from(words)?;
        let (name, matches) = matches.subcommand().expect("one is required");
        Ok((name.to_owned(), Options::of_matches(matches)))
    }

    #[test]
    fn the_command_definition_is_valid() {
        command().debug_assert();
    }

    #[test]
    fn the_last_value_of_an_option_wins() {
        let line = ["kernel", "--runs", "3", "--json", "--runs", "7"];
        let (name, options) = parse(&line).unwrap();
        assert_eq!(name, "kernel");
        assert!(options.json && !options.has("markdown"));
        assert_eq!(options.number("runs", 5).unwrap(), 7);
        assert_eq!(options.number("scale", 5).unwrap(), 5);
        let (_, options) = parse(&["table", "--threads", "1, 2"]).unwrap();
        assert_eq!(options.numbers("threads", "4").unwrap(), [1, 2]);
        let options = options.or(&[("threads", "3"), ("runs", "2")]);
        assert_eq!(options.value("threads"), Some("1, 2"));
        assert_eq!(options.value("runs"), Some("2"));
    }

    #[test]
    fn a_list_names_elements() {
        let all = [("one", 1), ("two", 2), ("three", 3)];
        let named = |given: &[(&str, &str)]| Options::of(given).named("number", &all);
        assert_eq!(named(&[]).unwrap(), all);
        let given = [("number", "three, one")];
        assert_eq!(named(&given).unwrap(), [("three", 3), ("one", 1)]);
        let error = named(&[("number", "one,four")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown number \"four\"; use one of one,two,three"
        );
    }

    #[test]
    fn a_usage_error_is_one_line() {
        for line in [
            &[][..],
            &["kernel", "--agianst", "memfold"],
            &["kernal"],
            &["trace", "--pid", "1"],
            &["kernel", "--runs"],
            &["completions", "none"],
        ] {
            let text = one_line(&parse(line).unwrap_err());
            assert!(!text.contains('\n') && !text.starts_with("error"), "{text}");
            assert!(text.contains("memfold-lab --help"), "{text}");
        }
    }

    /// `report` passes these options on to `kernel`.
    #[test]
    fn report_takes_the_options_of_kernel() {
        for name in kernel::OPTIONS {
            let option = format!("--{name}");
            for experiment in ["kernel", "report"] {
                let (_, options) = parse(&[experiment, &option, "1"]).unwrap();
                assert_eq!(options.value(name), Some("1"));
            }
        }
    }
}
