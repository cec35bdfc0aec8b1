//! The guardian: a process that outlives the lab and restores the host.
//!
//! Before each change the lab sends the guardian how to undo it. The guardian undoes a change when
//! the lab drops its [`Change`], and all of them at the end of file on its standard input, which
//! means that the lab has exited, for whatever reason. It keeps the list in a journal file: if the
//! guardian is killed too, the next one undoes what is left there. A lock on the journal keeps two
//! labs from changing the host at once.

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

use super::{Undo, cleanup, require_root};

/// The hidden subcommand that is the guardian.
pub const GUARDIAN: &str = "guardian";
/// Changes not yet undone, one JSON object a line.
const JOURNAL: &str = "/run/memfold-lab.journal";
const GONE: &str = "the guardian process has exited";

/// The lab's connection to its guardian. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Guardian(Arc<Mutex<Connection>>);

#[derive(Debug)]
struct Connection {
    process: Child,
    /// `None` once the guardian was asked to exit.
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    /// Number of the next change.
    next: u64,
}

/// A change to the host; dropping it undoes the change.
#[derive(Debug)]
pub struct Change {
    guardian: Guardian,
    number: u64,
}

impl Guardian {
    /// Starts the guardian, which first undoes what an earlier one left in the journal.
    ///
    /// # Errors
    /// Without root, and while another lab holds the journal's lock.
    pub fn start() -> Result<Self> {
        require_root("setting up swap and cgroups")?;
        let mut process = Command::new(std::env::current_exe()?)
            .arg(GUARDIAN)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the guardian process")?;
        let to = process.stdin.take();
        let from = process
            .stdout
            .take()
            .context("the guardian has no output")?;
        let mut connection = Connection {
            process,
            to,
            from: BufReader::new(from),
            next: 0,
        };
        connection.answer()?;
        let guardian = Self(Arc::new(Mutex::new(connection)));
        let connection = Arc::downgrade(&guardian.0);
        cleanup::set_undo_all(Box::new(move || {
            if let Some(connection) = connection.upgrade() {
                Guardian(connection).undo_all();
            }
        }))?;
        Ok(guardian)
    }

    /// Registers `undo`, then runs `make`, which changes the host. A signal handler that restores
    /// the host waits for `make`, so that no change follows the restore.
    pub fn change<T>(&self, undo: &Undo, make: impl FnOnce() -> Result<T>) -> Result<(Change, T)> {
        let mut connection = self.connection();
        let number = connection.register(undo)?;
        let made = make();
        drop(connection);
        // A failed change may be half done: dropping `change` undoes it.
        let change = Change {
            guardian: self.clone(),
            number,
        };
        Ok((change, made?))
    }

    /// As `change`, where how to undo is known only after `make`. A crash in between leaks it.
    pub fn make<T>(
        &self,
        make: impl FnOnce() -> Result<T>,
        undo: impl FnOnce(&T) -> Undo,
    ) -> Result<(Change, T)> {
        let mut connection = self.connection();
        ensure!(connection.to.is_some(), GONE);
        let made = make()?;
        let number = connection.register(&undo(&made))?;
        drop(connection);
        let change = Change {
            guardian: self.clone(),
            number,
        };
        Ok((change, made))
    }

    /// Undoes all changes and waits for the guardian to exit; for an exit by a signal.
    fn undo_all(&self) {
        let mut connection = self.connection();
        connection.to = None;
        if let Err(error) = connection.process.wait() {
            eprintln!("memfold-lab: the guardian: {error}");
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    fn register(&mut self, undo: &Undo) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        self.ask(&json!({ "promise": number, "undo": undo.to_json() }))?;
        Ok(number)
    }

    fn ask(&mut self, question: &Value) -> Result<()> {
        let to = self.to.as_mut().context(GONE)?;
        writeln!(to, "{question}").context("cannot write to the guardian process")?;
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

impl Drop for Connection {
    fn drop(&mut self) {
        self.to = None;
        // At end of file the guardian undoes what is left, reports errors itself, and exits.
        let _ = self.process.wait();
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let mut connection = self.guardian.connection();
        // `undo_all` has undone this change already.
        if connection.to.is_some()
            && let Err(error) = connection.ask(&json!({ "undo": self.number }))
        {
            eprintln!("memfold-lab: cannot undo a change to the host: {error:#}");
        }
    }
}

/// The main function of the guardian process.
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
    // A failed write, here and below, means that the lab has exited: end of file follows.
    let _ = writeln!(stdout, "ok");
    for line in std::io::stdin().lines() {
        let answer = match line
            .map_err(Into::into)
            .and_then(|line| journal.handle(&line))
        {
            Ok(()) => "ok".to_owned(),
            Err(error) => format!("{error:#}").replace('\n', " "),
        };
        let _ = writeln!(stdout, "{answer}");
    }
    journal.undo_all()
}

/// Detaches from the lab's terminal and process group, so that what ends the lab spares this
/// process.
fn detach() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE] {
        // SAFETY: ignoring a signal installs no handler that could run.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: the call has no preconditions. It fails for a process group leader only, which this
    // child of the lab is not.
    unsafe { libc::setsid() };
}

/// How long to wait for the journal's lock, which the guardian of a killed lab holds until it has
/// restored the host.
const TIMEOUT: Duration = Duration::from_secs(15);

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
            .with_context(|| format!("cannot open {JOURNAL}"))?;
        let deadline = Instant::now() + TIMEOUT;
        // SAFETY: the descriptor is open as long as `file` lives.
        let lock = || unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
        let mut locked = lock();
        while !locked && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(50));
            locked = lock();
        }
        ensure!(
            locked,
            "another memfold-lab has changed this host's swap ({JOURNAL} is locked): wait until it exits"
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

    fn handle(&mut self, line: &str) -> Result<()> {
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
        let place = place.with_context(|| format!("the guardian knows no change {number}"))?;
        // Removed from the journal only after it was undone.
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

    /// Undoes all changes, the latest first. A failure does not stop the others.
    fn undo_all(&mut self) -> Result<()> {
        while let Some((_, undo)) = self.changes.pop() {
            if let Err(error) = undo.apply() {
                eprintln!("memfold-lab: cannot undo a change to the host: {error:#}");
            }
        }
        self.save()
    }
}
