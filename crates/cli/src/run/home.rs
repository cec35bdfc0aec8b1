//! The folder that holds the private folders of a user's runs and disks, and stays when they end.

use rustix::fs::{
    FlockOperation, Mode, OFlags, Timespec, Timestamps, fchmod, flock, fstat, futimens, open,
};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The sockets of folders: a run has both, a disk the second. At one of them its process listens as long
/// as the folder is in use.
const SOCKETS: [&str; 2] = [memfold_pager::CONTROL, STATISTICS];
/// The socket for questions of `stat` and `top`.
pub const STATISTICS: &str = "stats.sock";
/// Folders of the host's own in which any user may create names.
pub const SHARED: [&str; 3] = ["/tmp", "/dev/shm", "/var/tmp"];
/// A run has begun to listen long before this.
const SETTLED: Duration = Duration::from_secs(60);
/// Names that are tried. Each is taken by chance once in 2^40 times.
const TRIES: usize = 16;
/// Digits of the boot's number in a name, and of what is random.
const BOOT_DIGITS: usize = 6;
const RANDOM_DIGITS: usize = 10;
/// Cleaners of temporary folders remove what is older than some days: a home looks so much
/// younger than it is.
const YOUNGER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How homes are named in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// This name: no other user can take it.
    Fixed(&'static str),
    /// The same, and the number of the boot: other hosts may have homes there.
    OfBoot(&'static str),
    /// The same, and random digits: any user can take names there.
    Random(&'static str),
}

/// A home that is in use: cleaners of temporary folders pass over what is locked.
#[derive(Debug)]
pub struct Home {
    path: PathBuf,
    descriptor: OwnedFd,
    names: Names,
}

impl Home {
    /// Finds or makes one in `base`.
    pub fn make(base: &Path, names: Names) -> Result<Home, String> {
        let boot = boot();
        let opened = match names {
            Names::Fixed(name) => Self::at(base.join(name), names),
            Names::OfBoot(name) => Self::at(base.join(format!("{name}-{boot}")), names),
            Names::Random(name) => {
                let prefix = format!("{name}-{boot}-");
                remove_those_of_other_boots(base, name, &boot);
                match existing(base, &prefix, names) {
                    Some(home) => return Ok(home),
                    None => Self::anew(base, &prefix, names),
                }
            }
        };
        opened.map_err(|error| format!("cannot hold a folder for runs ({error})"))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn anew(base: &Path, prefix: &str, names: Names) -> io::Result<Home> {
        let mut last = ErrorKind::AlreadyExists.into();
        for _ in 0..TRIES {
            let path = base.join(format!("{prefix}{}", random_digits()?));
            match rustix::fs::mkdir(&path, Mode::from_raw_mode(0o711)) {
                Ok(()) => return Self::open(path, names),
                Err(Errno::EXIST) => {}
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    /// In a folder where no other user creates names.
    fn at(path: PathBuf, names: Names) -> io::Result<Home> {
        match rustix::fs::mkdir(&path, Mode::from_raw_mode(0o711)) {
            Ok(()) | Err(Errno::EXIST) => Self::open(path, names),
            Err(error) => Err(error.into()),
        }
    }

    /// Refuses what is not this user's own, or could have been filled by others.
    fn open(path: PathBuf, names: Names) -> io::Result<Home> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = open(&path, flags, Mode::empty())?;
        let found = fstat(&descriptor)?;
        let is_own = found.st_uid == rustix::process::geteuid().as_raw();
        if !is_own || found.st_mode & 0o022 != 0 {
            let reason = format!("{} is not this user's alone; remove it", path.display());
            return Err(io::Error::new(ErrorKind::PermissionDenied, reason));
        }
        if found.st_mode & 0o7777 != 0o711 {
            // A program that became another user must still find the library.
            fchmod(&descriptor, Mode::from_raw_mode(0o711))?;
        }
        // Some file systems have no locks.
        let _ = flock(&descriptor, FlockOperation::NonBlockingLockShared);
        Ok(Home {
            path,
            descriptor,
            names,
        })
    }

    /// Makes a private folder in it, for this user and root alone.
    ///
    /// # Errors
    ///
    /// If no folder can be made.
    pub fn make_folder(&self) -> io::Result<PathBuf> {
        let mut last = ErrorKind::AlreadyExists.into();
        for _ in 0..TRIES {
            let path = self.path.join(random_digits()?);
            match rustix::fs::mkdir(&path, Mode::RWXU) {
                Ok(()) => return Ok(path),
                Err(Errno::EXIST) => {}
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    /// Removes what runs and disks that were killed left here: folders with a socket at which no process
    /// listens. (A connection of the wrong kind is refused then, and does not disturb one that lives.)
    pub fn sweep(&self) {
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            // Of the entry itself: no link is followed.
            let Ok(found) = entry.metadata() else {
                continue;
            };
            // A run that is just starting is not listening yet.
            let age = found.modified().ok().and_then(|time| time.elapsed().ok());
            let is_left = |name: &&str| is_dead(&entry.path().join(name));
            let is_settled = found.is_dir() && age.is_some_and(|age| age > SETTLED);
            if is_settled && SOCKETS.iter().any(is_left) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Has cleaners leave it alone also when no run is in it: its name must not become free where
    /// others could take it. To be repeated after each change in it.
    pub fn stay(&self) {
        if !matches!(self.names, Names::Random(_)) {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let time = Timespec {
            tv_sec: (now.unwrap_or_default() + YOUNGER).as_secs() as i64,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        let _ = futimens(&self.descriptor, &times);
    }
}

/// Whether a socket is left of a process that listened there: one that listens refuses datagrams as of the
/// wrong type.
fn is_dead(socket: &Path) -> bool {
    let connected = UnixDatagram::unbound().and_then(|here| here.connect(socket));
    connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// One of this user's own that an earlier run made. Whatever others made is passed over.
fn existing(base: &Path, prefix: &str, names: Names) -> Option<Home> {
    own_folders(base, prefix).find_map(|path| Home::open(path, names).ok())
}

/// Nothing that runs now can have the name of a home of an earlier boot.
fn remove_those_of_other_boots(base: &Path, name: &str, boot: &str) {
    if boot == UNKNOWN || !SHARED.iter().any(|local| base == Path::new(local)) {
        return;
    }
    let prefix = format!("{name}-");
    for path in own_folders(base, &prefix) {
        let file_name = path.file_name().unwrap_or_default().as_bytes();
        let rest = &file_name[prefix.len()..];
        let is_home = rest.len() == BOOT_DIGITS + 1 + RANDOM_DIGITS && rest[BOOT_DIGITS] == b'-';
        if is_home && !rest.starts_with(boot.as_bytes()) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Folders of this user whose names begin so.
fn own_folders(base: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let own = rustix::process::geteuid().as_raw();
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    entries
        .filter(move |entry| {
            let is_named_so = entry.file_name().as_bytes().starts_with(prefix.as_bytes());
            // Of the entry itself: no link is followed.
            is_named_so
                && entry
                    .metadata()
                    .is_ok_and(|found| found.is_dir() && found.uid() == own)
        })
        .map(|entry| entry.path())
}

const UNKNOWN: &str = "000000";

/// The first digits of what this boot of the host is known by.
fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits = id.get(..BOOT_DIGITS).unwrap_or(UNKNOWN);
    digits.to_owned()
}

fn random_digits() -> io::Result<String> {
    let mut bytes = [0; RANDOM_DIGITS / 2];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_what_is_dead_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::make(folder.path(), Names::Fixed("home")).unwrap();
        let [living, dead, unknown] = [(); 3].map(|()| home.make_folder().unwrap());
        let mode = fs::metadata(&living).unwrap().mode();
        assert_eq!(mode & 0o777, 0o700);
        let _listener = UnixListener::bind(living.join(STATISTICS)).unwrap();
        drop(UnixListener::bind(dead.join(STATISTICS)).unwrap());
        home.sweep();
        assert!(dead.exists(), "it may be about to listen");
        for path in [&living, &dead, &unknown] {
            let long_ago = SystemTime::now() - 2 * SETTLED;
            fs::File::open(path)
                .unwrap()
                .set_modified(long_ago)
                .unwrap();
        }
        home.sweep();
        assert!(living.exists() && unknown.exists() && !dead.exists());
    }
}
