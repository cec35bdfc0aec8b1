//! The swap file: unlinked, private to the user, written past the page cache.
//!
//! With `O_DIRECT` a write has reached the device, or failed, when it returns; only then may the pool's
//! copy of the page be freed. A write-back error of the page cache would come too late, and the page
//! cache is not counted towards the limit. Some file systems accept the flag and still use the page
//! cache, always or in some cases (ext4 with data journalling, btrfs with checksums, f2fs for less than
//! a block). So `O_DSYNC` is added unless `statx` reports direct I/O of sectors, and used alone if
//! `O_DIRECT` is refused.
//!
//! Writes are synchronous, because compressing and encrypting a batch takes much longer than writing
//! it, and no other thread waits for the write.

use crate::sync::{Mutex, lock};
use memfold_swap::{FileBackend, FileTier};
use memfold_sys::PAGE_SIZE;
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of buffers kept for reuse. More saves allocations under concurrent loads and takes
/// more memory.
const BUFFERS: usize = 8;

/// An unlinked swap file. Any thread reads and writes it; `buffers` has its own lock.
#[derive(Debug)]
pub(crate) struct SwapFile {
    file: File,
    buffers: Mutex<Vec<AlignedBuffer>>,
}

impl SwapFile {
    /// Creates a sparse file of `bytes` bytes in `directory`.
    ///
    /// # Errors
    /// If the file system refuses such a file, or refuses to read and write it.
    pub(crate) fn create(directory: &Path, bytes: u64) -> io::Result<SwapFile> {
        if let Ok(file) = Self::with_flags(directory, bytes, libc::O_DIRECT)
            && is_direct(&file.file)
        {
            return Ok(file);
        }
        Self::with_flags(directory, bytes, libc::O_DIRECT | libc::O_DSYNC)
            .or_else(|_| Self::with_flags(directory, bytes, libc::O_DSYNC))
    }

    fn with_flags(directory: &Path, bytes: u64, flags: i32) -> io::Result<SwapFile> {
        let file = open_unnamed(directory, flags)?;
        // Readahead must not read beyond the end.
        file.set_len(bytes)?;
        let file = SwapFile {
            file,
            buffers: Mutex::default(),
        };
        // Some file systems accept `O_DIRECT` and then refuse transfers, or transfers of one sector.
        let mut sector = [0; FileTier::SECTOR];
        let second = FileTier::SECTOR as u64;
        file.write_at(second, &sector)?;
        file.read_at(second, &mut sector)?;
        Ok(file)
    }

    /// Calls `transfer` with a page-aligned buffer of `length` bytes.
    fn with_buffer<R>(&self, length: usize, transfer: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut buffer = lock(&self.buffers).pop().unwrap_or_default();
        let result = transfer(buffer.slice(length));
        let mut buffers = lock(&self.buffers);
        if buffers.len() < BUFFERS {
            buffers.push(buffer);
        }
        result
    }
}

impl FileBackend for SwapFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.with_buffer(buffer.len(), |aligned| {
            self.file.read_exact_at(aligned, offset)?;
            buffer.copy_from_slice(aligned);
            Ok(())
        })
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.with_buffer(data.len(), |aligned| {
            aligned.copy_from_slice(data);
            self.file.write_all_at(aligned, offset)
        })
    }
}

/// Whether statx reports direct I/O for the file (`STATX_DIOALIGN`), also for single sectors.
fn is_direct(file: &File) -> bool {
    let asked = StatxFlags::DIOALIGN;
    statx(file, c"", AtFlags::EMPTY_PATH, asked).is_ok_and(|found| {
        found.stx_mask & asked.bits() != 0
            && are_direct(found.stx_dio_offset_align, found.stx_dio_mem_align)
    })
}

/// Whether our transfers are direct where statx reports this alignment: of whole sectors, from buffers
/// that [`SwapFile::with_buffer`] aligns to a page. 0 is a file without direct I/O; where it is a block, f2fs
/// silently uses the page cache.
fn are_direct(offset_align: u32, memory_align: u32) -> bool {
    let fits = |align: u32, ours: usize| align != 0 && (ours as u64).is_multiple_of(align.into());
    fits(offset_align, FileTier::SECTOR) && fits(memory_align, PAGE_SIZE)
}

/// A page-aligned buffer.
#[derive(Debug, Default)]
struct AlignedBuffer(Vec<u8>);

impl AlignedBuffer {
    fn slice(&mut self, length: usize) -> &mut [u8] {
        if self.0.len() < length + PAGE_SIZE {
            self.0.resize(length + PAGE_SIZE, 0);
        }
        let start = self.0.as_ptr().align_offset(PAGE_SIZE);
        &mut self.0[start..start + length]
    }
}

/// Opens a new file without a name that only its owner could read.
fn open_unnamed(directory: &Path, flags: i32) -> io::Result<File> {
    let options = |flags: i32| {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(flags);
        options
    };
    let unnamed = options(libc::O_TMPFILE | libc::O_EXCL | flags).open(directory);
    match unnamed {
        // Not every file system makes files without names.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)
            ) && directory.is_dir() => {}
        other => return other,
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = directory.join(format!(".memfold-swap-{}-{number}", std::process::id()));
    let file = options(libc::O_NOFOLLOW | flags)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fcntl_getfl;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_file_has_no_name_and_keeps_what_is_written() {
        let folder = std::env::temp_dir();
        let direct = libc::O_DIRECT;
        for flags in [direct, direct | libc::O_DSYNC, libc::O_DSYNC] {
            let file = SwapFile::with_flags(&folder, 1 << 20, flags).unwrap();
            let metadata = file.file.metadata().unwrap();
            assert_eq!((metadata.nlink(), metadata.mode() & 0o777), (0, 0o600));
            let data: Vec<u8> = (0..3 * FileTier::SECTOR).map(|byte| byte as u8).collect();
            // Neither buffer begins where a device would want it.
            let mut from = vec![0; data.len() + 1];
            from[1..].copy_from_slice(&data);
            file.write_at(5 * 512, &from[1..]).unwrap();
            from.fill(0);
            file.read_at(5 * 512, &mut from[1..]).unwrap();
            assert!(from[1..] == data);
            assert!(file.read_at(1 << 20, &mut from[1..513]).is_err());
        }
    }

    #[test]
    fn a_write_waits_for_the_device_where_it_may_not_go_there_directly() {
        // The first is a file system on a device, as a rule, and the second one in memory.
        for folder in [std::env::temp_dir(), "/dev/shm".into()] {
            let file = SwapFile::create(&folder, 1 << 20).unwrap();
            // rustix takes more than this flag for it.
            let waits = fcntl_getfl(&file.file).unwrap().bits() & libc::O_DSYNC as u32 != 0;
            assert!(waits || is_direct(&file.file), "{}", folder.display());
        }
    }

    #[test]
    fn sectors_are_written_directly_where_the_alignment_allows_it() {
        for (offset, memory, is_direct) in [
            (512, 512, true),
            (512, 4, true),
            (1, 1, true),
            (512, 4096, true),
            (0, 0, false),
            (4096, 4096, false),
            (4096, 512, false),
            (1024, 512, false),
            (512, 8192, false),
        ] {
            assert_eq!(are_direct(offset, memory), is_direct, "{offset} {memory}");
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_refused() {
        assert!(SwapFile::create(Path::new("/no/such/directory"), 1 << 20).is_err());
        assert!(SwapFile::create(Path::new("/proc/version"), 1 << 20).is_err());
    }
}
