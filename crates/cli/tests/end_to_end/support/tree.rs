//! The processes of a run and their memory, seen from outside through /proc.

use nix::sys::signal::Signal;
use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// What a run holds at one moment, in bytes of anonymous memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Resident in the programs; memory that a fork shares is counted once.
    pub programs: u64,
    /// Resident in memfold itself: its pool and its tables.
    pub supervisor: u64,
    /// Both together.
    pub total: u64,
}

/// So often a sample is taken anew because processes came or went meanwhile.
const TRIES_OF_A_SAMPLE: usize = 8;

/// The processes that came from one, also those whose parent has ended since.
pub struct Tree {
    supervisor: Option<PathBuf>,
    /// Process number to start time: numbers are used again.
    known: HashMap<i32, u64>,
}

impl Tree {
    /// `supervisor` is the executable whose processes count as memfold's own.
    pub fn new(root: i32, supervisor: Option<PathBuf>) -> Self {
        let mut known = HashMap::new();
        if let Some(start) = start_time(root) {
            known.insert(root, start);
        }
        Self { supervisor, known }
    }

    /// All that are alive, found anew.
    pub fn alive(&mut self) -> Vec<i32> {
        self.known
            .retain(|&process, &mut start| start_time(process) == Some(start));
        let mut found: Vec<i32> = self.known.keys().copied().collect();
        found.sort_unstable();
        let mut next = 0;
        while let Some(&process) = found.get(next) {
            next += 1;
            for child in children(process) {
                if let Some(start) = start_time(child)
                    && self.known.insert(child, start).is_none()
                {
                    found.push(child);
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// Adds up the memory of all that are alive. While processes come and go, what they share counts
    /// more than once: read before one exits, and after. So this is done anew until none does.
    pub fn sample(&mut self) -> Sample {
        let mut alive = self.alive();
        for _ in 0..TRIES_OF_A_SAMPLE {
            let sample = self.sample_of(&alive);
            let after = self.alive();
            if after == alive {
                return sample;
            }
            alive = after;
        }
        self.sample_of(&alive)
    }

    fn sample_of(&self, alive: &[i32]) -> Sample {
        let (own, programs): (Vec<i32>, Vec<i32>) =
            alive.iter().partition(|&&process| self.is_own(process));
        let mut sample = Sample {
            programs: together(&programs),
            supervisor: together(&own),
            total: 0,
        };
        sample.total = sample.programs + sample.supervisor;
        sample
    }

    /// Whether a process is memfold's: the supervisor, or the guardian, which is a copy of it.
    fn is_own(&self, process: i32) -> bool {
        self.supervisor.is_some()
            && fs::read_link(format!("/proc/{process}/exe")).ok() == self.supervisor
    }
}

/// Anonymous resident bytes of processes, where what forks share counts once.
fn together(processes: &[i32]) -> u64 {
    match processes {
        [process] => anonymous_resident(*process).unwrap_or(0),
        _ => processes
            .iter()
            .filter_map(|&process| own_anonymous_share(process))
            .sum(),
    }
}

/// A process and everything below it, now.
pub fn descendants(root: i32) -> Vec<i32> {
    Tree::new(root, None).alive()
}

/// Whether a process exists and has not ended.
pub fn is_alive(process: i32) -> bool {
    start_time(process).is_some()
}

/// Whether a thread of it runs, or would if it had a CPU.
pub fn is_runnable(process: i32) -> bool {
    // `/proc` has threads by their IDs, too, though it does not list them.
    let is_running = |thread: &i32| stat(*thread).is_some_and(|fields| fields[0] == "R");
    threads(process).iter().any(is_running)
}

/// Waits until a process that was sent `SIGSTOP` has stopped.
pub fn wait_until_stopped(process: i32) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let state = stat(process).map(|fields| fields[0].clone());
        match state.as_deref() {
            Some("T") => return,
            None | Some("Z") => panic!("process {process} ended before it stopped"),
            Some(_) if Instant::now() > deadline => panic!("process {process} does not stop"),
            Some(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Waits until a process has taken a signal that it reads from a descriptor, or has ended: one that comes earlier is merged
/// with it.
pub fn wait_until_taken(process: i32, signal: Signal) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let is_pending = || {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let pending = status
            .lines()
            .find_map(|line| line.strip_prefix("ShdPnd:"))?;
        let pending = u64::from_str_radix(pending.trim(), 16).ok()?;
        Some(pending >> (signal as i32 - 1) & 1 == 1)
    };
    while is_pending() == Some(true) {
        assert!(
            Instant::now() < deadline,
            "process {process} does not take {signal}"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// What `/proc/PID/stat` tells behind the name, which may hold spaces: first the state.
fn stat(process: i32) -> Option<Vec<String>> {
    // The name may be of any bytes.
    let stat = fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let fields = stat.rsplit_once(") ")?.1.split(' ');
    Some(fields.map(str::to_owned).collect())
}

fn start_time(process: i32) -> Option<u64> {
    let fields = stat(process)?;
    // The 18th is how many threads there are, the 20th the start time. A main thread that ended
    // before the others shows as a zombie, too.
    if fields[0] == "Z" && fields.get(17)? == "1" {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The IDs of its threads; none if it has ended.
fn threads(process: i32) -> Vec<i32> {
    let entries = fs::read_dir(format!("/proc/{process}/task"));
    let entries = entries.into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.collect()
}

fn children(process: i32) -> Vec<i32> {
    let threads = threads(process).into_iter();
    threads
        .flat_map(|thread| children_of_thread(process, thread))
        .collect()
}

/// Those that this thread started, in that order: PIDs wrap around.
pub fn children_of_thread(process: i32, thread: i32) -> Vec<i32> {
    let list = fs::read_to_string(format!("/proc/{process}/task/{thread}/children"));
    let list = list.unwrap_or_default();
    let words = list.split_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Anonymous resident bytes, from the cheap counters.
fn anonymous_resident(process: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{process}/statm")).ok()?;
    let mut fields = statm
        .split(' ')
        .map(|word| word.parse::<u64>().unwrap_or(0));
    let resident = fields.nth(1)?;
    let shared = fields.next()?;
    Some(resident.saturating_sub(shared) * 4096)
}

/// Anonymous resident bytes, each page divided by how many processes map it.
fn anonymous_share(process: i32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let line = rollup.lines().find(|line| line.starts_with("Pss_Anon:"))?;
    let kilobytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes * 1024)
}

/// The same, but nothing for a process that is between vfork and exec: what it shows is
/// its parent's memory.  It may execute or end at any moment, so this looks before and after.
fn own_anonymous_share(process: i32) -> Option<u64> {
    let before = memory_owner(process)?;
    let share = anonymous_share(process)?;
    let after = memory_owner(process)?;
    (before == after && before != MemoryOwner::Parent).then_some(share)
}

#[derive(PartialEq)]
enum MemoryOwner {
    Parent,
    ItselfAfterFork,
    ItselfAfterExec,
}

fn memory_owner(process: i32) -> Option<MemoryOwner> {
    const FORKED_WITHOUT_EXEC: u64 = 0x40;
    const KCMP_VM: i32 = 1;
    let fields = stat(process)?;
    let parent: i32 = fields.get(1)?.parse().ok()?;
    let flags: u64 = fields.get(6)?.parse().ok()?;
    if flags & FORKED_WITHOUT_EXEC == 0 {
        return Some(MemoryOwner::ItselfAfterExec);
    }
    // SAFETY: kcmp takes plain numbers, and compares kernel objects without changing any.
    let order = unsafe { nix::libc::syscall(nix::libc::SYS_kcmp, process, parent, KCMP_VM, 0, 0) };
    match order {
        0 => Some(MemoryOwner::Parent),
        1.. => Some(MemoryOwner::ItselfAfterFork),
        _ => None,
    }
}

/// Where every thread of these processes is, in few lines: for the report of a hang.
pub fn diagnose(processes: &[i32]) -> String {
    let mut report = String::new();
    for process in processes {
        let command = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let command = command.replace('\0', " ");
        writeln!(report, "== process {process}: {command}").expect("a string");
        report.push_str(&unread_faults(*process));
        let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else {
            continue;
        };
        for thread in threads.flatten() {
            let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            let status = read("status");
            let of = |name: &str| {
                let mut lines = status.lines();
                let value = lines.find_map(|line| line.strip_prefix(name));
                value.unwrap_or_default().trim().to_owned()
            };
            let state: String = of("State:").chars().take(1).collect();
            let stack = read("stack");
            let functions = stack.lines().filter_map(|line| {
                let function = line.split_whitespace().nth(1)?;
                Some(function.split('+').next().unwrap_or(function))
            });
            let most: Vec<&str> = functions.take(5).collect();
            writeln!(
                report,
                " {} {} {state} pending {} blocked {}: {} ({})",
                thread.file_name().to_string_lossy(),
                of("Name:"),
                of("SigPnd:"),
                of("SigBlk:"),
                most.join(" < "),
                read("syscall").trim()
            )
            .expect("a string");
        }
    }
    report
}

/// The messages that wait in the userfaultfds that a process has open.
fn unread_faults(process: i32) -> String {
    let mut report = String::new();
    let descriptors = fs::read_dir(format!("/proc/{process}/fd"));
    for descriptor in descriptors.into_iter().flatten().flatten() {
        let what = fs::read_link(descriptor.path()).unwrap_or_default();
        if what.as_os_str() != "anon_inode:[userfaultfd]" {
            continue;
        }
        let name = descriptor.file_name().to_string_lossy().into_owned();
        let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{name}"));
        let info = info.unwrap_or_default();
        let waiting = info
            .lines()
            .filter(|line| line.starts_with("pending:") || line.starts_with("total:"));
        let waiting: Vec<String> = waiting.map(|line| line.replace('\t', " ")).collect();
        writeln!(report, " userfaultfd {name}: {}", waiting.join(", ")).expect("a string");
    }
    report
}
