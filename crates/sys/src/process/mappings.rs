//! What another process maps.

use super::lines::{MOST_OF_MAPS, MOST_OF_SMAPS, each_line};
use super::{Inspector, MapsLine};
use crate::raw::{nr, syscall};
use crate::sync::lock;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::sync::LazyLock;

/// One mapping of a process, from `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualMemoryArea {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// What it holds.
    pub kind: AreaKind,
}

/// What a mapping holds. Of no file, and not a stack or another of the kernel's own: anonymous memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AreaKind {
    /// Private anonymous memory, readable and writable, not executable: it can be moved.
    Movable,
    /// Private anonymous memory without any access: what keeps a stack from running over.
    Guard,
    /// Private anonymous memory with another access.
    Anonymous,
    /// Private and not executable, of a file or the kernel's own: may hold anonymous pages as well.
    Private,
    /// Shared memory, code.
    Other,
}

/// By which a forked child's mappings show what its parent had registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InheritedBy {
    /// The kernel registered it with the userfaultfd that it made for the child (`um`).
    Registration,
    /// The parent's helper marked it when it withheld it (`rr`).
    Mark,
}

/// A range of a forked child that its parent had registered with a userfaultfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InheritedRange {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Emptied by the fork (`MADV_WIPEONFORK`).
    pub wiped: bool,
    /// As [`VirtualMemoryArea::is_movable`].
    pub movable: bool,
}

/// A range that is kept from forked children (`MADV_DONTFORK`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptRange {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Anonymous, and registered with a userfaultfd for missing pages: only such memory is ever out.
    pub is_registered: bool,
    /// By a driver, which has mapped memory of its own there: no `madvise` of the program's.
    pub is_of_driver: bool,
}

pub(crate) fn parse_line(line: &str) -> Option<VirtualMemoryArea> {
    let MapsLine {
        range,
        access,
        is_of_no_file,
        name,
        ..
    } = MapsLine::parse(line)?;
    let is_anonymous =
        is_of_no_file && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:"));
    let kind = match access {
        "rw-p" if is_anonymous => AreaKind::Movable,
        "---p" if is_anonymous => AreaKind::Guard,
        _ if is_anonymous && access.ends_with('p') => AreaKind::Anonymous,
        _ if access.ends_with("-p") => AreaKind::Private,
        _ => AreaKind::Other,
    };
    Some(VirtualMemoryArea {
        start: range.start,
        end: range.end,
        kind,
    })
}

/// Finds mappings and their flags in the lines of a `smaps`.
#[derive(Default)]
struct Flagged {
    area: Option<VirtualMemoryArea>,
}

impl Flagged {
    /// The mapping and its flags, at the line that ends what is said of it.
    fn look<'a>(&mut self, line: &'a str) -> Option<(VirtualMemoryArea, &'a str)> {
        let is_first = |byte: &u8| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase();
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            return Some((self.area.take()?, flags));
        }
        if line.as_bytes().first().is_some_and(is_first) {
            self.area = parse_line(line);
        }
        None
    }
}

fn has_flag(flags: &str, flag: &str) -> bool {
    flags.split_ascii_whitespace().any(|other| other == flag)
}

/// A mapping that was registered with a userfaultfd, or had been, by its flags in `smaps`.
pub(crate) fn inherited_range(
    area: &VirtualMemoryArea,
    flags: &str,
    by: InheritedBy,
) -> Option<InheritedRange> {
    let is_inherited = match by {
        InheritedBy::Registration => has_flag(flags, "um"),
        InheritedBy::Mark => has_flag(flags, "rr") && area.is_anonymous(),
    };
    is_inherited.then(|| InheritedRange {
        start: area.start,
        end: area.end,
        wiped: has_flag(flags, "wf"),
        movable: area.is_movable(),
    })
}

/// All of those in the text of a `smaps`.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn inherited_ranges(smaps: &str, by: InheritedBy) -> Vec<InheritedRange> {
    let mut flagged = Flagged::default();
    let areas = smaps.lines().filter_map(|line| flagged.look(line));
    areas
        .filter_map(|(area, flags)| inherited_range(&area, flags, by))
        .collect()
}

