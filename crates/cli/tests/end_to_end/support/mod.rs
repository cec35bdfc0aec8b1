//! Runs real programs natively and under memfold, watches their memory from outside,
//! and compares what they print.

#[macro_use]
mod turn;

mod heartbeat;
mod judge;
mod redis_client;
mod run;
mod stranger;
mod terminal;
mod tree;
mod watcher;

pub use heartbeat::Heartbeat;
pub use judge::{Verdict, judge};
pub use memfold_testing::skip;
pub use redis_client::{RedisClient, later_value, redis_value};
pub use run::{Limits, Outcome, Program, Running};
pub use stranger::{OTHER, STRANGER, Stage, as_user};
pub use terminal::Terminal;
pub use tree::{
    Sample, children_of_thread, descendants, is_alive, is_runnable, wait_until_stopped,
    wait_until_taken,
};
pub use turn::{Share, turn};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

/// One mebibyte, in bytes.
pub const MIB: u64 = 1 << 20;

/// The least that `--resident` takes.
pub const LEAST_RESIDENT: u64 = 16 * MIB;

/// The binary under test.
pub fn memfold() -> &'static Path {
    let_hangups_through();
    Path::new(env!("CARGO_BIN_EXE_memfold"))
}

/// `nohup` and the like leave the hang-up signal ignored, which programs inherit: those that are
/// tested must see it. One that is handled is theirs to see again, after the exec.
fn let_hangups_through() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    extern "C" fn nothing(_: nix::libc::c_int) {}
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler does nothing, so it may run at any point of any thread.
        unsafe { signal(Signal::SIGHUP, SigHandler::Handler(nothing)) }.expect("a handler");
    });
}

/// The full path of a program in `PATH`, or where Debian keeps system programs.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/usr/bin")])
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

/// The Python interpreter itself: what `python3` names may be a wrapper script.
pub fn python() -> PathBuf {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON
        .get_or_init(|| {
            let output = Command::new("python3")
                .args(["-c", "import sys; print(sys.executable)"])
                .output()
                .expect("python3 runs");
            PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
        })
        .clone()
}

/// A source file of the workload programs.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/programs")
        .join(name)
}

/// A C program of `tests/programs`, compiled once a test run.
pub fn compiled(name: &str, sources: &[&str], options: &[&str]) -> PathBuf {
    compiled_by("cc", name, sources, options)
}

/// The same, by another compiler.
pub fn compiled_by(compiler: &str, name: &str, sources: &[&str], options: &[&str]) -> PathBuf {
    static ALL: Mutex<BTreeMap<String, Arc<OnceLock<PathBuf>>>> = Mutex::new(BTreeMap::new());
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let one = Arc::clone(all.entry(name.to_owned()).or_default());
    // Others are compiled meanwhile.
    drop(all);
    one.get_or_init(|| compile(compiler, name, sources, options))
        .clone()
}

fn compile(compiler: &str, name: &str, sources: &[&str], options: &[&str]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    // Another run of these tests may be executing the last one.
    let new = path.with_extension(std::process::id().to_string());
    let status = Command::new(compiler)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&new)
        .args(sources.iter().map(|file| source(file)))
        .args(options)
        .stdin(Stdio::null())
        .status()
        .unwrap_or_else(|error| panic!("{compiler} cannot be started: {error}"));
    assert!(status.success(), "{compiler} could not compile {name}");
    std::fs::rename(&new, &path).expect("a compiled program");
    path
}

/// Copies a program. By a process of its own: a child that another test forks meanwhile would inherit a
/// descriptor open for writing, and no program can be executed while there is one.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("cp").arg(from).arg(to).status();
    assert!(
        status.expect("cp runs").success(),
        "cp {} {}",
        from.display(),
        to.display()
    );
}

/// The torture program, whose source has several parts.
pub fn torture() -> PathBuf {
    compiled(
        "torture",
        &["torture.c", "torture_owner.c", "torture_threads.c"],
        &[],
    )
}

/// `MEMFOLD_TEST_ROUNDS`: 1, the default, is the short form, 2 the long one; with more, torture takes
/// longer and comparisons are repeated.
pub fn rounds() -> u32 {
    std::env::var("MEMFOLD_TEST_ROUNDS")
        .ok()
        .and_then(|rounds| rounds.parse().ok())
        .unwrap_or(1)
}

/// `MEMFOLD_TEST_PATIENCE`: how many times longer a program may take before it counts as hung, where processors are
/// emulated.
pub fn patience() -> u32 {
    std::env::var("MEMFOLD_TEST_PATIENCE")
        .ok()
        .and_then(|patience| patience.parse().ok())
        .unwrap_or(1)
}

/// Whether memfold is to do without `UFFDIO_MOVE`, which the runs that a test starts inherit.
pub fn is_without_move() -> bool {
    std::env::var_os("MEMFOLD_WITHOUT_MOVE").is_some()
}

/// Whether tests take all of their time, data and limits.
pub fn is_long() -> bool {
    rounds() > 1
}

/// What a run has said, but for the line that says of the kernel that its `UFFDIO_MOVE` is not used.
///
/// # Panics
/// If that line is not there where the tests forbid `UFFDIO_MOVE`, or is there more than once, or elsewhere.
pub fn said_but_of_the_kernel(errors: &str) -> Vec<&str> {
    let is_of_the_kernel = |line: &&str| line.contains("UFFDIO_MOVE is not used here");
    let (of_the_kernel, others): (Vec<_>, Vec<_>) = errors.lines().partition(is_of_the_kernel);
    assert_eq!(
        of_the_kernel.len(),
        usize::from(is_without_move()),
        "{errors}"
    );
    others
}

/// Of the two, the first in the short form.
pub fn short_or_long<T>(short: T, long: T) -> T {
    if is_long() { long } else { short }
}

/// Seconds of torture that takes `in_two_rounds` seconds in two rounds.
pub fn torture_seconds(in_two_rounds: u32) -> u32 {
    (in_two_rounds * rounds()).div_ceil(2)
}

/// Runs `program` unlimited, then with `total_percent` of that run's peak as a limit on everything and,
/// but for the short form, with a quarter of it resident; each time the output must be the same and the
/// limit must hold.  Returns the unlimited run's outcome.
pub fn same_as_unlimited(program: &Program, total_percent: u64) -> Outcome {
    let native = program.run(Limits::None);
    native.assert_success();
    let peak = native.peak().total;
    let limits = [
        Limits::Total(peak * total_percent / 100),
        Limits::Resident((peak / 4).max(LEAST_RESIDENT)),
    ];
    for limits in &limits[..short_or_long(1, 2)] {
        for _ in 0..rounds().div_ceil(2) {
            let limited = program.run(*limits);
            limited.assert_success();
            assert!(
                limited.output == native.output,
                "{limits:?}: the output differs from the unlimited run's\nunlimited: {}\nlimited: {}",
                native.text(),
                limited.text()
            );
            limited.assert_swapped(peak);
            limited.assert_limit_held();
        }
    }
    native
}
