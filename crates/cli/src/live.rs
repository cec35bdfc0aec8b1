//! The statistics of a run or disk while it goes on, over a socket in its private folder.
//!
//! Each connection gets one JSON document and the end of the file. Only the same user and root are served.
//! Users see their own, root sees those of all users whose folders lie in this mount namespace: text of another user's run
//! is shortened and made printable, and its PID is the one that the kernel reports.

use crate::failure::Failure;
use crate::format::shown;
use crate::instance::Instance;
use crate::run::runtime;
use memfold_sys::socket::peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, open, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The socket's name in the private folder of a run or disk.
pub use crate::run::home::STATISTICS as SOCKET;
/// Far more than a document takes.
const LONGEST_DOCUMENT: usize = 1 << 20;
/// How long a peer may take to read what its socket's buffer does not hold. Longer holds memory and a thread of the run.
const TO_WRITE: Duration = Duration::from_secs(1);
/// Peers that are waited for at a time. More take more threads; the answers to others are cut.
const MOST_WRITERS: usize = 8;
/// Runs of other users that root asks at most.
const MOST_OTHERS: usize = 1000;
/// Pause where a peer cannot be accepted. Longer answers others later.
const PAUSE: Duration = Duration::from_millis(10);
/// How long an answer is waited for: a stopped run gives none, and one on a busy machine takes its
/// time.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// Where what is not found may run. Not looked for by way of `/proc`: what is there belongs to programs.
const ELSEWHERE: &str = "what runs in a container is asked there (docker exec NAME memfold stat)";

/// The serving side. The socket's file is removed on drop.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    writers: Writers,
}

impl Server {
    /// Listens in the run's private folder, under this name.
    pub fn bind(folder: &Path, name: &str) -> io::Result<Server> {
        let path = folder.join(name);
        let listener = UnixListener::bind(&path)?;
        let server = Server {
            listener,
            path,
            writers: Writers::default(),
        };
        fs::set_permissions(&server.path, fs::Permissions::from_mode(0o600))?;
        server.listener.set_nonblocking(true)?;
        Ok(server)
    }

    /// To wait for connections.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The next connection of a trusted peer, to be served without waiting. Pauses for 10 ms if none can be
    /// accepted, for want of descriptors.
    pub fn accept(&self) -> Option<UnixStream> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if is_trusted(&stream) && stream.set_nonblocking(true).is_ok() {
                        return Some(stream);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(_) => {
                    // Without descriptors the peer stays, and would be reported again at once.
                    std::thread::sleep(PAUSE);
                    return None;
                }
            }
        }
    }

    /// Answers all connections there are; never waits. A peer that cannot be answered gets nothing.
    pub fn answer(&self, instance: impl Fn() -> Instance) {
        while let Some(stream) = self.accept() {
            if let Ok(document) = serde_json::to_vec(&instance()) {
                self.writers.send(stream, document);
            }
        }
    }
}

/// Threads that write what the buffers of sockets do not hold, each to one peer.
#[derive(Debug, Default)]
struct Writers {
    busy: Arc<()>,
}

impl Writers {
    /// Sends a document; never waits. A peer that has left is no concern.
    fn send(&self, mut stream: UnixStream, document: Vec<u8>) {
        let written = match stream.write(&document) {
            Ok(written) => written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(_) => return,
        };
        // The threads have a clone each.
        if written == document.len() || Arc::strong_count(&self.busy) > MOST_WRITERS {
            return;
        }
        let busy = self.busy.clone();
        let writing = move || {
            let _ = write_rest(&mut stream, &document[written..], Instant::now() + TO_WRITE);
            drop(busy);
        };
        let thread = std::thread::Builder::new().name("answer".to_owned());
        let _ = thread.spawn(writing);
    }
}

