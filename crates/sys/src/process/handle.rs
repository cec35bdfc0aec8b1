//! A process as a kernel object: its pidfd, and its folder in `/proc`, which stays that of the same
//! process when the PID is reused.

use super::{children_in, living_thread_in, named_field, stat_field, threads_in};
use crate::socket::Peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The longest way up that is followed, in processes.
const DEEPEST: usize = 64;

/// How often it is begun anew.
const WALKS: u32 = 4;

/// Everything is read through descriptors that were opened for this process, so nothing
/// that is read here is ever that of another one; once it is reaped, reading fails.
#[derive(Debug)]
pub struct Process {
    handle: OwnedFd,
    folder: OwnedFd,
    pid: i32,
}

impl Process {
    /// The process that called `connect` for the other end of `socket`, with its credentials `peer`.
    ///
    /// # Errors
    /// If it is gone already, or is in a PID namespace that is not visible from here.
    pub fn of_peer(socket: BorrowedFd<'_>, peer: Peer) -> io::Result<Process> {
        match crate::socket::peer_handle(socket) {
            // PID and handle are of the same moment and the same process.
            Ok(handle) => Process::new(handle, peer.pid),
            // Before Linux 6.5.
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                Process::of_connected_peer(socket, peer)
            }
            Err(error) => Err(error),
        }
    }

    /// The same by the PID alone. It is not given again while its process has the other end open, which
    /// is looked at last. A process that gave its end to others and ended can have this return
    /// another one, of that PID: what it claims must be proved by more than that, as the helper's memory is.
    fn of_connected_peer(socket: BorrowedFd<'_>, peer: Peer) -> io::Result<Process> {
        let process = Process::open(peer.pid)?;
        if crate::socket::is_connected(socket)? {
            Ok(process)
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    }

    /// The process that has a PID now. PIDs are reused: the caller must check through the result which
    /// process it is.
    ///
    /// # Errors
    /// If there is none, or descriptors are short.
    pub fn open(pid: i32) -> io::Result<Process> {
        Process::new(super::pidfd_of(pid)?, pid)
    }

    fn new(handle: OwnedFd, pid: i32) -> io::Result<Process> {
        if pid <= 0 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let process = Process {
            handle,
            folder: folder_of(pid)?,
            pid,
        };
        // A PID is not given again before its process is reaped. The process of the handle is not, after
        // the folder was opened by its PID, so the folder is its own.
        process.signal(0)?;
        Ok(process)
    }

    /// Its PID, for messages and for comparing with what is known to live.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether `other`, which lives or was found later, is this process: its PID is no other's while it is not reaped.
    pub fn is_same(&self, other: &Process) -> bool {
        self.pid == other.pid && self.signal(0).is_ok()
    }

    /// Its pidfd.
    pub fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// Sends a signal; 0 only looks whether the process is reaped.
    ///
    /// # Errors
    /// `ESRCH` if it is reaped. To signal 0, nothing else is one.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        // SAFETY: our own descriptor, numbers, no information structure.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.handle.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        let error = io::Error::last_os_error();
        let unreaped = signal == 0 && error.raw_os_error() == Some(libc::EPERM);
        if result == 0 || unreaped {
            Ok(())
        } else {
            Err(error)
        }
    }

    /// Whether it has ended, reaped or not.
    pub fn has_ended(&self) -> bool {
        let mut handle = [PollFd::new(&self.handle, PollFlags::IN)];
        let ready = poll(&mut handle, Some(&Timespec::default()));
        ready.is_ok_and(|ready| ready > 0)
    }

    /// Opens a file below its folder in `/proc`, for reading.
    ///
    /// # Errors
    /// If it is reaped, or may not be inspected.
    pub fn open_file(&self, path: &str) -> io::Result<File> {
        open_below(self.folder.as_fd(), path)
    }

    /// Opens the memory of one of its threads, for reading and writing: that of the program that it executes now, also once
    /// it executes another.
    ///
    /// # Errors
    /// As [`Process::open_file`], and if it may not be traced.
    pub(crate) fn open_memory(&self, thread: i32) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let path = format!("task/{thread}/mem");
        let opened = rustix::fs::openat(&self.folder, path, flags, Mode::empty())?;
        Ok(File::from(opened))
    }

    /// Opens a file of its memory, its executable or its environment, by a thread that has not ended: the main thread may
    /// have.
    ///
    /// # Errors
    /// As [`Process::open_file`].
    pub fn open_living(&self, path: &str) -> io::Result<File> {
        match self.living_thread() {
            Some(thread) => self.open_file(&format!("task/{thread}/{path}")),
            None => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// A thread that has not ended: the main thread if it is one.
    pub fn living_thread(&self) -> Option<i32> {
        living_thread_in(self.folder.as_fd(), self.pid)
    }

    /// The text of a file below its folder in `/proc`; bytes that are not UTF-8 as `�`.
    ///
    /// # Errors
    /// As [`Process::open_file`].
    pub fn text(&self, path: &str) -> io::Result<String> {
        text_below(self.folder.as_fd(), path)
    }

    /// Whether it was started by this process, or by one that was.
    ///
    /// # Errors
    /// If descriptors are short: then it is not known.
    pub fn descends_from_here(&self) -> io::Result<bool> {
        self.is_below(super::own_id())
    }

    /// Whether it was started by another process that lives, or by one that was.
    ///
    /// # Errors
    /// If descriptors are short: then it is not known.
    pub fn descends_from(&self, ancestor: &Process) -> io::Result<bool> {
        // Not reaped afterwards, that had the PID all the time.
        Ok(self.is_below(ancestor.pid())? && ancestor.signal(0).is_ok())
    }

    fn is_below(&self, ancestor: i32) -> io::Result<bool> {
        // Parents end while the way up is followed, and their children come to others.
        for _ in 0..WALKS {
            if let Some(found) = self.walk_up_to(ancestor)? {
                return Ok(found);
            }
        }
        Ok(false)
    }

    /// Whether the way up leads to a PID; none if one on it ended meanwhile.
    fn walk_up_to(&self, ancestor: i32) -> io::Result<Option<bool>> {
        let mut above: Option<OwnedFd> = None;
        for _ in 0..DEEPEST {
            let folder = above.as_ref().map_or(self.folder.as_fd(), AsFd::as_fd);
            let parent = match parent_of(folder) {
                Some(parent) if parent == ancestor => return Ok(Some(true)),
                Some(parent) if parent > 1 => parent,
                Some(_) => return Ok(Some(false)),
                None => return Ok(None),
            };
            match parent_folder(folder, parent)? {
                Some(folder) => above = Some(folder),
                None => return Ok(None),
            }
        }
        Ok(Some(false))
    }

    /// The thread that knows itself by `number`, which differs where the process is in a PID namespace
    /// of its own.
    pub fn thread_by_own_number(&self, number: u64) -> Option<i32> {
        // One of that number is its own, whichever of its threads. In a PID namespace numbers begin
        // anew, and none is.
        let same = i32::try_from(number).ok();
        let same = same.filter(|thread| self.has(&format!("task/{thread}")));
        let knows_itself = |thread: &i32| {
            let status = self.text(&format!("task/{thread}/status")).ok()?;
            let own = named_field(&status, "NSpid")?;
            let own: u64 = own.split_ascii_whitespace().next_back()?.parse().ok()?;
            Some(own == number)
        };
        same.or_else(|| {
            let mut threads = threads_in(self.folder.as_fd()).into_iter();
            threads.find(|thread| knows_itself(thread) == Some(true))
        })
    }

    /// Whether there is such a file below its folder in `/proc`.
    pub(super) fn has(&self, path: &str) -> bool {
        rustix::fs::statat(&self.folder, path, rustix::fs::AtFlags::empty()).is_ok()
    }

    /// The CPU that one of its threads last ran on.
    pub fn last_cpu(&self, thread: u32) -> Option<usize> {
        let mut buffer = [0u8; 1024];
        stat_field(&self.thread_stat(thread, &mut buffer)?, 39)
    }

    /// `stat` of one of its threads; `None` if that has ended.
    pub(super) fn thread_stat<'a>(
        &self,
        thread: u32,
        buffer: &'a mut [u8; 1024],
    ) -> Option<Cow<'a, str>> {
        let mut file = self.open_file(&format!("task/{thread}/stat")).ok()?;
        let length = file.read(buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]))
    }

    /// What one of its threads may.
    ///
    /// # Errors
    /// If it is gone.
    pub fn credentials(&self, thread: i32) -> io::Result<Credentials> {
        let status = self.text(&format!("task/{thread}/status"))?;
        Ok(Credentials::of_status(&status))
    }

    /// The user who started it: its real UID, whatever that may execute and however it protects itself.
    ///
    /// # Errors
    /// If it is reaped.
    pub fn user(&self) -> io::Result<u32> {
        let status = self.text("status")?;
        let user = named_field(&status, "Uid")
            .and_then(|users| users.split_ascii_whitespace().next()?.parse().ok());
        user.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The user who may inspect it: its own, or root where it may not be dumped.
    ///
    /// # Errors
    /// If it is reaped.
    pub fn owner(&self) -> io::Result<u32> {
        let stat = rustix::fs::statat(&self.folder, "stat", rustix::fs::AtFlags::empty())?;
        Ok(stat.st_uid)
    }

    /// Its parent's PID.
    pub fn parent(&self) -> Option<i32> {
        let mut information = HandleInformation::default();
        // SAFETY: our own descriptor, and a live structure of the size encoded in the request.
        let result = unsafe {
            libc::ioctl(
                self.handle.as_raw_fd(),
                PIDFD_GET_INFO,
                &raw mut information,
            )
        };
        match result {
            0 => i32::try_from(information.parent).ok(),
            // Before Linux 6.13, or it is reaped.
            _ => parent_of(self.folder.as_fd()),
        }
    }

    /// The TIDs of its threads; none if it is gone.
    pub fn threads(&self) -> Vec<i32> {
        threads_in(self.folder.as_fd())
    }

    /// The state of one of its threads, as `stat` has it: `R`, `S`, `T`, `Z` and so on. `None` if that is gone.
    pub fn state(&self, thread: i32) -> Option<char> {
        stat_field(&self.text(&format!("task/{thread}/stat")).ok()?, 3)
    }

    /// Its children's PIDs.
    pub fn children(&self) -> Vec<i32> {
        children_in(self.folder.as_fd())
    }
}

