//! Processes: ancestry, liveness, mappings and memory.

mod handle;
mod inspector;
mod lines;
mod mappings;
mod maps_line;
mod pagemap;
mod threads;

pub use handle::{Credentials, Process};
pub use inspector::{Inspector, TraceStop};
pub use mappings::{
    AreaKind, InheritedBy, InheritedRange, KeptRange, VirtualMemoryArea, kernel_finds_mappings,
    kernel_seals,
};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use mappings::{inherited_ranges, parse_line};
pub use maps_line::MapsLine;
pub use pagemap::{SharedFrames, kernel_scans, kernel_shows_guards};
pub use threads::ThreadSample;

use crate::zygote::{LOOKED_AT, ZygoteSearch};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The text of a file of `/proc`. Names of files and threads in it may hold any bytes; those that are not
/// UTF-8 become `�`.
///
/// # Errors
/// If it cannot be read, most likely as the process is gone.
pub fn proc_text(path: &str) -> io::Result<String> {
    std::fs::read(path).map(text_of)
}

fn text_of(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// This process's PID.
pub fn own_id() -> i32 {
    std::process::id() as i32
}

/// A pidfd, close-on-exec, of the process that has a PID now.
pub(crate) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    // rustix panics on a negative PID.
    let pid = (pid > 0).then(|| Pid::from_raw(pid)).flatten();
    let pid = pid.ok_or(Errno::INVAL)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// This process's effective user.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// This process's user namespace, by the number of its inode.
///
/// # Errors
/// Without `/proc`.
pub fn own_user_namespace() -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata("/proc/self/ns/user")?.ino())
}

/// How many seccomp filters this process has.
pub fn own_filters() -> u32 {
    let mut filters = crate::hello::Filters::default();
    filters.look(&std::fs::read("/proc/self/status").unwrap_or_default());
    filters.count
}

/// The processes of which a thread knows itself by `number`: first the one of that number anywhere, the likeliest, which
/// may come again, then those of `roots` and below them, several if there are pid namespaces.
pub fn processes_by_own_number(
    number: u64,
    roots: impl Iterator<Item = i32>,
) -> impl Iterator<Item = Process> {
    let has_thread = move |process: &Process| process.thread_by_own_number(number).is_some();
    let same = i32::try_from(number).ok().and_then(|thread| {
        // Fails for a thread that is not the main one of its process. A forked child's first thread is.
        let main = Process::open(thread).ok();
        main.or_else(|| Process::open(process_of(thread)?).ok())
    });
    let all = roots.flat_map(|root| {
        let mut below = VecDeque::from([root]);
        std::iter::from_fn(move || {
            loop {
                let Ok(process) = Process::open(below.pop_front()?) else {
                    continue;
                };
                below.extend(process.children());
                return Some(process);
            }
        })
    });
    same.into_iter().chain(all).filter(has_thread)
}

/// The process that a thread belongs to.
fn process_of(thread: i32) -> Option<i32> {
    let status = proc_text(&format!("/proc/{thread}/status")).ok()?;
    named_field(&status, "Tgid")?.parse().ok()
}

/// The threads of the process whose folder this is.
fn threads_in(folder: BorrowedFd<'_>) -> Vec<i32> {
    let Ok(tasks) = handle::open_below(folder, "task") else {
        return Vec::new();
    };
    let names = rustix::fs::Dir::read_from(tasks);
    names
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok())
        .collect()
}

/// The children of all its threads.
fn children_in(folder: BorrowedFd<'_>) -> Vec<i32> {
    let lists = threads_in(folder).into_iter().filter_map(|thread| {
        let path = format!("task/{thread}/children");
        handle::text_below(folder, &path).ok()
    });
    lists
        .flat_map(|list| {
            list.split_ascii_whitespace()
                .filter_map(|child| child.parse().ok())
                .collect::<Vec<i32>>()
        })
        .collect()
}

fn children(pid: i32) -> Vec<i32> {
    handle::folder_of(pid).map_or_else(|_| Vec::new(), |folder| children_in(folder.as_fd()))
}

/// All processes below `ancestor`, parents before their children.
///
/// Children whose parent ends between two steps of a walk come to another parent unseen, so it is
/// repeated until two agree (or there is no end of coming and going).
pub fn below(ancestor: i32) -> Vec<i32> {
    const MOST_WALKS: usize = 10;
    let mut found = walk(ancestor);
    for _ in 1..MOST_WALKS {
        let before = std::mem::replace(&mut found, walk(ancestor));
        if before == found {
            break;
        }
    }
    found
}

/// Most of the processes below one: those that others leave behind just now may be missing.
pub fn mostly_below(ancestor: i32) -> Vec<i32> {
    walk(ancestor)
}

/// How large a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// All mappings together.
    pub mapped_pages: u64,
    /// Resident anonymous pages.
    pub resident_pages: u64,
    /// Resident file-backed and shared pages.
    pub shared_pages: u64,
    /// Mapped pages that are private and writable, resident or not.
    pub writable_pages: u64,
}

