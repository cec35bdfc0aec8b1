//! The programs, each of which uses a small part of its memory.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::{
    kernel::{find_program, redis, start_to_end_with_us},
    random::Random,
};

/// memfold's limit, which no program reaches: whatever leaves, leaves because of `--proactive`.
const LIMIT: &str = "4G";
/// Keys of 1000 bytes that Redis holds.
const KEYS: usize = 100_000;
/// Keys that most requests are for.
const HOT_KEYS: usize = 2_500;
/// One request in `ANY_KEY` is for any key.
const ANY_KEY: usize = 100;
/// Keys of a request.
const KEYS_AT_ONCE: usize = 20;

/// A program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Redis, whose clients mostly ask for a fortieth of the keys.
    Redis,
    /// Like a browser: the objects of 60 pages, of which one is shown.
    Node,
    /// A JVM with a large cache, of which a thirty-fifth is used.
    Jvm,
}

impl Program {
    /// The names of all, as a list.
    pub const NAMES: &str = "redis,node,jvm";

    /// The program of that name.
    pub fn parse(name: &str) -> Result<Self> {
        let mut all = [Self::Redis, Self::Node, Self::Jvm].into_iter();
        all.find(|program| program.name() == name)
            .with_context(|| format!("unknown program {name:?}; there are {}", Self::NAMES))
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Node => "node",
            Self::Jvm => "jvm",
        }
    }

    /// Its file's name and source, unless it is installed on the host.
    fn source(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Redis => None,
            Self::Node => Some((
                "pages.js",
                include_str!("../../programs/proactive/pages.js"),
            )),
            Self::Jvm => Some((
                "Cache.java",
                include_str!("../../programs/proactive/Cache.java"),
            )),
        }
    }

    /// Writes its source to a folder.
    pub fn write(self, folder: &Path) -> Result<()> {
        if let Some((file, source)) = self.source() {
            fs::write(folder.join(file), source)?;
        }
        Ok(())
    }

    /// Why it cannot run on this host, if so.
    pub fn missing(self) -> Option<String> {
        let (program, package) = match self {
            Self::Redis => ("redis-server", "redis-server"),
            Self::Node => ("node", "nodejs"),
            Self::Jvm => ("java", "default-jdk-headless"),
        };
        let error = find_program(program).err()?;
        let name = self.name();
        Some(format!("{name} is left out: {error:#} (Debian: {package})"))
    }

    /// Its command line.
    fn words(self, folder: &Path, port: u16) -> Vec<String> {
        let file = self.source().map(|(file, _)| folder.join(file));
        let file = file.map(|file| file.display().to_string());
        let (program, options): (&str, &[&str]) = match self {
            Self::Redis => ("redis-server", &[]),
            Self::Node => ("node", &[]),
            // Else it takes a cgroup's limit, and its heap is another on each host.
            Self::Jvm => ("java", &["-XX:-UseContainerSupport"]),
        };
        let mut words = vec![program.to_owned()];
        words.extend(options.iter().map(|&option| option.to_owned()));
        words.extend(file);
        if self == Self::Redis {
            words.extend(redis::arguments(port, folder));
        }
        words
    }
}

/// How a program is asked.
enum Talk {
    Redis(redis::Client),
    /// It answers a line with the same line.
    Lines(ChildStdin, BufReader<ChildStdout>),
}

/// A program under memfold.
pub struct Running {
    server: redis::Server,
    pid: u32,
    talk: Talk,
    random: Random,
    asked: usize,
}

impl Running {
    /// Starts a program.
    pub fn start(
        program: Program,
        memfold: &Path,
        folder: &Path,
        is_proactive: bool,
    ) -> Result<Self> {
        let port = redis::free_port()?;
        let mut command = Command::new(memfold);
        command.args(["run", "--quiet", "--limit", LIMIT]);
        if is_proactive {
            command.arg("--proactive");
        }
        command.arg("--").args(program.words(folder, port));
        let is_redis = program == Program::Redis;
        if is_redis {
            command.stdin(Stdio::null()).stdout(Stdio::null());
        } else {
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
        }
        let mut child = start_to_end_with_us(&mut command, libc::SIGKILL)?;
        let pid = child.id();
        let pipes = child.stdin.take().zip(child.stdout.take());
        let mut server = redis::Server::new(child);
        let talk = match pipes {
            Some((input, output)) => Talk::Lines(input, BufReader::new(output)),
            None => Talk::Redis(redis::connect(port, &mut server)?),
        };
        Ok(Self {
            server,
            pid,
            talk,
            random: Random::new(1),
            asked: 0,
        })
    }

    /// The PID of its memfold.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Has it hold all of its data.
    pub fn fill(&mut self) -> Result<()> {
        match &mut self.talk {
            Talk::Redis(client) => client.fill(KEYS, redis::value),
            Talk::Lines(_, output) => {
                let line = answer(output)?;
                ensure!(line == "ready", "it printed {line:?} at its start");
                Ok(())
            }
        }
    }

    /// Makes a request and verifies the answer.
    pub fn ask(&mut self) -> Result<()> {
        self.asked += 1;
        match &mut self.talk {
            Talk::Redis(client) => {
                let random = &mut self.random;
                let keys: [usize; KEYS_AT_ONCE] = std::array::from_fn(|_| {
                    let is_any = random.below(ANY_KEY) == 0;
                    random.below(if is_any { KEYS } else { HOT_KEYS })
                });
                let wrong = client.wrong_among(&keys, redis::value)?;
                ensure!(wrong == 0, "WRONG RESULT: {wrong} keys");
            }
            Talk::Lines(input, output) => {
                writeln!(input, "{}", self.asked)?;
                let line = answer(output)?;
                ensure!(
                    line == self.asked.to_string(),
                    "WRONG RESULT: {line:?} for {}",
                    self.asked
                );
            }
        }
        Ok(())
    }

    /// Ends it. It must exit with status 0.
    pub fn end(mut self) -> Result<()> {
        match self.talk {
            Talk::Redis(client) => client.shut_down()?,
            Talk::Lines(input, _) => drop(input),
        }
        redis::check(&mut self.server)
    }
}

fn answer(output: &mut BufReader<ChildStdout>) -> Result<String> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(!line.is_empty(), "it ended early: see the errors above");
    Ok(line.trim_end().to_owned())
}