const PIDFD_GET_INFO: libc::Ioctl = 0xc040_ff0b_u32 as libc::Ioctl;

/// The kernel's `struct pidfd_info`, in its first version.
#[repr(C)]
#[derive(Default)]
struct HandleInformation {
    mask: u64,
    control_group: u64,
    thread: u32,
    process: u32,
    parent: u32,
    /// Users, groups and the exit status, unused here.
    others: [u32; 9],
}

const _: () = assert!(size_of::<HandleInformation>() == 64);

/// What a thread may, as `/proc` writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    users: String,
    groups: String,
    capabilities: String,
}

impl Credentials {
    fn of_status(status: &str) -> Credentials {
        let field = |name| named_field(status, name).unwrap_or_default().to_owned();
        Credentials {
            users: field("Uid"),
            groups: field("Gid"),
            capabilities: field("CapPrm"),
        }
    }

    /// Whether it may anything that `other` may not: it is another user's or group's, or has a capability that `other`
    /// has not.
    pub fn exceed(&self, other: &Credentials) -> bool {
        let set = |credentials: &Credentials| u64::from_str_radix(&credentials.capabilities, 16);
        let is_within = match (set(self), set(other)) {
            (Ok(own), Ok(others)) => own & !others == 0,
            _ => false,
        };
        self.users != other.users || self.groups != other.groups || !is_within
    }

