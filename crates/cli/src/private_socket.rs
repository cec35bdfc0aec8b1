//! A Unix socket for this user alone, whose file goes with it.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::process::umask;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening socket of mode 0600 that does not block. Its file is removed on drop, unless another has
/// taken the name since.
#[derive(Debug)]
pub struct PrivateSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl PrivateSocket {
    /// Listens; a socket of this user's that no process listens at any more is replaced. To be called while no other
    /// thread creates files, as the file creation mask is changed.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if a process listens there or is about to, `AlreadyExists` if the file is another one.
    pub fn bind(path: &Path) -> io::Result<PrivateSocket> {
        let _starting = Starting::at(path)?;
        remove_stale(path)?;
        // 0600 from its first moment on.
        let before = umask(Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener?;
        listener.set_nonblocking(true)?;
        Ok(PrivateSocket {
            listener,
            path: path.to_owned(),
            file: identity(&fs::symlink_metadata(path)?),
        })
    }

    /// The next connection.
    pub fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for PrivateSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| identity(&found) == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A lock on a file beside a socket's path, while the socket is looked at, removed and made. A process without it could take
/// a new socket at which nothing listens yet for a stale one, or remove it in place of the stale one that it found.
#[derive(Debug)]
struct Starting {
    path: PathBuf,
    _locked: File,
}

impl Starting {
    /// Locks; `AddrInUse` if another process has the lock.
    fn at(socket: &Path) -> io::Result<Starting> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".memfold-lock");
        let path = PathBuf::from(path);
        // Neither a link nor a FIFO is waited for or followed.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(flags.bits() as i32)
                .open(&path)?;
            let found = file.metadata()?;
            if found.uid() != rustix::process::geteuid().as_raw() {
                let what = format!("{} is another user's", path.display());
                return Err(io::Error::new(ErrorKind::PermissionDenied, what));
            }
            // On file systems without locks there is none.
            if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
                return Err(ErrorKind::AddrInUse.into());
            }
            // The process that had it has removed it, and another may have made a new one since.
            if fs::symlink_metadata(&path).is_ok_and(|now| identity(&now) == identity(&found)) {
                return Ok(Starting {
                    path,
                    _locked: file,
                });
            }
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        // While it is locked.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes a socket of this user's that no process listens at any more.
fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    let is_own = found.uid() == rustix::process::geteuid().as_raw();
    if !found.file_type().is_socket() || !is_own {
        return Err(ErrorKind::AlreadyExists.into());
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        _ => Err(ErrorKind::AddrInUse.into()),
    }
}

fn identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_servers_that_start_at_one_path_at_once_one_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let first = Starting::at(&path).unwrap();
        let second = PrivateSocket::bind(&path).unwrap_err();
        assert_eq!(second.kind(), ErrorKind::AddrInUse);
        drop(first);
        let _socket = PrivateSocket::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        let files = fs::read_dir(folder.path()).unwrap();
        assert_eq!(files.count(), 1, "a lock is left");
    }
}
