//! Looking into another process: what it maps, what is resident, what a page holds.

use crate::PAGE_SIZE;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// One mapping of a process, from `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualMemoryArea {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Readable and writable, not executable, private, of no file, not a stack or another of the
    /// kernel's own: anonymous memory that can be moved.
    pub movable: bool,
    /// Private, of no file, and without any access: what keeps a stack from running over.
    pub guard: bool,
}

/// A range of a forked child that is registered with a userfaultfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InheritedRange {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Emptied by the fork (`MADV_WIPEONFORK`).
    pub wiped: bool,
    /// As of a [`VirtualMemoryArea`].
    pub movable: bool,
}

fn parse_line(line: &str) -> Option<VirtualMemoryArea> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or("");
    let anonymous_name = name.is_empty() || name == "[heap]" || name.starts_with("[anon:");
    Some(VirtualMemoryArea {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        movable: permissions == "rw-p" && inode == "0" && anonymous_name,
        guard: permissions == "---p" && inode == "0" && anonymous_name,
    })
}

impl VirtualMemoryArea {
    /// Whether this is a guard right below `above`, as a thread's stack has one.
    pub fn guards(&self, above: &VirtualMemoryArea) -> bool {
        self.guard && above.movable && self.end == above.start
    }
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

/// How large a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// All mappings together.
    pub mapped_pages: u64,
    /// Resident anonymous pages.
    pub resident_pages: u64,
}

/// The thread of process `pid` that knows itself by `number`, which differs where the process is
/// in a pid namespace of its own.
pub fn thread_by_own_number(pid: i32, number: u64) -> Option<i32> {
    let knows_itself =
        |thread: &i32| own_number(&format!("/proc/{pid}/task/{thread}")) == Some(number);
    let same = i32::try_from(number).ok().filter(knows_itself);
    same.or_else(|| threads(pid).into_iter().find(knows_itself))
}

/// The processes below `ancestor` whose main thread knows itself by `number`: several if there are
/// pid namespaces. The likeliest comes first, and may come again.
pub fn processes_by_own_number(ancestor: i32, number: u64) -> impl Iterator<Item = i32> {
    let knows_itself = move |pid: &i32| own_number(&format!("/proc/{pid}")) == Some(number);
    let same = i32::try_from(number).ok();
    let same = same.filter(|pid| knows_itself(pid) && descends_from(*pid, ancestor));
    let mut below = VecDeque::from([ancestor]);
    let all = std::iter::from_fn(move || {
        let pid = below.pop_front()?;
        below.extend(children(pid));
        Some(pid)
    });
    same.into_iter().chain(all.filter(knows_itself))
}

fn own_number(folder: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("{folder}/status")).ok()?;
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
    let lists = threads(pid).into_iter().filter_map(|thread| {
        std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).ok()
    });
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
    std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()
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

/// What is looked at in a process, its files held open.
///
/// It looks by way of one thread, which must live as long as the program does: the main thread
/// may end before the others, and after an `exec` its number is that of another program.
#[derive(Debug)]
pub struct Inspector {
    statm: File,
    stat: File,
    pagemap: File,
    memory: File,
    pid: i32,
    thread: i32,
    handle: OwnedFd,
}

