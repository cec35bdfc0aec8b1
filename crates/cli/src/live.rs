//! The figures of a run while it goes on, over a socket in the run's private folder.
//!
//! Whoever connects gets one JSON document and the end of the file. Both sides look at whom they
//! talk to: only the same user and root are served, and only their answers are believed (the
//! shared `/tmp` lets anybody make a folder with a name like ours).

use crate::report::Snapshot;
use crate::run::runtime;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where figures are asked for.
pub const SOCKET: &str = "stats.sock";
/// Far more than a document takes.
const LONGEST_DOCUMENT: u64 = 1 << 20;
/// How long an answer is waited for: a stopped run gives none, and one on a busy machine takes its
/// time.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// The serving side. The socket's file is removed on drop.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Server {
    /// Listens in the run's private folder, under this name.
    pub fn bind(folder: &Path, name: &str) -> io::Result<Server> {
        let path = folder.join(name);
        let listener = UnixListener::bind(&path)?;
        let server = Server { listener, path };
        fs::set_permissions(&server.path, fs::Permissions::from_mode(0o600))?;
        server.listener.set_nonblocking(true)?;
        Ok(server)
    }

    /// To wait for those who ask.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The next who asks now and may, to be served without waiting.
    pub fn accept(&self) -> Option<UnixStream> {
        while let Ok((stream, _)) = self.listener.accept() {
            if is_trusted(&stream) && stream.set_nonblocking(true).is_ok() {
                return Some(stream);
            }
        }
        None
    }

    /// Answers all who ask now; never waits. Who cannot be answered gets nothing.
    pub fn answer(&self, snapshot: impl Fn() -> Snapshot) {
        while let Some(mut stream) = self.accept() {
            if let Ok(document) = serde_json::to_vec(&snapshot()) {
                // It fits into the socket's buffer; a peer that has left is no concern.
                let _ = stream.write_all(&document);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The same user, or root on either side.
pub fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(stream)
        .is_ok_and(|peer| peer.uid == own || peer.uid.is_root() || own.is_root())
}

/// Asks one run.
fn ask(socket: &Path, patience: Duration) -> io::Result<Snapshot> {
    let stream = UnixStream::connect(socket)?;
    if !is_trusted(&stream) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(patience))?;
    let mut document = Vec::new();
    stream.take(LONGEST_DOCUMENT).read_to_end(&mut document)?;
    Ok(serde_json::from_slice(&document)?)
}

/// Asks all runs that can be found, oldest process number first. With the private folder of each.
/// Those that take longer than `patience` to answer are left out.
pub fn runs(patience: Duration) -> Vec<(PathBuf, Snapshot)> {
    let mut found: Vec<(PathBuf, Snapshot)> = Vec::new();
    for base in runtime::candidates() {
        let Ok(entries) = fs::read_dir(base) else {
            continue;
        };
        for entry in entries.flatten() {
            if !entry
                .file_name()
                .to_string_lossy()
                .starts_with(runtime::FOLDER_PREFIX)
            {
                continue;
            }
            if let Ok(snapshot) = ask(&entry.path().join(SOCKET), patience) {
                found.push((entry.path(), snapshot));
            }
        }
    }
    found.sort_by_key(|(_, snapshot)| snapshot.pid);
    found.dedup_by_key(|(_, snapshot)| snapshot.pid);
    found
}

/// The figures of the runs with this process number (memfold's or the program's); of all without
/// one. Those that take longer than `patience` to answer are left out.
pub fn snapshots_of(pid: Option<u32>, patience: Duration) -> Vec<Snapshot> {
    let found = runs(patience).into_iter().map(|(_, snapshot)| snapshot);
    let is_meant = |snapshot: &Snapshot| {
        pid.is_none_or(|pid| snapshot.pid == pid || snapshot.program_pid == pid)
    };
    found.filter(is_meant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figures;
    use memfold_pager::Stats;

    fn snapshot() -> Snapshot {
        Snapshot {
            pid: 11,
            program_pid: 12,
            command: "sort".into(),
            uptime_seconds: 1.0,
            resident_bytes: 1,
            pool_bytes: 2,
            metadata_bytes: 3,
            staged_bytes: 0,
            file_bytes: 4,
            programs: Vec::new(),
            processes_now: 1,
            figures: Figures::new(&Stats::default(), 0.0, 0),
        }
    }

    #[test]
    fn who_asks_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::bind(folder.path(), SOCKET).unwrap();
        let socket = folder.path().join(SOCKET);
        assert_eq!(
            fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let asked = std::thread::spawn(move || ask(&socket, PATIENCE));
        while !asked.is_finished() {
            server.answer(snapshot);
        }
        assert_eq!(asked.join().unwrap().unwrap(), snapshot());
        drop(server);
        assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    }

    #[test]
    fn a_run_that_does_not_answer_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let _server = Server::bind(folder.path(), SOCKET).unwrap();
        let patience = Duration::from_millis(50);
        assert!(ask(&folder.path().join(SOCKET), patience).is_err());
        assert!(ask(&folder.path().join("none"), patience).is_err());
    }
}
