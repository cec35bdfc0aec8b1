//! Termination by a signal: the host is restored before the lab exits, hence before the shell
//! prints its prompt.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use super::undo::PREFIX;

/// Undoes all changes to the host.
type UndoAll = Box<dyn Fn() + Send>;

const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// How long a failing lab waits for a signal that may have caused the failure, before it reports
/// the error. A larger value delays error messages.
const SIGNAL_GRACE: Duration = Duration::from_millis(200);
/// Interval between checks for a child's exit, and between attempts to remove a folder.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The signal that is terminating the lab; 0 if none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
static WATCH: Once = Once::new();
static PENDING: Mutex<Pending> = Mutex::new(Pending {
    undo_all: None,
    folders: Vec::new(),
    child: None,
});

/// What to clean up on a signal.
struct Pending {
    undo_all: Option<UndoAll>,
    folders: Vec<PathBuf>,
    /// A child to forward the signal to; it cleans up after itself.
    child: Option<libc::pid_t>,
}

fn pending() -> MutexGuard<'static, Pending> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that handles [`SIGNALS`]. They are caught, not blocked: programs inherit what is blocked, and would
/// not end by them.
fn watch() -> Result<()> {
    let mut started = Ok(());
    WATCH.call_once(|| {
        let thread = std::thread::Builder::new().name("signals".to_owned());
        let signals = Signals::new(SIGNALS);
        started =
            signals.and_then(|signals| thread.spawn(move || exit_on_signal(signals)).map(drop));
    });
    Ok(started?)
}

/// Waits for a signal, cleans up, and exits with 128 + its number.
fn exit_on_signal(mut signals: Signals) {
    let Some(signal) = signals.forever().next() else {
        return;
    };
    SIGNAL.store(signal, Ordering::SeqCst);
    let child = pending().child;
    if let Some(child) = child {
        // SAFETY: a signal to a child that `while_running` waits for. If it was reaped just now,
        // its PID is unlikely to be reused yet.
        unsafe { libc::kill(child, signal) };
        while pending().child.is_some() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    let undo_all = pending().undo_all.take();
    if let Some(undo_all) = undo_all {
        eprintln!("memfold-lab: restoring the host");
        undo_all();
    }
    // Held until exit, so that no other thread is removing one of the folders.
    let pending = pending();
    for folder in &pending.folders {
        remove(folder);
    }
    std::process::exit(128 + signal);
}

/// Registers what undoes all changes to the host; called on a signal.
pub fn set_undo_all(undo_all: UndoAll) -> Result<()> {
    watch()?;
    pending().undo_all = Some(undo_all);
    Ok(())
}

/// Runs `work`, which waits for a child. On a signal the lab forwards it to the child and exits
/// only after the child, which undoes its own changes.
pub fn while_running<T>(child: u32, work: impl FnOnce() -> T) -> Result<T> {
    watch()?;
    pending().child = Some(child.cast_signed());
    let done = work();
    pending().child = None;
    wait_while_exiting();
    Ok(done)
}

/// To be called before an error is reported: Ctrl-C also reaches the programs that the lab runs,
/// and their exit is not the error. Returns only if no signal arrives within [`SIGNAL_GRACE`].
pub fn wait_if_interrupted() {
    if WATCH.is_completed() {
        std::thread::sleep(SIGNAL_GRACE);
        wait_while_exiting();
    }
}

/// Parks while the signal thread is terminating the process.
fn wait_while_exiting() {
    while SIGNAL.load(Ordering::SeqCst) != 0 {
        std::thread::park();
    }
}

/// Removes a folder. A program that received the same signal may still write to it, so this
/// retries; if that fails, a temporary file is left behind.
fn remove(folder: &Path) {
    const ATTEMPTS: usize = 20;
    for _ in 0..ATTEMPTS {
        if std::fs::remove_dir_all(folder).is_ok() || !folder.exists() {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A temporary folder, removed on drop and on a signal.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Creates the folder in TMPDIR.
    pub fn new() -> Result<Self> {
        // Before the folder exists, so that no signal leaves it behind.
        watch()?;
        let mut pending = pending();
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        pending.folders.push(folder.path().to_owned());
        Ok(Self(folder))
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut pending = pending();
        remove(self.path());
        pending.folders.retain(|folder| folder != self.path());
    }
}