impl Sizes {
    /// From the text of `/proc/PID/statm`.
    fn of_statm(text: &str) -> Option<Sizes> {
        let mut fields = text.split_ascii_whitespace().map(str::parse::<u64>);
        let mut field = |skipped| fields.nth(skipped)?.ok();
        let (mapped, resident, shared) = (field(0)?, field(0)?, field(0)?);
        Some(Sizes {
            mapped_pages: mapped,
            resident_pages: resident.saturating_sub(shared),
            shared_pages: shared,
            writable_pages: field(2)?,
        })
    }
}

/// How large a process is; none if it is gone.
pub fn sizes(pid: i32) -> Option<Sizes> {
    let of = |folder: &str| Sizes::of_statm(&proc_text(&format!("{folder}/statm")).ok()?);
    let sizes = of(&format!("/proc/{pid}"))?;
    if sizes.mapped_pages > 0 {
        return Some(sizes);
    }
    // A thread that has ended has no memory.
    of(&living_folder(pid))
}

/// A folder in `/proc` that shows the memory, the executable and the environment of a process: its own, or that of another
/// thread if the main one has ended.
pub fn living_folder(pid: i32) -> String {
    let own = format!("/proc/{pid}");
    let Ok(folder) = handle::folder_of(pid) else {
        return own;
    };
    match living_thread_in(folder.as_fd(), pid) {
        Some(thread) if thread != pid => format!("{own}/task/{thread}"),
        _ => own,
    }
}

/// The first thread that has not ended, of the process with this folder and PID: the main thread if it is one of them.
fn living_thread_in(folder: BorrowedFd<'_>, pid: i32) -> Option<i32> {
    let is_living = |thread: &i32| {
        let stat = handle::text_below(folder, &format!("task/{thread}/stat"));
        let state = stat.ok().and_then(|stat| stat_field(&stat, 3));
        state.is_some_and(|state: char| !matches!(state, 'Z' | 'X'))
    };
    if is_living(&pid) {
        return Some(pid);
    }
    threads_in(folder).into_iter().find(is_living)
}

fn walk(ancestor: i32) -> Vec<i32> {
    let mut found = children(ancestor);
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children(pid));
        next += 1;
    }
    found
}

fn stat(pid: i32) -> Option<String> {
    proc_text(&format!("/proc/{pid}/stat")).ok()
}

/// When a process was started, in clock ticks since boot; none if it is gone or nothing of it runs
/// any more.
pub fn living_since(pid: i32) -> Option<u64> {
    start_of_living(&stat(pid)?)
}

/// A main thread that ended before the others shows as a zombie, too.
pub(crate) fn start_of_living(stat: &str) -> Option<u64> {
    let ended = matches!(stat_field(stat, 3)?, 'Z' | 'X');
    let others = stat_field(stat, 20).is_some_and(|threads: u64| threads > 1);
    if ended && !others {
        return None;
    }
    stat_field(stat, 22)
}

/// Whether a process runs what its parent ran when it forked it: it executed nothing since.
pub fn is_fork(pid: i32) -> bool {
    const FORKED_WITHOUT_EXEC: u64 = 0x40;
    let flags = stat(pid).and_then(|stat| stat_field::<u64>(&stat, 9));
    flags.is_some_and(|flags| flags & FORKED_WITHOUT_EXEC != 0)
}

/// Whether a process is a [zygote](crate::zygote), as far as its command line says so. That is memory of the process, which may
/// hold up the thread that reads it: see [`deadline`](crate::deadline).
pub fn is_zygote(pid: i32) -> bool {
    let mut start = Vec::new();
    let file = std::fs::File::open(format!("{}/cmdline", living_folder(pid)));
    let read = file.and_then(|file| file.take(LOOKED_AT as u64).read_to_end(&mut start));
    let mut search = ZygoteSearch::default();
    search.look(&start);
    read.is_ok() && search.is_zygote()
}

/// What stands behind a name and a colon, in files that have a line for each name.
pub(crate) fn named_field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim())
}

/// As [`named_field`], for a size, in bytes.
pub(crate) fn named_bytes(text: &str, name: &str) -> Option<u64> {
    let size = named_field(text, name)?.strip_suffix("kB")?;
    size.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A field of a `stat` file, counted from 1. The second, the name, may hold anything.
pub(crate) fn stat_field<T: std::str::FromStr>(text: &str, field: usize) -> Option<T> {
    let behind_name = text.rsplit_once(')')?.1;
    behind_name
        .split_ascii_whitespace()
        .nth(field.checked_sub(3)?)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_found_by_their_own_numbers() {
        let mut child = std::process::Command::new("sleep")
            .arg("5")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        // At once, and by looking through all.
        let found = processes_by_own_number(pid as u64, [own_id()].into_iter())
            .map(|process| process.pid());
        assert_eq!(found.collect::<Vec<i32>>(), [pid, pid]);
        assert!(
            processes_by_own_number(0, [own_id()].into_iter())
                .next()
                .is_none()
        );
        assert!(below(own_id()).contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_lives_as_long_as_one_of_its_threads() {
        let line = "12 (a) b (c) S 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 100 200";
        assert_eq!(start_of_living(line), Some(98_765));
        let zombie = line.replace(") S ", ") Z ");
        assert_eq!(start_of_living(&zombie), None);
        let others_live = zombie.replace(" 20 0 1 ", " 20 0 2 ");
        assert_eq!(start_of_living(&others_live), Some(98_765));
    }
}
