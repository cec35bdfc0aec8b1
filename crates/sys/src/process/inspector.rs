//! Looking into another process: how large it is, what its threads do, what a page holds.

use super::mappings::kept_ranges;
use super::{
    Credentials, KeptRange, Process, Sizes, ThreadSample, named_bytes, named_field, stat_field,
};
use crate::{PAGE_SIZE, deadline};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A stop of a process in which a tracer has its main thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceStop {
    /// The process that traces it.
    pub tracer: i32,
    /// How often the thread has given up its CPU: two stops differ in it.
    pub switches: u64,
}

/// Longest wait for a page of a process: it may have mapped a file there of which the server does not answer. Longer delays the
/// thread that looks.
const PATIENCE: Duration = Duration::from_millis(20);

/// Bytes that the kernel chooses for each program that it executes, and puts on its stack (`AT_RANDOM`).
const RANDOM_BYTES: usize = 16;

/// Reads the auxiliary vector of a process.
fn read_vector(file: &File) -> io::Result<Vec<u8>> {
    /// More than the kernel makes.
    const MOST: usize = 4096;
    let mut vector = vec![0; MOST];
    let length = file.read_at(&mut vector, 0)?;
    vector.truncate(length);
    Ok(vector)
}

/// The value of a key in an auxiliary vector.
fn auxiliary(vector: &[u8], key: u64) -> Option<u64> {
    let word = |bytes: &[u8]| Some(u64::from_ne_bytes(bytes.try_into().ok()?));
    let mut pairs = vector.chunks_exact(16);
    pairs.find_map(|pair| (word(&pair[..8])? == key).then(|| word(&pair[8..]))?)
}

/// What is looked at in a process, through files of its own that are held open.
///
/// Memory, mappings and page maps are those of the address space that the process had when they were
/// opened, whatever it executes later. It is looked at by way of one thread, which must live as long as
/// the program does: the main thread may end before the others.
#[derive(Debug)]
pub struct Inspector {
    process: Arc<Process>,
    thread: i32,
    statm: File,
    /// Opened once the faults of the process are asked for.
    stat: OnceLock<File>,
    pub(super) pagemap: File,
    pub(super) maps: File,
    /// The flags of its mappings, until they were looked at.
    pub(super) smaps: Mutex<Option<File>>,
    memory: Arc<File>,
}

