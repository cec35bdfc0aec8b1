//! Interpreters that build large data structures and print a digest of them.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use super::{backend::Session, measure, scale::Scale, workload::Figures};

const OBJECTS: &str = include_str!("../../../cli/tests/programs/objects.py");
const HEAP: &str = include_str!("../../../cli/tests/programs/heap.js");
const ARRAYS: &str = include_str!("../../programs/arrays.py");

/// A program and its interpreter.
#[derive(Debug)]
pub struct Program {
    interpreter: Interpreter,
    source: &'static str,
    argument: String,
    /// Approximate peak memory without a limit, in MB.
    pub megabytes: usize,
    /// The limit, in MB.
    pub resident_megabytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interpreter {
    Python,
    PythonWithNumPy,
    Node,
}

impl Program {
    /// CPython: objects of many kinds, hashed twice.
    pub fn cpython(scale: Scale) -> Self {
        let megabytes = scale.megabytes(178).max(40);
        Self {
            interpreter: Interpreter::Python,
            source: OBJECTS,
            argument: format!("{:.3}", megabytes as f64 / 178.0),
            megabytes,
            resident_megabytes: scale.megabytes(30).max(16),
        }
    }

    /// Node: maps, strings and typed arrays, hashed three times, with garbage in between.
    pub fn node(scale: Scale) -> Self {
        Self {
            interpreter: Interpreter::Node,
            source: HEAP,
            argument: scale.count(120_000, 5_000).to_string(),
            megabytes: scale.megabytes(150) + 50,
            resident_megabytes: scale.megabytes(50) + 40,
        }
    }

    /// NumPy: two passes over large arrays.
    pub fn numpy(scale: Scale) -> Self {
        let megabytes = scale.megabytes(192);
        Self {
            interpreter: Interpreter::PythonWithNumPy,
            source: ARRAYS,
            argument: megabytes.to_string(),
            // The running sums take another third.
            megabytes: megabytes * 4 / 3 + 30,
            resident_megabytes: megabytes / 2 + 30,
        }
    }

    /// Why it cannot run on this host, if so.
    pub fn missing(&self, python: Option<&str>) -> Option<String> {
        self.interpreter
            .find(python)
            .err()
            .map(|error| format!("{error:#}"))
    }

    /// One run. The result to compare is its output.
    pub fn run(&self, session: &Session, python: Option<&str>) -> Result<(Figures, String)> {
        let interpreter = self.interpreter.find(python)?;
        let path = session.folder().join("program");
        std::fs::write(&path, self.source)?;
        let path = path.into_os_string().into_string();
        let path =
            path.map_err(|path| anyhow::anyhow!("the path {} is not UTF-8", path.display()))?;
        let mut command = session.command(&interpreter, &[path, self.argument.clone()])?;
        command.stderr(Stdio::null());
        let ended = measure::run(command, |stop| session.watch(stop))?;
        Ok((ended.figures.with("seconds", ended.seconds), ended.output))
    }
}

impl Interpreter {
    fn find(self, python: Option<&str>) -> Result<OsString> {
        match self {
            Self::Node => {
                found("node", &["--version"]).context("node is not installed (Debian: nodejs)")?;
                Ok(OsString::from("node"))
            }
            Self::Python => real_python(python.unwrap_or("python3")),
            Self::PythonWithNumPy => {
                let venv = std::env::current_exe()?.with_file_name("numpy-venv/bin/python3");
                let mut candidates = Vec::new();
                match python {
                    Some(given) => candidates.push(PathBuf::from(given)),
                    None => candidates.extend([venv, PathBuf::from("python3")]),
                }
                for candidate in candidates {
                    let candidate = candidate.to_string_lossy().into_owned();
                    if found(&candidate, &["-c", "import numpy"]).is_ok() {
                        return Ok(OsString::from(candidate));
                    }
                }
                bail!(
                    "no python3 with NumPy found: run bench/numpy-venv, or name one with --python PATH"
                )
            }
        }
    }
}

/// The path of the interpreter itself; `name` may be a script that selects one.
pub fn real_python(name: &str) -> Result<OsString> {
    let output = found(name, &["-c", "import sys; print(sys.executable)"])
        .with_context(|| format!("{name} is not installed"))?;
    Ok(OsString::from(output.trim()))
}

/// Fails unless `program --version` succeeds.
pub fn find(program: &str) -> Result<()> {
    found(program, &["--version"])
        .map(drop)
        .with_context(|| format!("{program} is not installed"))
}

fn found(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stderr(Stdio::null())
        .output()?;
    ensure!(
        output.status.success(),
        "{program} failed: {}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