    /// Whether it is root's in any way, or has a capability: the program may have less one day.
    pub fn are_privileged(&self) -> bool {
        let mut users = self.users.split_ascii_whitespace();
        users.any(|user| user == "0") || self.capabilities.bytes().any(|digit| digit != b'0')
    }
}

pub(super) fn folder_of(pid: i32) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(
        format!("/proc/{pid}"),
        flags,
        Mode::empty(),
    )?)
}

pub(super) fn open_below(folder: BorrowedFd<'_>, path: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, path, flags, Mode::empty())?.into())
}

pub(super) fn text_below(folder: BorrowedFd<'_>, path: &str) -> io::Result<String> {
    const ROOM: usize = 2048;
    let file = open_below(folder, path)?;
    let mut bytes = Vec::new();
    // (`read_to_end` asks first how long the file is, which such files do not know.)
    loop {
        bytes.reserve(ROOM);
        if rustix::io::read(&file, rustix::buffer::spare_capacity(&mut bytes))? == 0 {
            return Ok(super::text_of(bytes));
        }
    }
}

/// The folder of the parent whose PID was read; none if it ended meanwhile.
///
/// A process keeps its parent until that ends, and comes to one that lives then. So the PID, read again
/// after the folder was opened, is the same only if all the time it was that parent's, and so the folder.
fn parent_folder(folder: BorrowedFd<'_>, parent: i32) -> io::Result<Option<OwnedFd>> {
    match folder_of(parent) {
        Ok(above) => Ok((parent_of(folder) == Some(parent)).then_some(above)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn parent_of(folder: BorrowedFd<'_>) -> Option<i32> {
    stat_field(&text_below(folder, "stat").ok()?, 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::own_id;
    use std::process::Command;

    #[test]
    fn fewer_capabilities_do_not_exceed() {
        let of = |user, capabilities| {
            let text = format!("Uid:\t{user}\nGid:\t0\nCapPrm:\t{capabilities}\n");
            Credentials::of_status(&text)
        };
        let (root, without) = (of("0 0 0 0", "00ff"), of("0 0 0 0", "0000"));
        assert!(!without.exceed(&root) && !root.exceed(&root));
        assert!(root.exceed(&without) && root.exceed(&of("0 0 0 0", "0ff0")));
        assert!(without.exceed(&of("0 5 0 0", "00ff")));
        assert!(without.exceed(&of("0 0 0 0", "")), "nothing is known");
    }

    #[test]
    fn a_reaped_process_is_not_another_one() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        assert!(process.descends_from_here().unwrap());
        assert!(process.text("stat").is_ok() && process.signal(0).is_ok());
        assert!(process.last_cpu(child.id()).is_some() && !process.has_ended());
        let thread = process.thread_by_own_number(u64::from(child.id()));
        assert_eq!(thread, Some(child.id() as i32));
        assert!(process.thread_by_own_number(u64::MAX).is_none());
        assert_eq!(process.parent(), Some(own_id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
        let gone = process.signal(0).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
        assert!(process.text("stat").is_err());
        assert!(!process.descends_from_here().unwrap());
        assert!(Process::open(0).is_err() && Process::open(-1).is_err());
    }

    #[test]
    fn those_above_do_not_descend_from_here() {
        let above = Process::open(std::os::unix::process::parent_id() as i32);
        // In a PID namespace of its own this process may have none.
        if let Ok(above) = above {
            assert!(!above.descends_from_here().unwrap());
        }
        let own = Process::open(own_id()).unwrap();
        assert!(
            !own.descends_from_here().unwrap(),
            "a process is not its own child"
        );
    }

    #[test]
    fn a_child_descends_from_its_parent_and_not_from_its_sibling() {
        let start = || {
            let child = std::process::Command::new("sleep").arg("5").spawn();
            let child = child.unwrap();
            let process = Process::open(child.id() as i32).unwrap();
            (child, process)
        };
        let ((mut child, process), (mut sibling, other)) = (start(), start());
        let own = Process::open(own_id()).unwrap();
        assert!(process.descends_from(&own).unwrap());
        assert!(!process.descends_from(&other).unwrap());
        assert!(!own.descends_from(&process).unwrap());
        for child in [&mut child, &mut sibling] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(!other.descends_from(&process).unwrap());
    }

    #[test]
    fn a_peer_is_known_by_its_connection() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let path = std::env::temp_dir().join(format!("memfold-peer-{}", own_id()));
        let listener = crate::socket::listen(&path).unwrap();
        let (unix, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let own_end = rustix::net::socket_with(unix, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&own_end, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        let connection = crate::socket::accept(listener.as_fd()).unwrap().unwrap();
        let told = crate::socket::peer(connection.as_fd()).unwrap();
        let peer = Process::of_peer(connection.as_fd(), told).unwrap();
        assert_eq!(peer.pid(), own_id());
        let thread = peer.thread_by_own_number(own_id() as u64).unwrap();
        let credentials = peer.credentials(thread).unwrap();
        let own = crate::process::own_user();
        assert_eq!(peer.owner().unwrap(), own);
        assert!(own != 0 || credentials.are_privileged());
        let by_number = Process::of_connected_peer(connection.as_fd(), told).unwrap();
        assert_eq!(by_number.pid(), own_id());
        drop(own_end);
        // What other tests of this process forked has the end open, until it executes or ends.
        let since = std::time::Instant::now();
        while Process::of_connected_peer(connection.as_fd(), told).is_ok() {
            assert!(since.elapsed().as_secs() < 30, "still taken for connected");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
