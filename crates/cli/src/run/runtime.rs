//! Where the private folder of a run can be.
//!
//! The preload library is mapped from there as code, its path travels in `LD_PRELOAD` (a list
//! separated by spaces and colons), and sockets lie there, whose paths have little room.

use memfold_sys::probe::Check;
use rustix::fs::{Access, StatVfsMountFlags};
use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Room that is left for `/memfold-PID/` and a file name in a socket's path of 107 bytes.
const LONGEST_BASE: usize = 60;

/// How the supervisor names the private folder of a run, before its process number.
pub const FOLDER_PREFIX: &str = "memfold-";
/// Its socket in there.
const CONTROL: &str = "control";
/// A run has begun to listen long before this.
const SETTLED: Duration = Duration::from_secs(60);

/// The folders a run may be in, the first that fits is taken. `stat` looks through all.
pub fn candidates() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["XDG_RUNTIME_DIR", "TMPDIR"]
        .into_iter()
        .filter_map(env::var_os)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
        .collect();
    folders.extend(["/tmp", "/dev/shm", "/var/tmp"].map(PathBuf::from));
    folders
}

/// The folder for this run's private one, or why each candidate does not do.
pub fn base() -> Result<PathBuf, String> {
    let mut reasons = Vec::new();
    for folder in candidates() {
        match unfit(&folder) {
            None => return Ok(folder),
            Some(reason) => reasons.push(format!("{} {reason}", folder.display())),
        }
    }
    Err(reasons.join(", "))
}

/// The same as a check of `memfold doctor`.
pub fn check() -> Check {
    const NAME: &str = "runtime-folder";
    match base() {
        Ok(folder) => Check::ok(NAME, folder.display().to_string()),
        Err(reasons) => Check::missing(
            NAME,
            reasons,
            "export TMPDIR=… to a short path without spaces, writable and not mounted noexec",
        ),
    }
}

/// Removes what runs of this user that were killed left in `base`: folders whose control socket
/// nobody listens at. (Asking for the wrong kind of connection tells that without disturbing a run
/// that lives.) What cannot be removed stays.
pub fn sweep(base: &Path) {
    let own = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        if !entry
            .file_name()
            .as_bytes()
            .starts_with(FOLDER_PREFIX.as_bytes())
        {
            continue;
        }
        // Of the entry itself: no link is followed.
        let Ok(found) = entry.metadata() else {
            continue;
        };
        // A run that is just starting is not listening yet.
        let age = found.modified().ok().and_then(|time| time.elapsed().ok());
        if found.is_dir() && found.uid() == own && age.is_some_and(|age| age > SETTLED) {
            let refused = UnixStream::connect(entry.path().join(CONTROL))
                .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
            if refused {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

fn unfit(folder: &Path) -> Option<&'static str> {
    let bytes = folder.as_os_str().as_bytes();
    if !folder.is_absolute() {
        return Some("is not absolute");
    }
    if bytes.len() > LONGEST_BASE {
        return Some("is too long a path");
    }
    // `$` would be expanded by the loader ($ORIGIN and its like).
    if bytes
        .iter()
        .any(|byte| b" :$\\".contains(byte) || byte.is_ascii_control())
    {
        return Some("has a character that LD_PRELOAD cannot hold");
    }
    if !folder.is_dir() {
        return Some("is no folder");
    }
    if rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        return Some("is not writable");
    }
    // Root's programs may become other users, and must find the library then.
    if rustix::process::geteuid().is_root() && !others_may_enter(folder) {
        return Some("is closed to other users");
    }
    match rustix::fs::statvfs(folder) {
        Ok(file_system) if file_system.f_flag.contains(StatVfsMountFlags::NOEXEC) => {
            Some("is mounted noexec")
        }
        Ok(_) => None,
        Err(_) => Some("cannot be examined"),
    }
}

/// Whether everybody may go through a folder and all above it.
fn others_may_enter(folder: &Path) -> bool {
    const SEARCH: u32 = 0o001;
    // As it is reached: by way of links there are other folders above it.
    let real = fs::canonicalize(folder).unwrap_or_default();
    let mut folders = real.ancestors();
    folders.all(|folder| fs::metadata(folder).is_ok_and(|found| found.mode() & SEARCH != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn folders_that_cannot_serve_are_told_apart() {
        assert_eq!(unfit(Path::new("tmp")), Some("is not absolute"));
        assert_eq!(unfit(Path::new("/no/such/folder")), Some("is no folder"));
        assert_eq!(
            unfit(Path::new(&format!("/{}", "x".repeat(80)))),
            Some("is too long a path")
        );
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let allow = |mode| {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(folder.path(), permissions).unwrap();
        };
        allow(0o700);
        let closed = rustix::process::geteuid().is_root();
        assert_eq!(
            unfit(folder.path()),
            closed.then_some("is closed to other users")
        );
        allow(0o755);
        assert_eq!(unfit(folder.path()), None);
        let spaced = folder.path().join("a b");
        std::fs::create_dir(&spaced).unwrap();
        assert_eq!(
            unfit(&spaced),
            Some("has a character that LD_PRELOAD cannot hold")
        );
    }

    #[test]
    fn only_what_nobody_listens_at_is_swept() {
        let base = tempfile::tempdir_in("/tmp").unwrap();
        let make = |name: &str, age: u64| {
            let folder = base.path().join(name);
            fs::create_dir(&folder).unwrap();
            let listener = UnixListener::bind(folder.join(CONTROL)).unwrap();
            let time = std::time::SystemTime::now() - Duration::from_secs(age);
            fs::File::open(&folder).unwrap().set_modified(time).unwrap();
            listener
        };
        let _alive = make("memfold-1", 3600);
        drop(make("memfold-2", 3600));
        drop(make("memfold-3", 0));
        drop(make("other-4", 3600));
        fs::create_dir(base.path().join("memfold-5")).unwrap();
        sweep(base.path());
        let mut left: Vec<_> = fs::read_dir(base.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["memfold-1", "memfold-3", "memfold-5", "other-4"]);
    }
}
