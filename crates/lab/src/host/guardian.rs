//! A process that outlives the lab and puts the host back.
//!
//! The lab tells it how to undo a change before it makes the change. Whoever undoes, it is the
//! guardian who does it: when the lab asks (a [`Change`] is dropped), or at the end of file on its
//! standard input, which means that the lab is gone, however it ended. It keeps the list in a
//! journal, which the next guardian takes over should this one be killed as well. The journal's
//! lock also keeps two labs from changing the same host at once.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Seek, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{Undo, leaving, require_root};

/// The hidden subcommand that is the guardian.
pub const GUARDIAN: &str = "guardian";
const JOURNAL: &str = "/run/memfold-lab.journal";
const GONE: &str = "the guardian has been sent away";

/// The lab's end of the line to its guardian. Clones are the same guardian.
#[derive(Debug, Clone)]
pub struct Guardian(Arc<Mutex<Line>>);

#[derive(Debug)]
struct Line {
    process: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    next: u64,
}

/// A change to the host, undone when this is dropped.
#[derive(Debug)]
pub struct Change {
    guardian: Guardian,
    number: u64,
}

impl Guardian {
    /// Starts it. What an earlier guardian left in the journal is undone first.
    ///
    /// # Errors
    /// Without root, and while another lab holds the journal.
    pub fn start() -> Result<Self> {
        require_root("setting up swap and cgroups")?;
        let mut process = Command::new(std::env::current_exe()?)
            .arg(GUARDIAN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the guardian process cannot be started")?;
        let to = process.stdin.take();
        let from = process
            .stdout
            .take()
            .context("the guardian has no output")?;
        let mut line = Line {
            process,
            to,
            from: BufReader::new(from),
            next: 0,
        };
        line.answer()?;
        let guardian = Self(Arc::new(Mutex::new(line)));
        let line = Arc::downgrade(&guardian.0);
        leaving::undo_by(Box::new(move || {
            if let Some(line) = line.upgrade() {
                Guardian(line).undo_all();
            }
        }))?;
        Ok(guardian)
    }

    /// Makes a change to the host, after it is known how that is undone. An end by a signal waits
    /// for `make`, so that nothing is changed any more once everything is put back.
    pub fn change<T>(&self, undo: &Undo, make: impl FnOnce() -> Result<T>) -> Result<(Change, T)> {
        let mut line = self.line();
        let number = line.promise(undo)?;
        let made = make();
        drop(line);
        // What failed may be half done: dropping this undoes it.
        let change = Change {
            guardian: self.clone(),
            number,
        };
        Ok((change, made?))
    }

    /// The same for a change that has no name before it is made. A crash just then leaves it.
    pub fn make<T>(
        &self,
        make: impl FnOnce() -> Result<T>,
        undo: impl FnOnce(&T) -> Undo,
    ) -> Result<(Change, T)> {
        let mut line = self.line();
        ensure!(line.to.is_some(), GONE);
        let made = make()?;
        let number = line.promise(&undo(&made))?;
        drop(line);
        let change = Change {
            guardian: self.clone(),
            number,
        };
        Ok((change, made))
    }

    /// Undoes everything at once, for an end by a signal.
    fn undo_all(&self) {
        let mut line = self.line();
        line.to = None;
        if let Err(error) = line.process.wait() {
            eprintln!("memfold-lab: the guardian: {error}");
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn promise(&mut self, undo: &Undo) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        self.ask(&json!({ "promise": number, "undo": undo.to_json() }))?;
        Ok(number)
    }

    fn ask(&mut self, question: &Value) -> Result<()> {
        let to = self.to.as_mut().context(GONE)?;
        writeln!(to, "{question}").context("the guardian does not listen")?;
        self.answer()
    }

    fn answer(&mut self) -> Result<()> {
        let mut answer = String::new();
        self.from.read_line(&mut answer)?;
        match answer.trim_end() {
            "ok" => Ok(()),
            "" => bail!("the guardian process has died"),
            failure => bail!("{failure}"),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.to = None;
        // It undoes what is left, says so itself if that fails, and ends.
        let _ = self.process.wait();
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let mut line = self.guardian.line();
        // After `undo_all` there is nothing left to undo.
        if line.to.is_some()
            && let Err(error) = line.ask(&json!({ "undo": self.number }))
        {
            eprintln!("memfold-lab: the host may not be as before: {error:#}");
        }
    }
}

/// The guardian's own process.
pub fn guard() -> Result<()> {
    detach();
    let mut stdout = std::io::stdout();
    let mut journal = match Journal::open() {
        Ok(journal) => journal,
        Err(error) => {
            writeln!(stdout, "{error:#}")?;
            return Ok(());
        }
    };
    // The lab may be gone already; the end of file follows, here and below.
    let _ = writeln!(stdout, "ok");
    for line in std::io::stdin().lines() {
        let answer = match line
            .map_err(Into::into)
            .and_then(|line| journal.obey(&line))
        {
            Ok(()) => "ok".to_owned(),
            Err(error) => format!("{error:#}").replace('\n', " "),
        };
        let _ = writeln!(stdout, "{answer}");
    }
    journal.undo_all()
}

/// Out of the reach of what ends the lab: its terminal and signals to its process group.
fn detach() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE] {
        // SAFETY: ignoring a signal installs no handler that could run.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: the call has no preconditions; it fails for a leader of a process group, which this
    // process, just started by the lab, is not.
    unsafe { libc::setsid() };
}

/// How long the guardian of a lab that was killed may take to put the host back.
const PATIENCE: Duration = Duration::from_secs(15);

struct Journal {
    file: File,
    changes: Vec<(u64, Undo)>,
}

impl Journal {
    fn open() -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(JOURNAL)
            .with_context(|| format!("{JOURNAL} cannot be opened"))?;
        let deadline = Instant::now() + PATIENCE;
        // SAFETY: the descriptor is open as long as `file` lives.
        let lock = || unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
        let mut locked = lock();
        while !locked && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(50));
            locked = lock();
        }
        ensure!(
            locked,
            "another memfold-lab is changing this host's swap ({JOURNAL} is locked): wait for it"
        );
        let mut left = Vec::new();
        for line in BufReader::new(&file).lines() {
            left.push((0, Undo::from_json(&serde_json::from_str(&line?)?)?));
        }
        let mut journal = Self {
            file,
            changes: left,
        };
        journal.undo_all()?;
        Ok(journal)
    }

    fn obey(&mut self, line: &str) -> Result<()> {
        let question: Value = serde_json::from_str(line)?;
        if let Some(number) = question["promise"].as_u64() {
            let undo = Undo::from_json(&question["undo"])?;
            self.changes.push((number, undo));
            return self.save();
        }
        let number = question["undo"]
            .as_u64()
            .context("neither a promise nor an undo")?;
        let place = self.changes.iter().position(|(one, _)| *one == number);
        let place = place.with_context(|| format!("there is no change {number}"))?;
        // It stays in the journal until it is undone.
        self.changes[place].1.apply()?;
        self.changes.remove(place);
        self.save()
    }

    fn save(&mut self) -> Result<()> {
        let mut text = String::new();
        for (_, undo) in &self.changes {
            text += &format!("{}\n", undo.to_json());
        }
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())?;
        Ok(())
    }

    /// The latest change first. Goes on after a failure, as the others can still be undone.
    fn undo_all(&mut self) -> Result<()> {
        while let Some((_, undo)) = self.changes.pop() {
            if let Err(error) = undo.apply() {
                eprintln!("memfold-lab: the host is not as before: {error:#}");
            }
        }
        self.save()
    }
}
