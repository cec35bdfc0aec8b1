//! Where the file of `--stats` really is.
//!
//! The path is walked here, link by link. What other users left in a world-writable folder
//! is refused, whatever `fs.protected_symlinks` is set to; and a path to an open descriptor
//! (`/dev/stdout`) is distinguished from the file that the descriptor is open at.

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fcntl_getfl, fstat, fstatfs, openat, readlinkat,
    stat, statat,
};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path};

const PROC_SUPER_MAGIC: i64 = 0x9fa0;
const PROC_ROOT: u64 = 1;
/// Symbolic links that are followed in a path, as in the kernel (`MAXSYMLINKS`).
const MOST_LINKS: usize = 40;

/// What a path leads to.
#[derive(Debug)]
pub enum Place {
    /// An open descriptor.
    Descriptor(OwnedFd),
    /// This name in this folder. It is no link; perhaps nothing is there yet.
    Name(OwnedFd, OsString),
}

/// Follows a path as far as the kernel would for this user, and no link that another user left.
pub fn resolve(path: &Path) -> io::Result<Place> {
    if path.as_os_str().as_bytes().ends_with(b"/") {
        return Err(ErrorKind::IsADirectory.into());
    }
    let mut folder = folder_at(CWD, OsStr::new("."))?;
    let mut rest = VecDeque::new();
    put_in_front(&mut rest, path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == "/" || name == ".." {
            folder = folder_at(folder.as_fd(), &name)?;
            continue;
        }
        let is_last = rest.is_empty();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match openat(&folder, &name, flags, Mode::empty()) {
            Err(Errno::NOENT) if is_last => return Ok(Place::Name(folder, name)),
            found => found?,
        };
        let about = fstat(&found)?;
        if FileType::from_raw_mode(about.st_mode) != FileType::Symlink {
            if is_last {
                return Ok(Place::Name(folder, name));
            }
            folder = found;
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        if is_magic(&folder)? {
            if is_last {
                return descriptor(&folder, &name).map(Place::Descriptor);
            }
            folder = folder_at(folder.as_fd(), &name)?;
            continue;
        }
        refuse_planted(&fstat(&folder)?, &about)?;
        let target = readlinkat(&found, c"", Vec::new())?.into_bytes();
        put_in_front(&mut rest, Path::new(&OsString::from_vec(target)));
    }
    Err(ErrorKind::IsADirectory.into())
}

/// Refuses what another user left in a world-writable sticky folder: the rule that the kernel has
/// for links, files and pipes, if `fs.protected_*` are set.
pub fn refuse_planted(folder: &Stat, entry: &Stat) -> io::Result<()> {
    const STICKY_AND_SHARED: u32 = 0o1002;
    let own = rustix::process::geteuid().as_raw();
    let is_shared = folder.st_mode & STICKY_AND_SHARED == STICKY_AND_SHARED;
    if is_shared && entry.st_uid != own && entry.st_uid != folder.st_uid {
        return Err(io::Error::new(
            ErrorKind::PermissionDenied,
            "another user created that name in a world-writable folder; choose another name",
        ));
    }
    Ok(())
}

fn put_in_front(rest: &mut VecDeque<OsString>, path: &Path) {
    for component in path.components().rev() {
        match component {
            Component::CurDir | Component::Prefix(_) => {}
            component => rest.push_front(component.as_os_str().to_owned()),
        }
    }
}

fn folder_at(folder: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(folder, name, flags, Mode::empty())?)
}

/// Whether links in this folder are of the kind that only the kernel can follow: those of processes.
fn is_magic(folder: &OwnedFd) -> io::Result<bool> {
    let is_proc = fstatfs(folder)?.f_type as i64 == PROC_SUPER_MAGIC;
    Ok(is_proc && fstat(folder)?.st_ino != PROC_ROOT)
}

/// What such a link leads to, to be written where it is written next.
fn descriptor(folder: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let (here, own) = (fstat(folder)?, stat("/proc/self/fd")?);
    if (here.st_dev, here.st_ino) != (own.st_dev, own.st_ino) {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOCTTY | OFlags::CLOEXEC;
        return Ok(openat(folder, name, flags, Mode::empty())?);
    }
    let number: RawFd = name
        .to_str()
        .and_then(|name| name.parse().ok())
        .ok_or(Errno::BADF)?;
    // SAFETY: it was there a moment ago, and no thread closes what memfold was started with.
    writable(unsafe { BorrowedFd::borrow_raw(number) })
}

/// Another descriptor of the same open file, if it may be written.
pub fn writable(descriptor: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    if fcntl_getfl(descriptor)? & OFlags::RWMODE == OFlags::RDONLY {
        return Err(Errno::BADF.into());
    }
    Ok(fcntl_dupfd_cloexec(descriptor, 3)?)
}

/// What is under a name in a folder; nothing if there is nothing.
pub fn entry(folder: &OwnedFd, name: &OsStr) -> io::Result<Option<Stat>> {
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(None),
        found => Ok(Some(found?)),
    }
}
