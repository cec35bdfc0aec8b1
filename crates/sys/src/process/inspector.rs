//! Looking into another process: how large it is, what its threads do, what a page holds.

use super::{named_bytes, named_field, proc_text, stat_field};
use crate::PAGE_SIZE;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// How large a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// All mappings together.
    pub mapped_pages: u64,
    /// Resident anonymous pages.
    pub resident_pages: u64,
}

/// What is looked at in a process, its files held open.
///
/// It looks by way of one thread, which must live as long as the program does: the main thread
/// may end before the others, and after an `exec` its number is that of another program.
#[derive(Debug)]
pub struct Inspector {
    statm: File,
    stat: File,
    pub(super) pagemap: File,
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

    pub(super) fn path(&self, name: &str) -> String {
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
        stat_field(&proc_text(&self.path("stat")).ok()?, 3)
    }

    /// The process that traces the thread by which this one is looked at.
    pub fn tracer(&self) -> Option<i32> {
        let text = proc_text(&self.path("status")).ok()?;
        let tracer = named_field(&text, "TracerPid")?.parse().ok();
        tracer.filter(|tracer| *tracer != 0)
    }

    /// Anonymous memory in bytes with each page divided among those who share it. Slower: the
    /// kernel walks the page tables.
    pub fn proportional_bytes(&self) -> io::Result<u64> {
        let text = proc_text(&self.path("smaps_rollup"))?;
        named_bytes(&text, "Pss_Anon").ok_or_else(|| io::ErrorKind::InvalidData.into())
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
        stat_field(&String::from_utf8_lossy(&buffer[..length]), 39)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{living_since, own_id, processes_by_own_number, thread_by_own_number};

    /// Whatever the names of threads and mapped files are.
    #[test]
    fn names_of_any_bytes_are_read_over() {
        use std::os::unix::ffi::OsStrExt;
        let name = [b"memfold \xff) Z (", own_id().to_string().as_bytes()].concat();
        let path = std::env::temp_dir().join(std::ffi::OsStr::from_bytes(&name));
        std::fs::write(&path, [0; PAGE_SIZE]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::thread::spawn(move || {
            // SAFETY: names the calling thread, and maps a file at an address of the kernel's choice.
            let (thread, mapped) = unsafe {
                assert_eq!(libc::prctl(libc::PR_SET_NAME, c"\xff) Z (\xc3".as_ptr()), 0);
                let (null, fd) = (std::ptr::null_mut(), file.as_raw_fd());
                let access = libc::PROT_READ;
                (
                    libc::gettid(),
                    libc::mmap(null, PAGE_SIZE, access, libc::MAP_PRIVATE, fd, 0),
                )
            };
            let start = mapped as u64;
            let inspector = Inspector::open(own_id(), thread).unwrap();
            assert!(!inspector.stands_still());
            assert_eq!(inspector.tracer(), None);
            assert!(inspector.last_cpu(thread as u32).is_some());
            let areas = inspector.areas().unwrap();
            assert!(
                areas
                    .iter()
                    .any(|area| area.start == start && !area.movable)
            );
            assert!(inspector.inherited_ranges().is_ok());
            assert_eq!(thread_by_own_number(own_id(), thread as u64), Some(thread));
            assert!(living_since(thread).is_some());
            let mut processes = processes_by_own_number(own_id(), thread as u64);
            assert_eq!(processes.next(), Some(own_id()));
            // SAFETY: mapped above, for this alone.
            unsafe { libc::munmap(mapped, PAGE_SIZE) };
        })
        .join()
        .unwrap();
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
