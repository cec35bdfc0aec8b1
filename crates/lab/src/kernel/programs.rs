//! Programs of many languages that build large data structures and print a digest of them.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use anyhow::{Context, Result, bail, ensure};

use super::{backend::Session, measure, scale::Scale, workload::Figures};
use crate::host::Scratch;

/// How a program is built and run. In the words, `{file}` is its source, `{folder}` the folder that it
/// is in, and `{size}` how much it is to build.
#[derive(Debug)]
struct Recipe {
    workload: &'static str,
    interpreter: Interpreter,
    /// Name and contents of the source.
    source: (&'static str, &'static str),
    /// Compiler and its arguments, once.
    build: &'static [&'static str],
    /// What is run: the first word is the program, unless the interpreter is.
    run: &'static [&'static str],
    /// The size at scale 1, and the smallest.
    size: (usize, usize),
    /// Approximate peak memory without a limit, in MB: what does not depend on the scale, and what
    /// does.
    memory: (usize, usize),
    /// The limit, in MB, likewise.
    resident: (usize, usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interpreter {
    Python,
    PythonWithNumPy,
    /// Programs that must be in `PATH`, and the Debian package that has them.
    Found(&'static [&'static str], &'static str),
}

/// The programs, in the order of reports.
const RECIPES: &[Recipe] = &[
    // Objects of many kinds, hashed twice.
    Recipe {
        workload: "cpython",
        interpreter: Interpreter::Python,
        source: (
            "objects.py",
            include_str!("../../../cli/tests/programs/objects.py"),
        ),
        build: &[],
        run: &["{file}", "{thousandths}"],
        size: (1000, 225),
        memory: (0, 178),
        resident: (0, 30),
    },
    // Maps, strings and typed arrays, hashed three times, with garbage in between.
    Recipe {
        workload: "node",
        interpreter: Interpreter::Found(&["node"], "nodejs"),
        source: (
            "heap.js",
            include_str!("../../../cli/tests/programs/heap.js"),
        ),
        build: &[],
        run: &["node", "{file}", "{size}"],
        size: (120_000, 5_000),
        memory: (50, 150),
        resident: (40, 50),
    },
    // Two passes over large arrays. The running sums take another third.
    Recipe {
        workload: "numpy",
        interpreter: Interpreter::PythonWithNumPy,
        source: ("arrays.py", include_str!("../../programs/arrays.py")),
        build: &[],
        run: &["{file}", "{size}"],
        size: (192, 8),
        memory: (30, 256),
        resident: (30, 96),
    },
    Recipe {
        workload: "sort",
        interpreter: Interpreter::Found(&["sort", "seq", "cksum"], "coreutils"),
        source: ("sort", ""),
        build: &[],
        run: &[
            "sh",
            "-c",
            "seq {size} | sort -rn -S 1G --parallel=1 | cksum",
        ],
        size: (4_000_000, 600_000),
        memory: (4, 210),
        resident: (4, 60),
    },
    Recipe {
        workload: "sqlite",
        interpreter: Interpreter::Found(&["sqlite3"], "sqlite3"),
        source: (
            "database.sql",
            include_str!("../../../cli/tests/programs/database.sql"),
        ),
        build: &[],
        run: &["sqlite3", ":memory:", ".read {file}"],
        size: (1, 1),
        memory: (94, 0),
        resident: (40, 0),
    },
    Recipe {
        workload: "c++",
        interpreter: Interpreter::Found(&["g++", "cksum"], "g++"),
        source: (
            "templates.cc",
            include_str!("../../../cli/tests/programs/templates.cc"),
        ),
        build: &[],
        run: &[
            "sh",
            "-c",
            "g++ -std=c++17 -O1 -c -o {folder}/object {file} && cksum < {folder}/object",
        ],
        size: (1, 1),
        memory: (314, 0),
        resident: (120, 0),
    },
    Recipe {
        workload: "java",
        interpreter: Interpreter::Found(&["java", "javac"], "default-jdk-headless"),
        source: (
            "Heap.java",
            include_str!("../../../cli/tests/programs/Heap.java"),
        ),
        build: &["javac", "-d", "{folder}", "{file}"],
        // Else the JVM sizes its heap by a cgroup's limit, which is not what is compared.
        run: &[
            "java",
            "-XX:-UseContainerSupport",
            "-Xmx400M",
            "-cp",
            "{folder}",
            "Heap",
            "{size}",
        ],
        size: (100_000, 30_000),
        memory: (60, 143),
        resident: (60, 40),
    },
    Recipe {
        workload: "go",
        interpreter: Interpreter::Found(&["go"], "golang-go"),
        source: ("heap.go", include_str!("../../programs/heap.go")),
        // Dynamically linked, so that memfold can manage it.
        build: &[
            "go",
            "build",
            "-ldflags=-linkmode=external",
            "-o",
            "{folder}/heap",
            "{file}",
        ],
        run: &["{folder}/heap", "{size}"],
        size: (150_000, 30_000),
        memory: (8, 117),
        resident: (8, 50),
    },
    Recipe {
        workload: "luajit",
        interpreter: Interpreter::Found(&["luajit"], "luajit"),
        source: ("tables.lua", include_str!("../../programs/tables.lua")),
        build: &[],
        run: &["luajit", "{file}", "{size}"],
        size: (400_000, 80_000),
        memory: (4, 146),
        resident: (4, 56),
    },
    Recipe {
        workload: "pypy",
        interpreter: Interpreter::Found(&["pypy3"], "pypy3"),
        source: (
            "objects.py",
            include_str!("../../../cli/tests/programs/objects.py"),
        ),
        build: &[],
        run: &["pypy3", "{file}", "{thousandths}"],
        size: (300, 100),
        memory: (60, 230),
        resident: (60, 60),
    },
    Recipe {
        workload: "erlang",
        interpreter: Interpreter::Found(&["escript"], "erlang-base"),
        source: (
            "processes.erl",
            include_str!("../../programs/processes.erl"),
        ),
        build: &[],
        run: &["escript", "{file}", "{size}"],
        size: (200_000, 30_000),
        memory: (50, 520),
        resident: (40, 160),
    },
    Recipe {
        workload: "racket",
        interpreter: Interpreter::Found(&["racket"], "racket"),
        source: ("table.rkt", include_str!("../../programs/table.rkt")),
        build: &[],
        run: &["racket", "{file}", "{size}"],
        size: (400_000, 60_000),
        memory: (75, 100),
        resident: (60, 40),
    },
    Recipe {
        workload: "r",
        interpreter: Interpreter::Found(&["Rscript"], "r-base-core"),
        source: ("lists.R", include_str!("../../programs/lists.R")),
        build: &[],
        run: &["Rscript", "{file}", "{size}"],
        size: (300_000, 60_000),
        memory: (60, 217),
        resident: (50, 60),
    },
    Recipe {
        workload: "ocaml",
        interpreter: Interpreter::Found(&["ocamlopt"], "ocaml-nox"),
        source: ("table.ml", include_str!("../../programs/table.ml")),
        build: &["ocamlopt", "-o", "{folder}/table", "{file}"],
        run: &["{folder}/table", "{size}"],
        size: (500_000, 200_000),
        memory: (2, 89),
        resident: (2, 39),
    },
    Recipe {
        workload: "haskell",
        interpreter: Interpreter::Found(&["ghc"], "ghc"),
        source: ("table.hs", include_str!("../../programs/table.hs")),
        build: &[
            "ghc",
            "-v0",
            "-O1",
            "-outputdir",
            "{folder}",
            "-o",
            "{folder}/table",
            "{file}",
        ],
        run: &["{folder}/table", "{size}"],
        size: (120_000, 40_000),
        memory: (4, 111),
        resident: (4, 48),
    },
];

/// The names of the programs.
pub fn names() -> impl Iterator<Item = &'static str> {
    RECIPES.iter().map(|recipe| recipe.workload)
}

