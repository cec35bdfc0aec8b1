//! Programs that no loader brings the library into (static ones, and those without `LD_PRELOAD`): they are attached
//! while they run.

use crate::sync::lock;
use memfold_pager::{AttachError, Attacher};
use memfold_sys::privilege;
use memfold_sys::process::Process;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// How often a program is tried whose threads could not be stopped.
const TRIES: u32 = 5;

/// How many are attached at a time. The others wait for a later look.
const MOST_AT_A_TIME: usize = 8;

/// What became of one.
#[derive(Debug)]
enum Attempt {
    UnderWay,
    Failed(AttachError),
}

/// Attempts to attach programs, each in a thread of its own.
#[derive(Debug, Clone)]
pub struct Attachments {
    attacher: Attacher,
    attempts: Arc<Mutex<HashMap<i32, Attempt>>>,
}

impl Attachments {
    /// By a supervisor's attacher.
    pub fn new(attacher: Attacher) -> Attachments {
        Attachments {
            attacher,
            attempts: Arc::default(),
        }
    }

    fn attempts(&self) -> MutexGuard<'_, HashMap<i32, Attempt>> {
        lock(&self.attempts)
    }

    /// Begins to attach a process below this one. Returns whether that is under way.
    pub fn begin(&self, pid: i32) -> bool {
        let mut attempts = self.attempts();
        if matches!(attempts.get(&pid), Some(Attempt::UnderWay)) {
            return true;
        }
        let under_way = attempts
            .values()
            .filter(|one| matches!(one, Attempt::UnderWay));
        if under_way.count() >= MOST_AT_A_TIME {
            return false;
        }
        let this = self.clone();
        let thread = std::thread::Builder::new().name("attach".to_owned());
        let attempt = match thread.spawn(move || this.attach(pid)) {
            Ok(_) => Attempt::UnderWay,
            Err(error) => Attempt::Failed(error.into()),
        };
        attempts.insert(pid, attempt);
        true
    }

    fn attach(&self, pid: i32) {
        let attached = attach(&self.attacher, pid);
        let mut attempts = self.attempts();
        match attached {
            Ok(()) => attempts.remove(&pid),
            Err(error) => attempts.insert(pid, Attempt::Failed(error)),
        };
    }

    /// Forgets failures of processes that are gone.
    pub fn forget(&self, is_gone: impl Fn(i32) -> bool) {
        let is_kept = |pid: &i32, attempt: &mut Attempt| {
            matches!(attempt, Attempt::UnderWay) || !is_gone(*pid)
        };
        self.attempts().retain(is_kept);
    }

    /// Why the last attempt failed; the answer is given once.
    pub fn take_failure(&self, pid: i32) -> Option<AttachError> {
        let mut attempts = self.attempts();
        match attempts.remove(&pid)? {
            Attempt::Failed(error) => Some(error),
            under_way @ Attempt::UnderWay => {
                attempts.insert(pid, under_way);
                None
            }
        }
    }
}

fn attach(attacher: &Attacher, pid: i32) -> Result<(), AttachError> {
    // Whatever the thread that started this one had raised.
    privilege::give_up_in_thread()?;
    let process = Arc::new(Process::open(pid).map_err(|_| AttachError::Gone)?);
    // The PID is looked up once: it is of the process found here, and that must be one of memfold's own.
    if !process.descends_from_here()? {
        return Err(AttachError::Gone);
    }
    let mut tries = 1;
    loop {
        match attacher.attach(&process) {
            Err(AttachError::Busy | AttachError::Dispatched) if tries < TRIES => tries += 1,
            attached => return attached,
        }
    }
}
