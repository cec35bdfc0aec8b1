//! Asking the kernel for one mapping of another process (`PROCMAP_QUERY`, Linux 6.11).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const PROCMAP_QUERY: libc::Ioctl = 0xc068_6611_u32 as libc::Ioctl;
/// `PROCMAP_QUERY_COVERING_OR_NEXT_VMA`: the mapping that holds the address, or the next one.
const OR_NEXT: u64 = 0x10;
/// `PROCMAP_QUERY_VMA_READABLE` and so on, with the letters that `maps` has for them.
const ACCESS: [(u64, char); 3] = [(1, 'r'), (2, 'w'), (4, 'x')];
const SHARED: u64 = 8;

/// Bytes that there are for a name. What the kernel and programs name memory is shorter.
pub(super) const LONGEST_NAME: usize = 128;

/// Whether this kernel answers. Without it, all mappings are listed.
pub fn kernel_finds_mappings() -> bool {
    File::open("/proc/self/maps").is_ok_and(|maps| at(&maps, 0).is_ok())
}

/// The mapping that holds an address, if there is one. `maps` is the file of the process.
///
/// # Errors
/// Before Linux 6.11 (`ENOTTY`), and if the process is gone (`ESRCH`).
pub(super) fn at(maps: &File, address: u64) -> io::Result<Option<FoundMapping>> {
    FoundMapping::ask(maps, 0, address, &mut [])
}

/// The same, or the next one behind the address; with its name if there is room for one, which takes most of the time for a
/// mapping of a file.
///
/// # Errors
/// As [`at`], and if the name is longer (`ENAMETOOLONG`).
pub(super) fn at_or_behind(
    maps: &File,
    address: u64,
    name: &mut [u8],
) -> io::Result<Option<FoundMapping>> {
    FoundMapping::ask(maps, OR_NEXT, address, name)
}

/// The question, and the kernel's answer in it: its `struct procmap_query`.
#[derive(Default)]
#[repr(C)]
pub(super) struct FoundMapping {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    attributes: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

const _: () = assert!(size_of::<FoundMapping>() == 104);

impl FoundMapping {
    fn ask(
        maps: &File,
        flags: u64,
        address: u64,
        name: &mut [u8],
    ) -> io::Result<Option<FoundMapping>> {
        let mut query = FoundMapping {
            size: size_of::<FoundMapping>() as u64,
            flags,
            address,
            name_size: name.len() as u32,
            name: if name.is_empty() {
                0
            } else {
                name.as_mut_ptr() as u64
            },
            ..FoundMapping::default()
        };
        // SAFETY: the structure is live and of that size, and so is the room for a name.
        let result = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if result == 0 {
            return Ok(Some(query));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOENT) => Ok(None),
            _ => Err(error),
        }
    }

    pub(super) fn start(&self) -> u64 {
        self.start
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// As [`MapsLine::is_of_no_file`](super::MapsLine::is_of_no_file).
    pub(super) fn is_of_no_file(&self) -> bool {
        self.device == [0, 0] && self.inode == 0
    }

    /// Bytes of its name; 0 if it has none, or was not asked for it.
    pub(super) fn name_length(&self) -> usize {
        // The kernel counts the zero at its end.
        self.name_size.saturating_sub(1) as usize
    }

    /// What it may be used for, as [`MapsLine::access`](super::MapsLine::access).
    pub(super) fn access(&self) -> String {
        let has = |bit: u64| self.attributes & bit != 0;
        let letters = ACCESS
            .iter()
            .map(|(bit, letter)| if has(*bit) { *letter } else { '-' });
        let end = if has(SHARED) { 's' } else { 'p' };
        letters.chain([end]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{read_write, same_layout};
    use linux_raw_sys::general::{procmap_query, procmap_query_flags as bits};
    use std::mem::offset_of;

    #[test]
    fn a_query_has_the_kernels_layout() {
        same_layout!(FoundMapping, procmap_query, {
            size => size, flags => query_flags, address => query_addr, start => vma_start,
            end => vma_end, attributes => vma_flags, page_size => vma_page_size,
            offset => vma_offset, inode => inode, name_size => vma_name_size,
            build_id_size => build_id_size, name => vma_name_addr, build_id => build_id_addr,
        });
        let device = offset_of!(FoundMapping, device);
        assert_eq!(device, offset_of!(procmap_query, dev_major));
        let access = [
            bits::PROCMAP_QUERY_VMA_READABLE,
            bits::PROCMAP_QUERY_VMA_WRITABLE,
            bits::PROCMAP_QUERY_VMA_EXECUTABLE,
        ];
        assert_eq!(ACCESS.map(|(bit, _)| bit), access.map(|bit| bit as u64));
        assert_eq!(SHARED, bits::PROCMAP_QUERY_VMA_SHARED as u64);
        assert_eq!(OR_NEXT, bits::PROCMAP_QUERY_COVERING_OR_NEXT_VMA as u64);
        // The number of `/proc/PID/maps` in linux/fs.h.
        let query = read_write(b'f', 17, size_of::<procmap_query>());
        assert_eq!(PROCMAP_QUERY as u32 as usize, query);
    }
}
