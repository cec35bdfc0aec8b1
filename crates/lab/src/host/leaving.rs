//! An end by Ctrl-C or the like: the host is put back before the lab ends, so that it is as before
//! when the shell's prompt is.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use tempfile::TempDir;

use super::undo::PREFIX;

/// Undoes all changes to the host.
type UndoAll = Box<dyn Fn() + Send>;

const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// How long a failure waits for the signal that may be the reason for it.
const GRACE: Duration = Duration::from_millis(200);
/// How often a child that puts the host back is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The signal that ends the lab; 0 while none does.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
static WATCH: Once = Once::new();
static TO_DO: Mutex<ToDo> = Mutex::new(ToDo {
    undo_all: None,
    folders: Vec::new(),
    child: None,
});

/// What there is to put back.
struct ToDo {
    undo_all: Option<UndoAll>,
    folders: Vec<PathBuf>,
    /// A process that puts back what it did, once it is told.
    child: Option<libc::pid_t>,
}

fn to_do() -> MutexGuard<'static, ToDo> {
    TO_DO.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, these signals put everything back. Threads started later inherit what this blocks;
/// programs do not, as the standard library starts them with nothing blocked.
fn watch() -> Result<()> {
    let mut started = Ok(());
    WATCH.call_once(|| {
        // SAFETY: an all-zero set is a valid value, and the calls get pointers to it alone.
        let signals = unsafe {
            let mut signals: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut signals);
            for signal in SIGNALS {
                libc::sigaddset(&raw mut signals, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
            signals
        };
        let thread = std::thread::Builder::new().name("signals".to_owned());
        started = thread.spawn(move || leave(signals)).map(drop);
    });
    Ok(started?)
}

fn leave(signals: libc::sigset_t) {
    let mut signal = 0;
    // SAFETY: both pointers are to values of this thread.
    while unsafe { libc::sigwait(&raw const signals, &raw mut signal) } != 0 {}
    SIGNAL.store(signal, Ordering::SeqCst);
    let child = to_do().child;
    if let Some(child) = child {
        // SAFETY: a signal to a child that `while_running` waits for; if it has just done so, its
        // number is not given anew so soon.
        unsafe { libc::kill(child, signal) };
        while to_do().child.is_some() {
            std::thread::sleep(LOOK);
        }
    }
    let undo_all = to_do().undo_all.take();
    if let Some(undo_all) = undo_all {
        eprintln!("memfold-lab: putting the host back");
        undo_all();
    }
    // Held to the end, so that nobody is in the middle of removing one.
    let to_do = to_do();
    for folder in &to_do.folders {
        remove(folder);
    }
    std::process::exit(128 + signal);
}

/// Has a signal undo all changes to the host before the lab ends.
pub fn undo_by(undo_all: UndoAll) -> Result<()> {
    watch()?;
    to_do().undo_all = Some(undo_all);
    Ok(())
}

/// Runs `work`, which waits for a child process that is to put its own changes back before the lab
/// ends by a signal.
pub fn while_running<T>(child: u32, work: impl FnOnce() -> T) -> Result<T> {
    watch()?;
    to_do().child = Some(child.cast_signed());
    let done = work();
    to_do().child = None;
    wait_while_leaving();
    Ok(done)
}

/// To be called on a failure: Ctrl-C also reaches the programs that the lab runs, and their end is
/// not what is to be reported. Returns only if no signal came.
pub fn wait_if_leaving() {
    if WATCH.is_completed() {
        std::thread::sleep(GRACE);
        wait_while_leaving();
    }
}

/// The thread of the signals ends this process.
fn wait_while_leaving() {
    while SIGNAL.load(Ordering::SeqCst) != 0 {
        std::thread::park();
    }
}

/// Removes a folder in which a program that just gets the same signal may still write. What stays
/// is no more than a temporary file.
fn remove(folder: &Path) {
    const ATTEMPTS: usize = 20;
    for _ in 0..ATTEMPTS {
        if std::fs::remove_dir_all(folder).is_ok() || !folder.exists() {
            return;
        }
        std::thread::sleep(LOOK);
    }
}

/// A folder for temporary files that does not outlive the lab, Ctrl-C included.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    pub fn new() -> Result<Self> {
        // Before there is anything to remove.
        watch()?;
        let mut to_do = to_do();
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        to_do.folders.push(folder.path().to_owned());
        Ok(Self(folder))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut to_do = to_do();
        remove(self.path());
        to_do.folders.retain(|folder| folder != self.path());
    }
}
