//! A Unix socket for this user alone, whose file goes with it.

use rustix::fs::Mode;
use rustix::process::umask;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
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
    /// `AddrInUse` if a process listens there, `AlreadyExists` if the file is another one.
    pub fn bind(path: &Path) -> io::Result<PrivateSocket> {
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