impl Inspector {
    /// Opens the files of a process, by way of one of its threads. Fails if it is gone or may not
    /// be inspected.
    pub fn open(pid: i32, thread: i32) -> io::Result<Inspector> {
        // SAFETY: numbers only; the descriptor is fresh.
        let handle = unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Inspector {
            statm: File::open(format!("/proc/{pid}/task/{thread}/statm"))?,
            stat: File::open(format!("/proc/{pid}/stat"))?,
            pagemap: File::open(format!("/proc/{pid}/task/{thread}/pagemap"))?,
            memory: File::open(format!("/proc/{pid}/task/{thread}/mem"))?,
            pid,
            thread,
            handle,
        })
    }

    /// The process's number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn path(&self, name: &str) -> String {
        format!("/proc/{}/task/{}/{name}", self.pid, self.thread)
    }

    /// Faults of all threads that were served without a message or input: first touches of what is
    /// not registered, and pages that a write takes out of sharing.
    pub fn minor_faults(&self) -> io::Result<u64> {
        let mut buffer = [0u8; 1024];
        let length = self.stat.read_at(&mut buffer, 0)?;
        let text = String::from_utf8_lossy(&buffer[..length]);
        stat_field(&text, 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// What the main thread ended with, if it has ended and one other thread is left.
    pub fn left_to_one(&self) -> Option<u8> {
        let mut buffer = [0u8; 1024];
        let length = self.stat.read_at(&mut buffer, 0).ok()?;
        let text = String::from_utf8_lossy(&buffer[..length]);
        let left = stat_field(&text, 3) == Some('Z') && stat_field(&text, 20) == Some(2);
        let status: u32 = stat_field(&text, 52).filter(|_| left)?;
        // As `wait` has it.
        Some((status >> 8) as u8)
    }

    /// How much is mapped, and how much anonymous memory is resident.
    pub fn sizes(&self) -> io::Result<Sizes> {
        let mut buffer = [0u8; 128];
        let length = self.statm.read_at(&mut buffer, 0)?;
        let text = std::str::from_utf8(&buffer[..length]).unwrap_or("");
        let mut fields = text
            .split_ascii_whitespace()
            .map_while(|field| field.parse::<u64>().ok());
        match (fields.next(), fields.next(), fields.next()) {
            (Some(mapped), Some(resident), Some(shared)) => Ok(Sizes {
                mapped_pages: mapped,
                resident_pages: resident.saturating_sub(shared),
            }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Whether the thread by which the process is looked at is stopped, by a signal or a debugger.
    pub fn is_stopped(&self) -> bool {
        matches!(self.thread_state(), Some('T' | 't'))
    }

    /// Whether that thread does not go on by itself: it is stopped, or has ended.
    pub fn stands_still(&self) -> bool {
        matches!(self.thread_state(), None | Some('T' | 't' | 'Z' | 'X'))
    }

    fn thread_state(&self) -> Option<char> {
        stat_field(&std::fs::read_to_string(self.path("stat")).ok()?, 3)
    }

    /// The process that traces the thread by which this one is looked at.
    pub fn tracer(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.path("status")).ok()?;
        let tracer = named_field(&text, "TracerPid")?.parse().ok();
        tracer.filter(|tracer| *tracer != 0)
    }

    /// Anonymous memory in bytes with each page divided among those who share it. Slower: the
    /// kernel walks the page tables.
    pub fn proportional_bytes(&self) -> io::Result<u64> {
        let text = std::fs::read_to_string(self.path("smaps_rollup"))?;
        named_bytes(&text, "Pss_Anon").ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// All mappings, in address order.
    pub fn areas(&self) -> io::Result<Vec<VirtualMemoryArea>> {
        let mut text = String::new();
        File::open(self.path("maps"))?.read_to_string(&mut text)?;
        Ok(text.lines().filter_map(parse_line).collect())
    }

    /// The mapping that holds an address, as `(start, end)`; `None` if there is none. Of what kind it is,
    /// is not told.
    ///
    /// # Errors
    /// Before Linux 6.11, and if the process is gone.
    pub fn mapping_at(&self, address: u64) -> io::Result<Option<(u64, u64)>> {
        const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
        let maps = File::open(self.path("maps"))?;
        let mut query = MappingQuery {
            size: size_of::<MappingQuery>() as u64,
            address,
            ..MappingQuery::default()
        };
        // SAFETY: the structure is live and of the size told; it names no other memory.
        let result = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if result == 0 {
            return Ok(Some((query.start, query.end)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT) => Ok(None),
            _ => Err(error),
        }
    }

    /// The ranges that are registered with a userfaultfd. Slower than [`Inspector::areas`]: the
    /// kernel walks the page tables.
    pub fn inherited_ranges(&self) -> io::Result<Vec<InheritedRange>> {
        let text = std::fs::read_to_string(self.path("smaps"))?;
        let mut area = None;
        let mut ranges = Vec::new();
        for line in text.lines() {
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                let has = |flag| flags.split_ascii_whitespace().any(|other| other == flag);
                ranges.extend(
                    area.take()
                        .filter(|_| has("um"))
                        .map(|area: VirtualMemoryArea| InheritedRange {
                            start: area.start,
                            end: area.end,
                            wiped: has("wf"),
                            movable: area.movable,
                        }),
                );
            } else if line
                .as_bytes()
                .first()
                .is_some_and(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase())
            {
                area = parse_line(line);
            }
        }
        Ok(ranges)
    }

    /// The runs `(start, end)` of pages of the range that are in memory (or in the kernel's own
    /// swap).
    pub fn present(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        const PRESENT_OR_SWAPPED: u64 = (1 << 3) | (1 << 4);
        self.scan(start, end, PRESENT_OR_SWAPPED)
    }

    /// The guard regions (`MADV_GUARD_INSTALL`) in a range, as `(start, end)`. None where the kernel
    /// does not tell (before Linux 6.16).
    pub fn guards(&self, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
        const GUARD: u64 = 1 << 8;
        match self.scan(start, end, GUARD) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(Vec::new()),
            guards => guards,
        }
    }

    /// The runs of pages of the range that are in one of the categories.
    fn scan(&self, start: u64, end: u64, categories: u64) -> io::Result<Vec<(u64, u64)>> {
        const ENTRIES: usize = 512;
        const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
        let mut regions = [PageRegion::default(); ENTRIES];
        let mut found = Vec::new();
        let mut from = start;
        while from < end {
            let mut scan = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start: from,
                end,
                vector: regions.as_mut_ptr() as u64,
                vector_length: ENTRIES as u64,
                category_any_of: categories,
                return_mask: categories,
                ..ScanArgument::default()
            };
            // SAFETY: the structure and the vector it names are live and of the sizes told.
            let filled =
                unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
            if filled < 0 {
                return Err(io::Error::last_os_error());
            }
            let filled = &regions[..filled as usize];
            found.extend(filled.iter().map(|region| (region.start, region.end)));
            if scan.walk_end <= from {
                break;
            }
            from = scan.walk_end;
        }
        Ok(found)
    }

    /// Copies pages out of the process: `sources` are addresses of single pages, `target` has room
    /// for all. Returns how many whole pages were copied, from the front.
    pub fn read_pages(&self, sources: &[u64], target: &mut [u8]) -> io::Result<usize> {
        assert!(
            target.len() >= sources.len() * PAGE_SIZE,
            "room for every page"
        );
        let mut copied = 0;
        for (chunk, room) in sources.chunks(64).zip(target.chunks_mut(64 * PAGE_SIZE)) {
            let mut remote = [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }; 64];
            for (vector, source) in remote.iter_mut().zip(chunk) {
                vector.iov_base = *source as *mut libc::c_void;
                vector.iov_len = PAGE_SIZE;
            }
            let local = libc::iovec {
                iov_base: room.as_mut_ptr().cast(),
                iov_len: chunk.len() * PAGE_SIZE,
            };
            // SAFETY: the local vector names live memory of that length; the remote one is
            // checked by the kernel.
            let bytes = unsafe {
                libc::process_vm_readv(
                    self.thread,
                    &local,
                    1,
                    remote.as_ptr(),
                    chunk.len() as u64,
                    0,
                )
            };
            if bytes < 0 {
                let error = io::Error::last_os_error();
                if error.raw_os_error() == Some(libc::ESRCH) {
                    return self.read_what_is_left(sources, target);
                }
                return Err(error);
            }
            copied += bytes as usize / PAGE_SIZE;
            if bytes as usize != chunk.len() * PAGE_SIZE {
                break;
            }
        }
        Ok(copied)
    }

    /// The same by way of the memory itself: it is there for as long as anybody is in it, a child that
    /// has yet to execute its program, say, when the thread has ended.
    fn read_what_is_left(&self, sources: &[u64], target: &mut [u8]) -> io::Result<usize> {
        for (source, page) in sources.iter().zip(target.chunks_mut(PAGE_SIZE)) {
            self.memory.read_exact_at(page, *source)?;
        }
        Ok(sources.len())
    }

    /// The CPU that a thread of the process last ran on.
    pub fn last_cpu(&self, thread: u32) -> Option<usize> {
        let mut buffer = [0u8; 1024];
        let path = format!("/proc/{}/task/{thread}/stat", self.pid);
        let length = File::open(path).ok()?.read(&mut buffer).ok()?;
        stat_field(std::str::from_utf8(&buffer[..length]).ok()?, 39)
    }

    /// A descriptor of the process (a pidfd).
    pub fn handle(&self) -> io::Result<OwnedFd> {
        self.handle.try_clone()
    }

    /// Sends a signal to this very process, not to one that got its number later.
    pub fn kill(&self, signal: i32) -> io::Result<()> {
        // SAFETY: our own descriptor, numbers, no information structure.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.handle.as_fd().as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
#[derive(Default)]
struct MappingQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    /// What else is told of the mapping: nothing that is of interest here.
    others: [u64; 8],
}

const _: () = assert!(size_of::<MappingQuery>() == 104);

#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_length: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of: u64,
    return_mask: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_lines_are_understood() {
        let heap = parse_line("55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0    [heap]").unwrap();
        assert!(heap.movable);
        assert_eq!(heap.end - heap.start, 0x21000);
        for other in [
            "7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]",
            "7f0000000000-7f0000001000 r--p 00000000 00:00 0",
            "7f0000000000-7f0000001000 rw-s 00000000 00:00 0",
            "7f0000000000-7f0000001000 rwxp 00000000 00:00 0",
            "7f0000000000-7f0000001000 rw-p 00000000 08:01 1234 /lib/x.so",
        ] {
            assert!(!parse_line(other).unwrap().movable, "{other}");
        }
    }

    #[test]
    fn a_guard_is_right_below_what_it_guards() {
        let area = |line| parse_line(line).unwrap();
        let guard = area("7f0000000000-7f0000001000 ---p 00000000 00:00 0");
        let stack = area("7f0000001000-7f0000801000 rw-p 00000000 00:00 0");
        let apart = area("7f0000002000-7f0000801000 rw-p 00000000 00:00 0");
        assert!(guard.guards(&stack));
        assert!(!guard.guards(&apart));
        assert!(!stack.guards(&guard));
    }

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

    #[test]
    fn a_mapping_is_found_by_an_address() {
        let inspector = Inspector::open(own_id(), own_id()).unwrap();
        let on_the_stack = 0u8;
        let address = &raw const on_the_stack as u64;
        match inspector.mapping_at(address) {
            Ok(Some((start, end))) => assert!(start <= address && address < end),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                eprintln!("SKIPPED: PROCMAP_QUERY (Linux 6.11)");
                return;
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(inspector.mapping_at(0).unwrap(), None);
    }

    #[test]
    fn own_memory_is_seen() {
        let inspector = Inspector::open(own_id(), own_id()).unwrap();
        let buffer = vec![7u8; 64 * PAGE_SIZE];
        let first = (buffer.as_ptr() as u64).next_multiple_of(PAGE_SIZE as u64);
        let present = inspector
            .present(first, first + 32 * PAGE_SIZE as u64)
            .unwrap();
        let bytes: u64 = present.iter().map(|(start, end)| end - start).sum();
        assert_eq!(bytes, 32 * PAGE_SIZE as u64);
        let mut copy = vec![0u8; 2 * PAGE_SIZE];
        assert_eq!(
            inspector
                .read_pages(&[first, first + PAGE_SIZE as u64], &mut copy)
                .unwrap(),
            2
        );
        assert!(copy.iter().all(|byte| *byte == 7));
        assert!(inspector.sizes().unwrap().resident_pages >= 64);
        assert!(inspector.minor_faults().unwrap() > 0);
        assert!(inspector.proportional_bytes().unwrap() > 0);
        assert!(inspector.areas().unwrap().iter().any(|vma| vma.movable));
    }
}
