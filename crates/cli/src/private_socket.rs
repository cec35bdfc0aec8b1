//! A Unix socket for this user alone, whose file goes with it.

use rustix::fs::Mode;
use rustix::process::umask;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
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
    /// Listens. To be called while no other thread creates files, as the file creation mask is changed.
    pub fn bind(path: &Path) -> io::Result<PrivateSocket> {
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

fn identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}