/// What `pick` makes of mappings and their flags.
fn pick_flagged<T>(
    smaps: &File,
    mut pick: impl FnMut(&VirtualMemoryArea, &str) -> Option<T>,
) -> io::Result<Vec<T>> {
    let (mut flagged, mut picked) = (Flagged::default(), Vec::new());
    each_line(smaps, MOST_OF_SMAPS, |line| {
        if let Some((area, flags)) = flagged.look(line) {
            picked.extend(pick(&area, flags));
        }
        ControlFlow::<()>::Continue(())
    })?;
    Ok(picked)
}

/// All mappings of a `maps`.
fn areas_of(maps: &File) -> io::Result<Vec<VirtualMemoryArea>> {
    let mut areas = Vec::new();
    each_line(maps, MOST_OF_MAPS, |line| {
        areas.extend(parse_line(line));
        ControlFlow::<()>::Continue(())
    })?;
    Ok(areas)
}

/// The ranges that a `smaps` shows as kept from forked children.
pub(super) fn kept_ranges(smaps: &File) -> io::Result<Vec<KeptRange>> {
    pick_flagged(smaps, kept_range)
}

fn kept_range(area: &VirtualMemoryArea, flags: &str) -> Option<KeptRange> {
    let has = |flag| has_flag(flags, flag);
    has("dc").then(|| KeptRange {
        start: area.start,
        end: area.end,
        // Shared memory can be registered, too, and is never out.
        is_registered: has("um") && area.is_anonymous(),
        // Huge pages are not to be expanded either.
        is_of_driver: has("io") || has("pf") || (has("de") && !has("ht")),
    })
}

/// Whether a `smaps` shows sealed anonymous memory in all of the ranges `(start, end)`. It is read no
/// further than they reach, as the kernel walks the page tables for each mapping.
fn shows_sealed(smaps: &File, ranges: &[(u64, u64)]) -> io::Result<bool> {
    let mut left: Vec<(u64, u64)> = ranges.to_vec();
    let mut flagged = Flagged::default();
    let found = each_line(smaps, MOST_OF_SMAPS, |line| {
        if let Some((area, flags)) = flagged.look(line)
            && area.is_movable()
            && has_flag(flags, "sl")
        {
            for (start, _) in &mut left {
                if (area.start..area.end).contains(start) {
                    *start = area.end;
                }
            }
            left.retain(|(start, end)| start < end);
        }
        if left.is_empty() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    Ok(ranges.is_empty() || found.is_some())
}

/// Whether this kernel finds one mapping (`PROCMAP_QUERY`, Linux 6.11). Without it, all are listed.
pub fn kernel_finds_mappings() -> bool {
    let mut query = MappingQuery::of_address(0);
    // SAFETY: a live structure that names no other memory.
    File::open("/proc/self/maps").is_ok_and(|maps| unsafe {
        let found = libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query);
        // There is no mapping at 0.
        found == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT)
    })
}

/// Whether this kernel seals mappings (`mseal`, Linux 6.10), and lets this process.
pub fn kernel_seals() -> bool {
    // SAFETY: an empty range.
    static SEALS: LazyLock<bool> = LazyLock::new(|| unsafe { syscall(nr::MSEAL, [0; 6]) == 0 });
    *SEALS
}

const PROCMAP_QUERY: libc::Ioctl = 0xc068_6611_u32 as libc::Ioctl;
impl VirtualMemoryArea {
    /// Whether this is a guard right below `above`, as a thread's stack has one.
    pub fn guards(&self, above: &VirtualMemoryArea) -> bool {
        self.kind == AreaKind::Guard && above.is_movable() && self.end == above.start
    }

    /// Readable and writable, not executable, private, of no file, not a stack or another of the
    /// kernel's own: anonymous memory that can be moved.
    pub fn is_movable(&self) -> bool {
        self.kind == AreaKind::Movable
    }

    /// Private, of no file, not a stack or another of the kernel's own; with any access.
    pub fn is_anonymous(&self) -> bool {
        matches!(
            self.kind,
            AreaKind::Movable | AreaKind::Guard | AreaKind::Anonymous
        )
    }

    /// May hold anonymous pages, which forked children share.
    pub fn may_be_shared(&self) -> bool {
        !matches!(self.kind, AreaKind::Guard | AreaKind::Other)
    }
}