/// A program at one size.
#[derive(Debug)]
pub struct Program {
    recipe: &'static Recipe,
    size: usize,
    /// Approximate peak memory without a limit, in MB.
    pub megabytes: usize,
    /// The limit, in MB.
    pub resident_megabytes: usize,
    /// Its folder, once it is built.
    built: OnceLock<Scratch>,
}

impl Program {
    /// The program of a workload at a scale.
    pub fn new(workload: &str, scale: Scale) -> Option<Self> {
        let recipe = RECIPES.iter().find(|recipe| recipe.workload == workload)?;
        let (size, least) = recipe.size;
        let size_at_scale = scale.count(size, least);
        // What it takes follows from the size, which has a minimum.
        let part = size_at_scale as f64 / size as f64;
        let scaled = |(fixed, at_one): (usize, usize)| fixed + (at_one as f64 * part) as usize;
        Some(Self {
            recipe,
            size: size_at_scale,
            megabytes: scaled(recipe.memory),
            resident_megabytes: scaled(recipe.resident).max(16),
            built: OnceLock::new(),
        })
    }

    /// Why it cannot run on this host, if so.
    pub fn missing(&self, python: Option<&str>) -> Option<String> {
        let found = self.recipe.interpreter.find(python);
        found.err().map(|error| format!("{error:#}"))
    }

