//! Processes: who descends from whom, who lives, and what one maps and holds.

mod inspector;
mod mappings;

pub use inspector::{Inspector, Sizes};
pub use mappings::{InheritedRange, VirtualMemoryArea};

use std::collections::VecDeque;
use std::io;

/// What a file of `/proc` says. The names of files and threads in it may be of any bytes; those that are
/// no UTF-8 are shown as if by `�`.
///
/// # Errors
/// If it cannot be read: what it tells of is gone, most likely.
pub fn proc_text(path: &str) -> io::Result<String> {
    let bytes = std::fs::read(path)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// This process's number.
pub fn own_id() -> i32 {
    std::process::id() as i32
}

/// This process's effective user.
pub fn own_user() -> u32 {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() }
}

/// How many filters the system calls of this process pass.
pub fn own_filters() -> u32 {
    let mut filters = crate::hello::Filters::default();
    filters.look(&std::fs::read("/proc/self/status").unwrap_or_default());
    filters.count
}

/// Whether a process was started by `ancestor` or by one that was.
pub fn descends_from(pid: i32, ancestor: i32) -> bool {
    let mut pid = pid;
    while pid > 1 && pid != ancestor {
        match parent(pid) {
            Some(parent) => pid = parent,
            None => return false,
        }
    }
    pid == ancestor
}

/// The thread of process `pid` that knows itself by `number`, which differs where the process is
/// in a pid namespace of its own.
pub fn thread_by_own_number(pid: i32, number: u64) -> Option<i32> {
    let knows_itself =
        |thread: &i32| own_number(&format!("/proc/{pid}/task/{thread}")) == Some(number);
    let same = i32::try_from(number).ok().filter(knows_itself);
    same.or_else(|| threads(pid).into_iter().find(knows_itself))
}

/// The processes below `ancestor` of which a thread knows itself by `number`: several if there are
/// pid namespaces. The likeliest comes first, and may come again.
pub fn processes_by_own_number(ancestor: i32, number: u64) -> impl Iterator<Item = i32> {
    let has_thread = move |pid: &i32| thread_by_own_number(*pid, number).is_some();
    let same = i32::try_from(number).ok().and_then(process_of);
    let same = same.filter(|pid| has_thread(pid) && descends_from(*pid, ancestor));
    let mut below = VecDeque::from([ancestor]);
    let all = std::iter::from_fn(move || {
        let pid = below.pop_front()?;
        below.extend(children(pid));
        Some(pid)
    });
    same.into_iter().chain(all.filter(has_thread))
}

/// The process that a thread belongs to.
fn process_of(thread: i32) -> Option<i32> {
    let status = proc_text(&format!("/proc/{thread}/status")).ok()?;
    named_field(&status, "Tgid")?.parse().ok()
}

fn own_number(folder: &str) -> Option<u64> {
    let status = proc_text(&format!("{folder}/status")).ok()?;
    let numbers = named_field(&status, "NSpid")?;
    numbers.split_ascii_whitespace().next_back()?.parse().ok()
}

fn threads(pid: i32) -> Vec<i32> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/task"));
    let names = folder.into_iter().flatten().flatten();
    names
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn children(pid: i32) -> Vec<i32> {
    let lists = threads(pid)
        .into_iter()
        .filter_map(|thread| proc_text(&format!("/proc/{pid}/task/{thread}/children")).ok());
    lists
        .flat_map(|list| {
            list.split_ascii_whitespace()
                .filter_map(|child| child.parse().ok())
                .collect::<Vec<i32>>()
        })
        .collect()
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

/// The parent of a process.
pub fn parent(pid: i32) -> Option<i32> {
    stat_field(&stat(pid)?, 4)
}

/// When a process was started, in clock ticks since boot; none if it is gone or nothing of it runs
/// any more.
pub fn living_since(pid: i32) -> Option<u64> {
    start_of_living(&stat(pid)?)
}

/// A main thread that ended before the others shows as a zombie, too.
fn start_of_living(stat: &str) -> Option<u64> {
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

/// What stands behind a name and a colon, in files that have a line for each name.
fn named_field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim())
}

/// The same for a size, in bytes.
pub(crate) fn named_bytes(text: &str, name: &str) -> Option<u64> {
    let size = named_field(text, name)?.strip_suffix("kB")?;
    size.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A field of a `stat` file, counted from 1. The second, the name, may hold anything.
fn stat_field<T: std::str::FromStr>(text: &str, field: usize) -> Option<T> {
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
    fn threads_and_processes_are_found_by_their_own_numbers() {
        let own = own_id();
        assert_eq!(thread_by_own_number(own, own as u64), Some(own));
        assert_eq!(thread_by_own_number(own, u64::MAX), None);
        let mut child = std::process::Command::new("sleep")
            .arg("5")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        // At once, and by looking through all.
        let found: Vec<i32> = processes_by_own_number(own, pid as u64).collect();
        assert_eq!(found, [pid, pid]);
        assert_eq!(processes_by_own_number(own, 0).next(), None);
        assert_eq!(parent(pid), Some(own));
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

    #[test]
    fn descent_is_known() {
        let own = std::process::id() as i32;
        assert!(descends_from(own, own));
        assert!(descends_from(
            own,
            std::os::unix::process::parent_id() as i32
        ));
        assert!(!descends_from(1, own));
        assert!(!descends_from(0, own));
    }
}