impl Inspector {
    /// The ranges that are kept from forked children (`MADV_DONTFORK`). Slower than
    /// [`Inspector::areas`]: the kernel walks the page tables.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn kept_from_children(&self) -> io::Result<Vec<KeptRange>> {
        let smaps = self.smaps.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = match smaps.as_ref() {
            Some(file) => kept_ranges(file),
            None => {
                // By the thread by which the other files were opened, so it shows the same address space.
                let path = format!("task/{}/smaps", self.thread);
                self.process
                    .open_file(&path)
                    .and_then(|file| kept_ranges(&file))
            }
        };
        self.or_by_living(kept, || kept_ranges(&self.open_mappings("smaps")?))
    }

    /// How many seccomp filters the process has.
    ///
    /// # Errors
    /// If it is gone.
    pub fn filters(&self) -> io::Result<u32> {
        let mut filters = crate::hello::Filters::default();
        let status = self
            .process
            .text(&format!("task/{}/status", self.process.pid()))?;
        filters.look(status.as_bytes());
        Ok(filters.count)
    }

    /// Opens the files of a process, by way of one of its threads. The memory is opened last: a
    /// proof of whose it is holds for the files that were opened before it.
    ///
    /// # Errors
    /// If it is gone, may not be inspected, or descriptors are short.
    pub fn open(process: &Arc<Process>, thread: i32) -> io::Result<Inspector> {
        let open = |name| process.open_file(&format!("task/{thread}/{name}"));
        Ok(Inspector {
            statm: open("statm")?,
            stat: OnceLock::new(),
            maps: open("maps")?,
            pagemap: open("pagemap")?,
            smaps: Mutex::new(None),
            memory: Arc::new(open("mem")?),
            thread,
            process: process.clone(),
        })
    }

    /// As [`Inspector::open`], with the flags of mappings, for [`Inspector::inherited_ranges`] and
    /// [`Inspector::has_sealed`].
    ///
    /// # Errors
    /// As [`Inspector::open`].
    pub fn open_with_flags(process: &Arc<Process>, thread: i32) -> io::Result<Inspector> {
        let smaps = process.open_file(&format!("task/{thread}/smaps"))?;
        let inspector = Inspector::open(process, thread)?;
        *inspector
            .smaps
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(smaps);
        Ok(inspector)
    }

    /// The process.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Its PID, for messages and for comparing with what is known to live.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// What the thread may by which it is looked at.
    ///
    /// # Errors
    /// If that is gone.
    pub fn credentials(&self) -> io::Result<Credentials> {
        self.process.credentials(self.thread)
    }

    fn thread_text(&self, name: &str) -> io::Result<String> {
        self.process.text(&format!("task/{}/{name}", self.thread))
    }

    /// Faults of all threads that were served without a message or input: first touches of what is
    /// not registered, and pages that a write takes out of sharing.
    pub fn minor_faults(&self) -> io::Result<u64> {
        let stat = match self.stat.get() {
            Some(stat) => stat,
            None => {
                let opened = self.process.open_file("stat")?;
                self.stat.get_or_init(|| opened)
            }
        };
        let mut buffer = [0; 1024];
        let length = stat.read_at(&mut buffer, 0)?;
        stat_field(&String::from_utf8_lossy(&buffer[..length]), 10)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// What the main thread ended with, as `wait` has it, if it has ended and one other thread is left.
    pub fn left_to_one(&self) -> Option<u16> {
        let text = self.process.text("stat").ok()?;
        let left = stat_field(&text, 3) == Some('Z') && stat_field(&text, 20) == Some(2);
        stat_field(&text, 52).filter(|_| left)
    }

    /// How much is mapped, and how much anonymous memory is resident.
    ///
    /// # Errors
    /// If the program is gone, or descriptors are short.
    pub fn sizes(&self) -> io::Result<Sizes> {
        let mut buffer = [0u8; 128];
        let read = self.statm.read_at(&mut buffer, 0);
        let length = self.or_by_living(read, || {
            self.process.open_living("statm")?.read_at(&mut buffer, 0)
        })?;
        let text = std::str::from_utf8(&buffer[..length]).unwrap_or("");
        Sizes::of_statm(text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Whether the thread by which the process is looked at is stopped, by a signal or a debugger.
    pub fn is_stopped(&self) -> bool {
        matches!(self.thread_state(), Some('T' | 't'))
    }

    /// Whether that thread does not go on by itself: it is stopped, or has ended.
    pub fn stands_still(&self) -> bool {
        matches!(self.thread_state(), None | Some('T' | 't' | 'Z' | 'X'))
    }

    /// Whether that thread has ended: it does nothing any more. (Where its state cannot be read, for want of descriptors, it
    /// may not have.)
    pub fn thread_has_ended(&self) -> bool {
        match self.thread_text("stat") {
            Ok(stat) => matches!(stat_field(&stat, 3), Some('Z' | 'X')),
            Err(error) => matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)),
        }
    }

    /// What a look found or, if the thread by which the process is looked at has ended and the program goes on, what `again`
    /// finds by another thread, which shows the same.
    pub(super) fn or_by_living<T>(
        &self,
        found: io::Result<T>,
        again: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let Err(error) = &found else { return found };
        let has_ended = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH));
        if has_ended && self.is_released() == Some(false) {
            again()
        } else {
            found
        }
    }

    /// Opens a file of the mappings by a thread that lives.
    ///
    /// # Errors
    /// If there is none, or the process has executed another program: then its mappings are not those of the address space,
    /// which another process may use still.
    pub(super) fn open_mappings(&self, name: &str) -> io::Result<File> {
        let file = self.process.open_living(name)?;
        // Looked at after it was opened: an address space that was left is not entered again.
        let vector = read_vector(&self.process.open_living("auxv")?)?;
        let random = auxiliary(&vector, libc::AT_RANDOM).ok_or(io::ErrorKind::NotFound)?;
        let (page, offset) = (
            random & !(PAGE_SIZE as u64 - 1),
            random as usize % PAGE_SIZE,
        );
        let living = Arc::new(self.process.open_living("mem")?);
        let random_of = |memory: &Arc<File>| {
            let read = self.read_within(memory.clone(), page, PATIENCE)?;
            let bytes = read[offset..].iter().take(RANDOM_BYTES);
            Some(bytes.copied().collect::<Vec<u8>>())
        };
        match (random_of(&self.memory), random_of(&living)) {
            (Some(ours), Some(theirs)) if ours == theirs => Ok(file),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    fn thread_state(&self) -> Option<char> {
        stat_field(&self.thread_text("stat").ok()?, 3)
    }

    /// The process that traces the thread by which this one is looked at.
    pub fn tracer(&self) -> Option<i32> {
        let text = self.thread_text("status").ok()?;
        let tracer = named_field(&text, "TracerPid")?.parse().ok();
        tracer.filter(|tracer| *tracer != 0)
    }

    /// The stop in which a tracer has the main thread, if it has.
    pub fn trace_stop(&self) -> Option<TraceStop> {
        if stat_field(&self.process.text("stat").ok()?, 3) != Some('t') {
            return None;
        }
        let text = self.process.text("status").ok()?;
        let number = |name| named_field(&text, name)?.parse::<u64>().ok();
        let is_stopped = named_field(&text, "State")?.starts_with('t');
        let tracer = number("TracerPid")?;
        (is_stopped && tracer != 0).then_some(TraceStop {
            tracer: tracer as i32,
            switches: number("voluntary_ctxt_switches")?,
        })
    }

    /// Anonymous memory in bytes with each page divided among the processes that share it. Slower:
    /// the kernel walks the page tables.
    pub fn proportional_bytes(&self) -> io::Result<u64> {
        let text = self.or_by_living(self.thread_text("smaps_rollup"), || {
            io::read_to_string(self.process.open_living("smaps_rollup")?)
        })?;
        named_bytes(&text, "Pss_Anon").ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Copies pages out of the process: `sources` are addresses of single pages, `target` has room
    /// for all. Returns how many whole pages were copied, from the front. A page that is not there ends
    /// it; this never waits for a page.
    ///
    /// # Errors
    /// If none could be copied.
    ///
    /// # Panics
    /// If `target` has not room for all pages.
    pub fn read_pages(&self, sources: &[u64], target: &mut [u8]) -> io::Result<usize> {
        assert!(
            target.len() >= sources.len() * PAGE_SIZE,
            "room for every page"
        );
        let mut copied = 0;
        let neighbours = |a: &u64, b: &u64| a.checked_add(PAGE_SIZE as u64) == Some(*b);
        for run in sources.chunk_by(neighbours) {
            let room = &mut target[copied * PAGE_SIZE..][..run.len() * PAGE_SIZE];
            let bytes = match self.memory.read_at(room, run[0]) {
                // The address space is no more.
                Ok(0) if copied == 0 => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Err(error) if copied == 0 => return Err(error),
                Err(_) => break,
                Ok(bytes) => bytes,
            };
            copied += bytes / PAGE_SIZE;
            if bytes != room.len() {
                break;
            }
        }
        Ok(copied)
    }

    /// Copies one page out of the process, whatever is mapped there: the read of a FUSE file that its server
    /// does not answer is given up after `patience`. `None` if the page is not there by then.
    pub fn read_page_within(
        &self,
        source: u64,
        patience: Duration,
    ) -> Option<Box<[u8; PAGE_SIZE]>> {
        self.read_within(self.memory.clone(), source, patience)
    }

    fn read_within(
        &self,
        memory: Arc<File>,
        source: u64,
        patience: Duration,
    ) -> Option<Box<[u8; PAGE_SIZE]>> {
        let user = self.process.user().ok()?;
        deadline::within(user, patience, move || {
            let mut page = Box::new([0; PAGE_SIZE]);
            memory.read_exact_at(&mut *page, source).ok().map(|()| page)
        })
        .flatten()
    }

    /// Whether the address space is released. `None` if the kernel does not tell.
    ///
    /// The program can hold the lock of its mappings for as long as it likes (a thread of it reads its own memory where it
    /// has mapped a file of a FUSE server's). This does not wait for that lock, unlike most of what else is asked here.
    pub fn is_released(&self) -> Option<bool> {
        // The kernel looks whether there is an address space before it looks at the position, which is of no page.
        match self.pagemap.read_at(&mut [0], 1) {
            Ok(0) => Some(true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Some(false),
            _ => None,
        }
    }

    /// All threads that live from before this call to its end, but for the one by which the process is looked
    /// at, and some others.
    ///
    /// # Errors
    /// As [`Process::thread_samples`].
    pub fn other_threads(&self) -> io::Result<Vec<ThreadSample>> {
        let mut samples = self.process.thread_samples()?;
        samples.retain(|sample| sample.id != self.thread);
        Ok(samples)
    }

    /// The CPU that a thread of the process last ran on.
    pub fn last_cpu(&self, thread: u32) -> Option<usize> {
        self.process.last_cpu(thread)
    }

    /// A descriptor of the process (a pidfd).
    pub fn handle(&self) -> io::Result<OwnedFd> {
        self.process.handle().try_clone_to_owned()
    }

    /// Sends a signal to this very process, not to one that got its PID later.
    pub fn kill(&self, signal: i32) -> io::Result<()> {
        self.process.signal(signal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{living_since, own_id, processes_by_own_number};
    use std::os::fd::AsRawFd;

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
            let inspector =
                Inspector::open_with_flags(&Arc::new(Process::open(own_id()).unwrap()), thread)
                    .unwrap();
            assert!(!inspector.stands_still());
            assert_eq!(inspector.tracer(), None);
            assert!(inspector.last_cpu(thread as u32).is_some());
            let areas = inspector.areas().unwrap();
            assert!(
                areas
                    .iter()
                    .any(|area| area.start == start && !area.is_movable())
            );
            assert!(
                inspector
                    .inherited_ranges(crate::process::InheritedBy::Registration)
                    .is_ok()
            );
            let process = inspector.process();
            assert_eq!(process.thread_by_own_number(thread as u64), Some(thread));
            assert!(living_since(thread).is_some());
            let mut processes = processes_by_own_number(thread as u64, [own_id()].into_iter());
            assert_eq!(
                processes.next().map(|process| process.pid()),
                Some(own_id())
            );
            // SAFETY: mapped above, for this alone.
            unsafe { libc::munmap(mapped, PAGE_SIZE) };
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_released_address_space_is_told_from_one_that_is_used() {
        let mut child = std::process::Command::new("sleep")
            .arg("5")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let inspector = Inspector::open(&Arc::new(Process::open(pid).unwrap()), pid).unwrap();
        assert_eq!(inspector.is_released(), Some(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(inspector.is_released(), Some(true));
    }

    /// Looks through another thread, once the one by which the process was looked at has ended.
    #[test]
    fn a_process_is_seen_though_a_thread_has_ended() {
        let process = Arc::new(Process::open(own_id()).unwrap());
        let inspector = std::thread::spawn(move || {
            // SAFETY: has no arguments.
            let thread = unsafe { libc::gettid() };
            Inspector::open_with_flags(&process, thread).unwrap()
        })
        .join()
        .unwrap();
        let began = std::time::Instant::now();
        while !inspector.thread_has_ended() {
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert!(inspector.sizes().unwrap().resident_pages > 0);
        assert!(inspector.proportional_bytes().unwrap() > 0);
        assert!(!inspector.areas().unwrap().is_empty());
        assert!(inspector.kept_from_children().is_ok());
        let by = crate::process::InheritedBy::Registration;
        assert!(inspector.inherited_ranges(by).is_ok());
        inspector.close_flags();
        assert!(inspector.kept_from_children().is_ok());
    }

    /// A process that executes another program shows other mappings.
    #[test]
    fn mappings_of_another_program_are_not_taken() {
        let mut child = std::process::Command::new("sleep")
            .arg("5")
            .spawn()
            .unwrap();
        let open = |pid| Inspector::open(&Arc::new(Process::open(pid).unwrap()), pid).unwrap();
        let (other, mut inspector) = (open(child.id() as i32), open(own_id()));
        assert!(inspector.open_mappings("maps").is_ok());
        inspector.process = other.process().clone();
        assert!(inspector.open_mappings("maps").is_err());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn own_memory_is_seen() {
        let inspector =
            Inspector::open(&Arc::new(Process::open(own_id()).unwrap()), own_id()).unwrap();
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
        assert!(
            inspector
                .areas()
                .unwrap()
                .iter()
                .any(crate::process::VirtualMemoryArea::is_movable)
        );
    }
}