impl Inspector {
    /// All mappings, in address order.
    ///
    /// # Errors
    /// [`io::ErrorKind::FileTooLarge`] if `maps` has more than 32 MiB, for many mappings or long names; and if the process
    /// is gone.
    pub fn areas(&self) -> io::Result<Vec<VirtualMemoryArea>> {
        let areas = areas_of(&self.maps);
        self.or_by_living(areas, || areas_of(&self.open_mappings("maps")?))
    }

    /// The mapping that holds an address, as `(start, end)`; `None` if there is none. Its kind
    /// is not returned.
    ///
    /// # Errors
    /// Before Linux 6.11, and if the process is gone.
    pub fn mapping_at(&self, address: u64) -> io::Result<Option<(u64, u64)>> {
        let mut query = MappingQuery::of_address(address);
        // SAFETY: the structure is live and of that size; it names no other memory.
        let result = unsafe { libc::ioctl(self.maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if result == 0 {
            return Ok(Some((query.start, query.end)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT) => Ok(None),
            _ => Err(error),
        }
    }

    /// Whether there is a mapping of just this range.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn has_mapping(&self, start: u64, end: u64) -> io::Result<bool> {
        match self.mapping_at(start) {
            // Before Linux 6.11.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                let areas = self.areas()?;
                Ok(areas
                    .iter()
                    .any(|area| (area.start, area.end) == (start, end)))
            }
            found => Ok(found? == Some((start, end))),
        }
    }

    /// The ranges that a forked child inherited from what its parent had registered. Slower than [`Inspector::areas`]: the
    /// kernel walks the page tables. Of an inspector that was opened with the
    /// flags of mappings.
    ///
    /// # Errors
    /// If it was not, if they take more than 512 MiB, and if the address space is gone.
    pub fn inherited_ranges(&self, by: InheritedBy) -> io::Result<Vec<InheritedRange>> {
        let smaps = lock(&self.smaps);
        let file = smaps.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let look = |file: &File| pick_flagged(file, |area, flags| inherited_range(area, flags, by));
        self.or_by_living(look(file), || look(&self.open_mappings("smaps")?))
    }

    /// Whether the ranges `(start, end)` are sealed anonymous memory: then they stay so as long as the
    /// address space lasts, and reading there waits for no file. Of an inspector that was opened with the
    /// flags of mappings.
    ///
    /// # Errors
    /// If it was not, and if the address space is gone.
    pub fn has_sealed(&self, ranges: &[(u64, u64)]) -> io::Result<bool> {
        let smaps = lock(&self.smaps);
        let file = smaps.as_ref().ok_or(io::ErrorKind::NotFound)?;
        shows_sealed(file, ranges)
    }

    /// Closes the flags of mappings, which are of no more use.
    pub fn close_flags(&self) {
        let mut smaps = lock(&self.smaps);
        *smaps = None;
    }
}

#[repr(C)]
#[derive(Default)]
struct MappingQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    /// Other attributes of the mapping, unused here.
    others: [u64; 8],
}

const _: () = assert!(size_of::<MappingQuery>() == 104);