/// Writes to what does not block, until the deadline.
fn write_rest(stream: &mut UnixStream, mut rest: &[u8], deadline: Instant) -> io::Result<()> {
    while !rest.is_empty() {
        let left = remaining(deadline);
        if poll(&mut [PollFd::new(&*stream, PollFlags::OUT)], Some(&left))? == 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        match stream.write(rest) {
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time until a deadline, for `poll`.
fn remaining(deadline: Instant) -> Timespec {
    let rest = deadline.saturating_duration_since(Instant::now());
    Timespec {
        tv_sec: rest.as_secs() as i64,
        tv_nsec: i64::from(rest.subsec_nanos()),
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether the peer is the same user, or root.
fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    peer(stream.as_fd()).is_ok_and(|peer| peer.uid == own || peer.uid == 0)
}

/// What may be the private folder of a run, and its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
    owner: u32,
}

impl RunFolder {
    /// One of this user.
    #[cfg(test)]
    pub fn own(path: PathBuf) -> RunFolder {
        let owner = rustix::process::geteuid().as_raw();
        RunFolder { path, owner }
    }

    /// Whether the run is the asking user's own.
    pub fn is_own(&self) -> bool {
        self.owner == rustix::process::geteuid().as_raw()
    }

    /// Connects to a socket in it, of the folder's owner, at which that user or root listens. Returns
    /// the PID of the process that listens, too, if it can be seen from here.
    ///
    /// The folder may be another user's and hold anything: no link is followed, and
    /// where the queue of the socket is full, it is waited for until the deadline.
    pub fn connect(&self, name: &str, deadline: Instant) -> io::Result<(UnixStream, Option<u32>)> {
        let place = self.open(name)?;
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        while let Err(error) = connect(&socket, &address) {
            if error != Errno::AGAIN || Instant::now() >= deadline {
                return Err(error.into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let peer = peer(socket.as_fd())?;
        if peer.uid != 0 && peer.uid != self.owner {
            return Err(ErrorKind::PermissionDenied.into());
        }
        // 0: it is in a PID namespace that is not visible from here.
        let pid = u32::try_from(peer.pid).ok().filter(|pid| *pid != 0);
        Ok((UnixStream::from(socket), pid))
    }

    fn open(&self, name: &str) -> io::Result<OwnedFd> {
        let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = path | OFlags::DIRECTORY;
        let (home, run) = (self.path.parent(), self.path.file_name());
        let home = open(home.unwrap_or(Path::new("/")), folder, Mode::empty())?;
        let run = openat(&home, run.unwrap_or_default(), folder, Mode::empty())?;
        let place = openat(&run, name, path, Mode::empty())?;
        let found = fstat(&place)?;
        let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
        if !is_socket || found.st_uid != self.owner {
            return Err(ErrorKind::PermissionDenied.into());
        }
        Ok(place)
    }

    /// Whether a run or disk listens, even one that is stopped and has a full queue.
    pub fn listens(&self) -> bool {
        match self.connect(SOCKET, Instant::now()) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    /// Why a run or disk that listens gives no statistics; `None` if it gives them, or does not listen.
    fn complaint(&self, deadline: Instant) -> Option<String> {
        let (stream, pid) = self.connect(SOCKET, deadline).ok()?;
        let name = pid.map_or_else(
            || self.path.display().to_string(),
            |pid| format!("PID {pid}"),
        );
        match read_all(stream, Some(deadline)) {
            Err(error) if error.kind() == ErrorKind::TimedOut => Some(format!(
                "{name} does not answer: it may be stopped (then: kill -CONT)"
            )),
            Ok(document) if !document.is_empty() => {
                let known = serde_json::from_slice::<Instance>(&document);
                known.is_err().then(|| {
                    format!("{name} is of another version of memfold, which understands it")
                })
            }
            _ => None,
        }
    }

    /// Asks for the statistics.
    pub fn ask(&self, deadline: Instant) -> io::Result<Instance> {
        let (stream, pid) = self.connect(SOCKET, deadline)?;
        let document = read_all(stream, Some(deadline))?;
        let mut instance: Instance = serde_json::from_slice(&document)?;
        // Everything else is its own claim.
        let pid = pid.or(self.is_own().then_some(instance.pid()));
        instance.set_pid(pid.ok_or(ErrorKind::NotFound)?);
        instance.map_text(shown);
        Ok(instance)
    }
}

/// Reads what comes until the end of the file, as much as may be an answer.
pub fn read_all(mut stream: UnixStream, deadline: Option<Instant>) -> io::Result<Vec<u8>> {
    let mut document = Vec::new();
    let mut part = [0; 4096];
    loop {
        let rest = deadline.map(remaining);
        let mut source = [PollFd::new(&stream, PollFlags::IN)];
        if poll(&mut source, rest.as_ref())? == 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        match stream.read(&mut part) {
            Ok(0) => return Ok(document),
            Ok(length) => document.extend_from_slice(&part[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if document.len() > LONGEST_DOCUMENT {
            return Err(ErrorKind::InvalidData.into());
        }
    }
}

/// What may be the folders of runs and disks of a user, in their home.
fn folders(home: &Path, owner: u32) -> impl Iterator<Item = RunFolder> + use<> {
    let entries = fs::read_dir(home).into_iter().flatten().flatten();
    entries.map(move |entry| RunFolder {
        path: entry.path(),
        owner,
    })
}

/// Asks all runs and disks that can be found here, lowest PID first: those of this user, and for root those of all users.
/// Those that take longer than `patience` to answer are left out; other users' share that time.
pub fn instances(patience: Duration) -> Vec<(RunFolder, Instance)> {
    let others = Instant::now() + patience;
    let mut found: Vec<(RunFolder, Instance)> = Vec::new();
    let mut asked = 0;
    for (home, owner) in runtime::homes() {
        for folder in folders(&home, owner) {
            let deadline = match folder.is_own() {
                true => Instant::now() + patience,
                false if asked == MOST_OTHERS || Instant::now() >= others => break,
                false => others,
            };
            asked += usize::from(!folder.is_own());
            if let Ok(instance) = folder.ask(deadline) {
                found.push((folder, instance));
            }
        }
    }
    found.sort_by_key(|(_, instance)| instance.pid());
    found.dedup_by_key(|(_, instance)| instance.pid());
    found
}

/// Whether a user means this by a PID: memfold's, or the program's as a run of the user's own reports it.
pub fn is_meant(folder: &RunFolder, instance: &Instance, pid: u32) -> bool {
    instance.is_meant(pid, folder.is_own())
}

/// The run or disk with this PID; all without one. Those that take longer than `patience` to answer are left out.
pub fn find(pid: Option<u32>, patience: Duration) -> Vec<(RunFolder, Instance)> {
    let mut found = instances(patience);
    found.retain(|(folder, instance)| pid.is_none_or(|pid| is_meant(folder, instance, pid)));
    found
}

/// Their statistics.
pub fn instances_of(pid: Option<u32>, patience: Duration) -> Vec<Instance> {
    let found = find(pid, patience).into_iter();
    found.map(|(_, instance)| instance).collect()
}

/// What may be the folders of this user's runs and disks. Another user's home may have any number of entries.
fn own_folders() -> impl Iterator<Item = RunFolder> {
    let own_user = rustix::process::geteuid().as_raw();
    let homes = runtime::homes().into_iter();
    let own = homes.filter(move |(_, owner)| *owner == own_user);
    own.flat_map(|(home, owner)| folders(&home, owner))
}

/// Whether a run or disk of this user listens, whether it gives statistics or not.
pub fn does_any_listen() -> bool {
    own_folders().any(|folder| folder.listens())
}

/// What is wrong with runs and disks of this user that listen, and give no statistics.
fn complaints() -> Vec<String> {
    let deadline = Instant::now() + PATIENCE;
    own_folders()
        .filter_map(|folder| folder.complaint(deadline))
        .collect()
}

/// There is nothing to show.
pub fn nothing_runs(pid: Option<u32>) -> Failure {
    nothing_runs_as(pid, "")
}

/// As [`nothing_runs`], with what else may be meant.
pub fn nothing_runs_as(pid: Option<u32>, hint: &str) -> Failure {
    let text = match pid {
        Some(pid) => {
            format!("no run or disk of this user has the PID {pid}; list them with memfold stat")
        }
        None => {
            "no run or disk of this user is active; start one with memfold run or memfold serve"
                .to_owned()
        }
    };
    let text = format!("{text}{hint}; {ELSEWHERE}");
    let all: Vec<String> = std::iter::once(text).chain(complaints()).collect();
    Failure::with_status(1, all.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Programs, Snapshot, Statistics};
    use memfold_pager::{Now, Stats};

    fn snapshot() -> Snapshot {
        Snapshot {
            pid: 11,
            program_pid: 12,
            command: "sort".into(),
            uptime_seconds: 1.0,
            now: Now {
                resident_bytes: 1,
                pool_bytes: 2,
                metadata_bytes: 3,
                staged_bytes: 0,
                file_bytes: 4,
                processes_now: 1,
                ..Now::default()
            },
            programs: Vec::new(),
            statistics: Statistics::new(&Stats::default(), 0.0, 0, Programs::default()),
        }
    }

    fn run_folder(home: &Path) -> RunFolder {
        let path = home.join("run");
        fs::create_dir_all(&path).unwrap();
        RunFolder::own(path)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(100)
    }

    #[test]
    fn who_asks_is_answered() {
        let home = tempfile::tempdir().unwrap();
        let folder = run_folder(home.path());
        let server = Server::bind(&folder.path, SOCKET).unwrap();
        let mode = fs::metadata(folder.path.join(SOCKET))
            .unwrap()
            .permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        let asking = folder.clone();
        let asked = std::thread::spawn(move || asking.ask(Instant::now() + PATIENCE));
        while !asked.is_finished() {
            let run = Snapshot {
                command: "so\u{1b}[31mrt".into(),
                ..snapshot()
            };
            server.answer(|| run.clone().into());
        }
        let answer = asked.join().unwrap().unwrap();
        let expected = Snapshot {
            pid: std::process::id(),
            command: "so?[31mrt".into(),
            ..snapshot()
        };
        assert_eq!(answer, expected.into());
        drop(server);
        assert!(fs::read_dir(&folder.path).unwrap().next().is_none());
    }

    #[test]
    fn what_is_wrong_with_a_run_that_does_not_answer_is_said() {
        let home = tempfile::tempdir().unwrap();
        let folder = run_folder(home.path());
        assert_eq!(folder.complaint(soon()), None, "nothing is there");
        let server = Server::bind(&folder.path, SOCKET).unwrap();
        let complaint = folder.complaint(soon()).expect("it does not answer");
        assert!(complaint.contains("stopped"), "{complaint}");
        while server.accept().is_some() {}
        let answer = |document: &'static str| {
            let asking = folder.clone();
            let asked = std::thread::spawn(move || asking.complaint(Instant::now() + PATIENCE));
            while !asked.is_finished() {
                if let Some(mut stream) = server.accept() {
                    stream.write_all(document.as_bytes()).unwrap();
                }
            }
            asked.join().unwrap()
        };
        let complaint = answer("{\"pid\": 11}").expect("it is not understood");
        assert!(complaint.contains("version"), "{complaint}");
        let known = serde_json::to_string(&Instance::from(snapshot())).unwrap();
        assert_eq!(answer(known.leak()), None);
    }

    #[test]
    fn statistics_that_another_version_lacks_are_zero() {
        let mut document = serde_json::to_value(Instance::from(snapshot())).unwrap();
        let fields = document.as_object_mut().unwrap();
        assert!(fields.remove("longest_pause_ns").is_some());
        assert!(fields.remove("exceeded_limit_bytes").is_some());
        fields.insert("new_in_a_later_version".to_owned(), 1.into());
        let known: Instance = serde_json::from_value(document).unwrap();
        assert_eq!(known, snapshot().into());
    }

    #[test]
    fn a_run_that_does_not_answer_is_passed_over() {
        let home = tempfile::tempdir().unwrap();
        let folder = run_folder(home.path());
        assert!(folder.ask(soon()).is_err(), "nothing is there");
        let server = Server::bind(&folder.path, SOCKET).unwrap();
        let began = Instant::now();
        assert!(folder.ask(soon()).is_err());
        // Nor does a full queue prolong the wait.
        let address = SocketAddrUnix::new(&server.path).unwrap();
        let mut waiting = Vec::new();
        for _ in 0..10_000 {
            let flags = SocketFlags::NONBLOCK;
            let family = AddressFamily::UNIX;
            let socket = socket_with(family, SocketType::STREAM, flags, None).unwrap();
            if connect(&socket, &address).is_err() {
                break;
            }
            waiting.push(socket);
        }
        assert!(folder.ask(soon()).is_err());
        assert!(folder.listens());
        assert!(began.elapsed() < Duration::from_secs(2));
        drop(server);
        assert!(!folder.listens());
    }

    #[test]
    fn what_is_not_found_may_run_in_a_container() {
        for pid in [None, Some(1)] {
            let failure = format!("{:?}", nothing_runs(pid));
            assert!(failure.contains("docker exec"), "{failure}");
        }
    }

    #[test]
    fn nothing_but_a_socket_of_the_folders_owner_is_asked() {
        let home = tempfile::tempdir().unwrap();
        let folder = run_folder(home.path());
        let _server = Server::bind(&folder.path, "elsewhere").unwrap();
        std::os::unix::fs::symlink("elsewhere", folder.path.join(SOCKET)).unwrap();
        assert!(folder.connect(SOCKET, soon()).is_err(), "a link");
        assert!(folder.connect("elsewhere", soon()).is_ok());
        let others = RunFolder {
            owner: folder.owner + 1,
            ..folder
        };
        assert!(others.connect("elsewhere", soon()).is_err());
    }

    /// A run with thousands of programs.
    #[test]
    fn an_answer_longer_than_the_sockets_buffer_is_whole() {
        let writers = Writers::default();
        let document = vec![b'x'; 900_000];
        let pair = || {
            let (sending, asking) = UnixStream::pair().unwrap();
            sending.set_nonblocking(true).unwrap();
            (sending, asking)
        };
        let idle: Vec<UnixStream> = (0..2)
            .map(|_| {
                let (sending, asking) = pair();
                writers.send(sending, document.clone());
                asking
            })
            .collect();
        let (sending, asking) = pair();
        let began = Instant::now();
        writers.send(sending, document.clone());
        assert!(began.elapsed() < TO_WRITE / 2, "it was waited for");
        let read = read_all(asking, Some(Instant::now() + PATIENCE)).unwrap();
        assert!(read == document, "{} bytes", read.len());
        // Those that do not read are given up.
        while Arc::strong_count(&writers.busy) > 1 {
            assert!(began.elapsed() < TO_WRITE * 10);
            std::thread::sleep(PAUSE);
        }
        let cut = read_all(idle.into_iter().next().unwrap(), None).unwrap();
        assert!(!cut.is_empty() && cut.len() < document.len());
    }

    #[test]
    fn an_answer_without_end_is_refused() {
        let (stream, mut other) = UnixStream::pair().unwrap();
        let writing = std::thread::spawn(move || while other.write_all(&[b'x'; 4096]).is_ok() {});
        let read = read_all(stream, Some(Instant::now() + PATIENCE));
        assert_eq!(read.unwrap_err().kind(), ErrorKind::InvalidData);
        writing.join().unwrap();
    }
}