    /// One run. The result to compare is its output.
    pub fn run(&self, session: &Session, python: Option<&str>) -> Result<(Figures, String)> {
        let folder = self.folder()?;
        let mut words = self.words(self.recipe.run, folder)?;
        let program = match self.recipe.interpreter.find(python)? {
            Some(interpreter) => interpreter,
            None => OsString::from(words.remove(0)),
        };
        let mut command = session.command(&program, &words)?;
        command.stderr(Stdio::null());
        let ended = measure::run(command, |stop| session.watch(stop))?;
        Ok((ended.figures.with("seconds", ended.seconds), ended.output))
    }

    /// The folder with the source and what was built of it.
    fn folder(&self) -> Result<&Path> {
        if let Some(built) = self.built.get() {
            return Ok(built.path());
        }
        let scratch = Scratch::new()?;
        let (name, text) = self.recipe.source;
        std::fs::write(scratch.path().join(name), text)?;
        if !self.recipe.build.is_empty() {
            let words = self.words(self.recipe.build, scratch.path())?;
            let status = Command::new(&words[0]).args(&words[1..]).status();
            let status = status.with_context(|| format!("cannot start {}", words[0]))?;
            ensure!(status.success(), "{} failed: {status}", words.join(" "));
        }
        Ok(self.built.get_or_init(|| scratch).path())
    }

    fn words(&self, words: &[&str], folder: &Path) -> Result<Vec<String>> {
        let file = folder.join(self.recipe.source.0);
        let text = |path: &Path| -> Result<String> {
            let text = path.to_str();
            let text = text.with_context(|| format!("the path {} is not UTF-8", path.display()))?;
            Ok(text.to_owned())
        };
        let (file, folder) = (text(&file)?, text(folder)?);
        let thousandths = format!("{:.3}", self.size as f64 / 1000.0);
        let filled = |word: &&str| {
            word.replace("{file}", &file)
                .replace("{folder}", &folder)
                .replace("{size}", &self.size.to_string())
                .replace("{thousandths}", &thousandths)
        };
        Ok(words.iter().map(filled).collect())
    }
}

impl Interpreter {
    /// The interpreter where it is not named by the words; an error says what is missing.
    fn find(self, python: Option<&str>) -> Result<Option<OsString>> {
        match self {
            Self::Found(programs, package) => {
                let missing = programs.iter().find(|program| !is_in_path(program));
                match missing {
                    Some(program) => bail!("{program} is not installed (Debian: {package})"),
                    None => Ok(None),
                }
            }
            Self::Python => real_python(python.unwrap_or("python3")).map(Some),
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
                        return Ok(Some(OsString::from(candidate)));
                    }
                }
                bail!(
                    "no python3 with NumPy found: run bench/numpy-venv, or name one with --python PATH"
                )
            }
        }
    }
}

fn is_in_path(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_below_what_the_programs_need() {
        for (name, scale) in names().flat_map(|name| [(name, 1.0), (name, 0.05)]) {
            let program = Program::new(name, Scale(scale)).unwrap();
            assert!(
                program.resident_megabytes < program.megabytes,
                "{name} at {scale}: {} of {}",
                program.resident_megabytes,
                program.megabytes
            );
        }
        assert!(Program::new("cobol", Scale(1.0)).is_none());
    }

    #[test]
    fn words_are_filled_in() {
        let program = Program::new("go", Scale(1.0)).unwrap();
        let words = program.words(program.recipe.run, Path::new("/folder"));
        assert_eq!(words.unwrap(), ["/folder/heap", "150000"]);
        let python = Program::new("cpython", Scale(0.5)).unwrap();
        let words = python.words(python.recipe.run, Path::new("/folder"));
        assert_eq!(words.unwrap(), ["/folder/objects.py", "0.500"]);
    }
}