impl MappingQuery {
    fn of_address(address: u64) -> MappingQuery {
        MappingQuery {
            size: size_of::<MappingQuery>() as u64,
            address,
            ..MappingQuery::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{read_write, same_layout};
    use crate::process::lines;
    use crate::process::own_id;
    use linux_raw_sys::general::procmap_query;

    #[test]
    fn a_query_has_the_kernels_layout() {
        same_layout!(MappingQuery, procmap_query, {
            size => size, flags => query_flags, address => query_addr, start => vma_start,
            end => vma_end,
        });
        // The number of `/proc/PID/maps` in linux/fs.h.
        let query = read_write(b'f', 17, size_of::<procmap_query>());
        assert_eq!(PROCMAP_QUERY as u32 as usize, query);
    }

    #[test]
    fn maps_lines_are_understood() {
        let heap = parse_line("55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0    [heap]").unwrap();
        assert!(heap.is_movable());
        assert_eq!(heap.end - heap.start, 0x21000);
        for other in [
            "7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]",
            "7f0000000000-7f0000001000 r--p 00000000 00:00 0",
            "7f0000000000-7f0000001000 rw-s 00000000 00:00 0",
            "7f0000000000-7f0000001000 rwxp 00000000 00:00 0",
            "7f0000000000-7f0000001000 rw-p 00000000 08:01 1234 /lib/x.so",
            "7f0000000000-7f0000001000 rw-p 00000000 00:27 0 ",
        ] {
            assert!(!parse_line(other).unwrap().is_movable(), "{other}");
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

    /// As many mappings as there are headers and flags, one after the other.
    fn smaps(mappings: &[(&str, &str)]) -> String {
        let text = mappings
            .iter()
            .map(|(header, flags)| format!("{header}\nRss:  0 kB\nVmFlags: {flags}\n"));
        text.collect()
    }

    #[test]
    fn what_is_kept_from_children_says_by_whom() {
        let area = parse_line("1000-3000 rw-p 00000000 00:00 0").unwrap();
        let kept = |flags| {
            let kept = kept_range(&area, flags)?;
            Some((kept.is_registered, kept.is_of_driver))
        };
        assert_eq!(kept("rd wr mr mw me ac"), None);
        assert_eq!(kept("rd wr dc ac"), Some((false, false)));
        assert_eq!(kept("rd wr dc rr um"), Some((true, false)));
        assert_eq!(kept("rd wr sh io dc de"), Some((false, true)));
        assert_eq!(kept("rd wr sh dc de"), Some((false, true)), "as of perf");
        assert_eq!(kept("rd wr dc de ht"), Some((false, false)));
    }

    #[test]
    fn only_sealed_anonymous_memory_counts_as_sealed() {
        let first = "1000-3000 rw-p 00000000 00:00 0";
        let second = "3000-5000 rw-p 00000000 00:00 0";
        let file = "3000-5000 rw-p 00000000 00:27 0 /mnt/file";
        let shows = |mappings: &[(&str, &str)], ranges: &[(u64, u64)]| {
            shows_sealed(&lines::file(smaps(mappings).as_bytes()), ranges).unwrap()
        };
        let (sealed, open) = ("rd wr um sl", "rd wr um");
        let both = [(first, sealed), (second, sealed)];
        assert!(shows(&both, &[(0x1000, 0x5000)]), "two mappings in a row");
        assert!(shows(&both, &[(0x4000, 0x5000), (0x1000, 0x2000)]));
        assert!(!shows(&both, &[(0x1000, 0x6000)]), "one page more");
        assert!(!shows(&both, &[(0, 0x2000)]), "one page before");
        let partly = [(first, sealed), (second, open)];
        assert!(shows(&partly, &[(0x1000, 0x3000)]));
        assert!(!shows(&partly, &[(0x1000, 0x5000)]));
        assert!(!shows(
            &[(first, sealed), (file, sealed)],
            &[(0x1000, 0x5000)]
        ));
        assert!(!shows(&[(first, sealed)], &[(0x1000, 0x5000)]), "a gap");
    }

    #[test]
    fn memory_that_this_kernel_seals_is_seen_to_be() {
        if !kernel_seals() {
            memfold_testing::skip("mseal (Linux 6.10)");
            return;
        }
        let process = crate::process::Process::open(own_id()).unwrap();
        let inspector =
            Inspector::open_with_flags(&std::sync::Arc::new(process), own_id()).unwrap();
        // It stays until this process ends.
        let mapping = std::mem::ManuallyDrop::new(crate::memory::Mapping::anonymous(8192).unwrap());
        let start = mapping.start().as_ptr() as u64;
        let range = [(start, start + 8192)];
        assert!(!inspector.has_sealed(&range).unwrap());
        // SAFETY: a mapping that is never unmapped.
        let sealed = unsafe { syscall(nr::MSEAL, [start as usize, 8192, 0, 0, 0, 0]) };
        assert_eq!(sealed, 0);
        assert!(inspector.has_sealed(&range).unwrap());
        inspector.close_flags();
        assert!(inspector.has_sealed(&range).is_err());
    }

    #[test]
    fn a_mapping_is_found_by_an_address() {
        let process = crate::process::Process::open(own_id()).unwrap();
        let inspector = Inspector::open(&std::sync::Arc::new(process), own_id()).unwrap();
        let on_the_stack = 0u8;
        let address = &raw const on_the_stack as u64;
        match inspector.mapping_at(address) {
            Ok(Some((start, end))) => assert!(start <= address && address < end),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                memfold_testing::skip("PROCMAP_QUERY (Linux 6.11)");
                return;
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(inspector.mapping_at(0).unwrap(), None);
    }
}
