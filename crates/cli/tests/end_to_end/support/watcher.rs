//! Samples the memory of a run, from outside.

use super::heartbeat::Heartbeat;
use super::memfold;
use super::run::Limits;
use super::tree::{Sample, Tree};
use super::turn::{Share, share_of_this_test};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// To sample a tree of processes is a walk through their page tables: a shorter time takes CPU time from
/// what is sampled. Limits are judged with the first one only.
const SAMPLE_EVERY: Duration = Duration::from_millis(5);
const SAMPLE_EVERY_BESIDE: Duration = Duration::from_millis(50);

/// Samples a run's memory until it is told to stop.
pub struct Watcher {
    stop: Arc<AtomicBool>,
    tree: Arc<Mutex<Tree>>,
    thread: JoinHandle<Vec<Sample>>,
    heartbeat: Heartbeat,
}

/// What watches a run once it is started, and knows of a pause from before.
pub struct Ready {
    supervisor: Option<PathBuf>,
    baseline: u64,
    heartbeat: Heartbeat,
}

impl Ready {
    /// Watches the processes below this one.
    pub fn watch(self, root: i32) -> Watcher {
        let Ready {
            supervisor,
            baseline,
            heartbeat,
        } = self;
        let stop = Arc::new(AtomicBool::new(false));
        let tree = Arc::new(Mutex::new(Tree::new(root, supervisor)));
        let (stopped, watched) = (Arc::clone(&stop), Arc::clone(&tree));
        let every = match share_of_this_test() {
            Share::Alone => SAMPLE_EVERY,
            Share::Beside => SAMPLE_EVERY_BESIDE,
        };
        let thread = thread::spawn(move || {
            let mut samples = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let mut now = watched
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .sample();
                now.supervisor = now.supervisor.saturating_sub(baseline);
                now.total = now.programs + now.supervisor;
                samples.push(now);
                thread::sleep(every);
            }
            samples
        });
        Watcher {
            stop,
            tree,
            thread,
            heartbeat,
        }
    }
}

impl Watcher {
    /// To be called before the run is started: what it does first is seen, too.
    pub fn ready(limits: Limits) -> Ready {
        let is_native = limits == Limits::None;
        Ready {
            supervisor: (!is_native).then(|| memfold().canonicalize().expect("the binary")),
            baseline: if is_native { 0 } else { supervisor_baseline() },
            heartbeat: Heartbeat::start(),
        }
    }

    pub fn alive(&self) -> Vec<i32> {
        self.tree
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .alive()
    }

    /// The samples, and for how long the machine let no thread of ours run.
    pub fn finish(self) -> (Vec<Sample>, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.join().expect("the watcher");
        (samples, self.heartbeat.finish())
    }
}

/// What memfold itself needs before it stores anything: its threads and tables,
/// measured once beside a program that only waits.
fn supervisor_baseline() -> u64 {
    static BASELINE: OnceLock<u64> = OnceLock::new();
    *BASELINE.get_or_init(|| {
        let mut child = Command::new(memfold())
            .args(["run", "--limit", "64M", "--quiet", "--", "sleep", "0.4"])
            .spawn()
            .expect("memfold starts");
        let mut tree = Tree::new(
            child.id().cast_signed(),
            Some(memfold().canonicalize().expect("the binary")),
        );
        let mut most = 0;
        while child.try_wait().expect("wait").is_none() {
            most = most.max(tree.sample().supervisor);
            thread::sleep(SAMPLE_EVERY);
        }
        most
    })
}
