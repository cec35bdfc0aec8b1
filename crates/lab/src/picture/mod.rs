//! The picture of the README: a program's memory over time under a limit, beside the same program
//! without one, as measured on this machine.

mod drawing;
mod sample;

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use self::{
    drawing::{Panel, Picture},
    sample::{Series, watch},
};
use crate::{
    Options,
    host::Scratch,
    kernel::find_memfold,
    output::say,
    report::{commit, host},
};

/// Lines that `sort` holds; it takes about 55 bytes of memory for each.
const DEFAULT_LINES: usize = 4_000_000;
const DEFAULT_LIMIT: &str = "128M";
/// The arguments keep the whole input in memory, in one thread.
const PROGRAM: [&str; 5] = ["sort", "-rn", "-S", "1G", "--parallel=1"];

/// Runs the program twice and writes the picture to the file `--out`.
pub fn run(options: &Options) -> Result<()> {
    let out = options.value("out").context("--out FILE is missing")?;
    let limit = options.value("limit").unwrap_or(DEFAULT_LIMIT);
    let lines = options.number("lines", DEFAULT_LINES)?;
    let memfold = find_memfold(options.value("memfold"))?;
    let folder = Scratch::new()?;
    let input = folder.path().join("input");
    write_lines(&input, lines)?;

    let alone = Run::new(&input, &folder.path().join("alone"));
    let native = alone.watch(&mut Run::command(&[]), None)?;
    let limited = Run::new(&input, &folder.path().join("limited"));
    let memfold_path = memfold.to_str().context("memfold's path is not UTF-8")?;
    let prefix = [memfold_path, "run", "--quiet", "--limit", limit, "--"];
    let under = limited.watch(&mut Run::command(&prefix), Some(&memfold))?;
    ensure!(
        alone.output()? == limited.output()?,
        "sort printed something else under memfold: this is a bug"
    );

    let program = PROGRAM.join(" ");
    let picture = Picture {
        description: describe(&program, lines),
        panels: [
            Panel {
                title: format!("{} alone", PROGRAM[0]),
                series: native,
            },
            Panel {
                title: format!("memfold run --limit {limit} -- {}", PROGRAM[0]),
                series: under,
            },
        ],
    };
    let svg = picture.to_svg()?;
    fs::write(out, svg).with_context(|| format!("{out} cannot be written"))?;
    say(picture.summary().as_bytes())
}

/// What was run, on what: the text alternative of the picture.
fn describe(program: &str, lines: usize) -> String {
    format!(
        "Resident anonymous memory and compressed pool over time. {program} on the output of seq {lines}, \
         alone and under memfold run; both printed the same bytes. {}, commit {}. \
         Repeat: memfold-lab picture --out docs/picture.svg",
        host(),
        commit()
    )
}

/// As `seq` prints them.
fn write_lines(path: &Path, lines: usize) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for number in 1..=lines {
        writeln!(file, "{number}")?;
    }
    Ok(file.flush()?)
}

/// One run of the program.
struct Run {
    input: PathBuf,
    output: PathBuf,
}

impl Run {
    fn new(input: &Path, output: &Path) -> Self {
        Self {
            input: input.to_owned(),
            output: output.to_owned(),
        }
    }

    /// The program behind the words of `prefix`.
    fn command(prefix: &[&str]) -> Command {
        let mut words = prefix.iter().chain(&PROGRAM);
        let mut command = Command::new(words.next().expect("PROGRAM has words"));
        command.args(words);
        command
    }

    fn watch(&self, command: &mut Command, memfold: Option<&Path>) -> Result<Series> {
        command
            .stdin(Stdio::from(File::open(&self.input)?))
            .stdout(Stdio::from(File::create(&self.output)?));
        let series = watch(command, memfold)?;
        if series.samples.len() < 5 {
            bail!("the program ended too soon to be looked at: give more --lines");
        }
        Ok(series)
    }

    fn output(&self) -> Result<Vec<u8>> {
        Ok(fs::read(&self.output)?)
    }
}
