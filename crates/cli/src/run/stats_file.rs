//! The file of `--stats`: checked before the program starts, complete or as it was when it ends.

use super::stats_place::{Place, entry, refuse_planted, resolve, writable};
use crate::failure::Failure;
use crate::patient;
use rustix::fs::{
    Access, AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid, accessat, fchmod, fchown, fstat,
    openat, renameat, unlinkat,
};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Where the report goes.
#[derive(Debug)]
pub enum StatsFile {
    /// A descriptor that the user opened, or what is no regular file (a terminal, a pipe): behind what
    /// was written there already.
    Open(File),
    /// A file that this user may write and not replace.
    InPlace(File),
    /// A name, which a new file takes: with the owner and mode of the one that has it now.
    Name {
        /// The folder it is in.
        folder: OwnedFd,
        /// The last part of the path.
        name: OsString,
        /// The file that had it at the start.
        existing: Option<File>,
    },
}

impl StatsFile {
    /// Makes sure that the report can be written there.
    pub fn open(path: &Path) -> Result<StatsFile, Failure> {
        Self::open_for("--stats", path)
    }

    /// As [`open`](Self::open), for the file of another option.
    pub fn open_for(option: &str, path: &Path) -> Result<StatsFile, Failure> {
        Self::try_open(path).map_err(|error| {
            Failure::own(format!(
                "cannot write {option} {}: {error}; give a file in a folder that exists and that you may write to",
                path.display()
            ))
        })
    }

    /// A descriptor that the user opened, by its number. The program does not get one above 2, so that the end of a
    /// pipe is seen when memfold ends. To be called before memfold opens descriptors of its own.
    pub fn of_descriptor(number: i32) -> Result<StatsFile, Failure> {
        let failed = |error: io::Error| {
            Failure::own(format!(
                "cannot write --stats-fd {number}: {error}; open it for memfold, as in {number}>run.json"
            ))
        };
        if number < 0 {
            return Err(failed(ErrorKind::InvalidInput.into()));
        }
        // SAFETY: nothing else owns it, and nothing closes what memfold was started with.
        let given = unsafe { BorrowedFd::borrow_raw(number) };
        let own = writable(given).map_err(failed)?;
        if number > 2 {
            fcntl_setfd(given, FdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        }
        Ok(StatsFile::Open(own.into()))
    }

    fn try_open(path: &Path) -> io::Result<StatsFile> {
        if path == Path::new("-") {
            return Ok(StatsFile::Open(writable(io::stdout().as_fd())?.into()));
        }
        let (folder, name) = match resolve(path)? {
            Place::Descriptor(descriptor) => {
                return Ok(StatsFile::Open(writable(descriptor.as_fd())?.into()));
            }
            Place::Name(folder, name) => (folder, name),
        };
        let may_make = accessat(
            &folder,
            c".",
            Access::WRITE_OK | Access::EXEC_OK,
            AtFlags::EACCESS,
        );
        let Some(found) = entry(&folder, &name)? else {
            may_make?;
            let existing = None;
            return Ok(StatsFile::Name {
                folder,
                name,
                existing,
            });
        };
        refuse_planted(&fstat(&folder)?, &found)?;
        let kind = FileType::from_raw_mode(found.st_mode);
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
        if kind != FileType::RegularFile {
            let flags = flags | OFlags::APPEND;
            return Ok(StatsFile::Open(
                openat(&folder, &name, flags, Mode::empty())?.into(),
            ));
        }
        if let Some(redirected) = redirected_to(&found) {
            return Ok(StatsFile::Open(redirected.into()));
        }
        let file = File::from(openat(&folder, &name, flags, Mode::empty())?);
        let own = rustix::process::geteuid();
        if may_make.is_err() || !(own.is_root() || found.st_uid == own.as_raw()) {
            return Ok(StatsFile::InPlace(file));
        }
        Ok(StatsFile::Name {
            folder,
            name,
            existing: Some(file),
        })
    }

    /// Writes the report: under a name, in one step as seen from outside.
    pub fn write(self, report: &impl Serialize) -> io::Result<()> {
        let mut document = serde_json::to_vec_pretty(report)?;
        document.push(b'\n');
        self.write_document(&document)
    }

    /// As [`write`](Self::write), for any document.
    pub fn write_document(self, document: &[u8]) -> io::Result<()> {
        match self {
            StatsFile::Open(mut file) => patient::write_all(&mut file, document),
            StatsFile::InPlace(file) => write_in_place(file, document),
            StatsFile::Name {
                folder,
                name,
                existing,
            } => replace(&folder, &name, existing, document),
        }
    }
}

/// Standard output or error, if that is the file: what was written there must stay.
fn redirected_to(found: &Stat) -> Option<OwnedFd> {
    let (output, errors) = (io::stdout(), io::stderr());
    [output.as_fd(), errors.as_fd()]
        .into_iter()
        .find_map(|descriptor| {
            let open = fstat(descriptor).ok()?;
            let is_it = (open.st_dev, open.st_ino) == (found.st_dev, found.st_ino);
            is_it.then(|| writable(descriptor).ok()).flatten()
        })
}

fn write_in_place(mut file: File, document: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all(document)
}

fn replace(
    folder: &OwnedFd,
    name: &OsStr,
    existing: Option<File>,
    document: &[u8],
) -> io::Result<()> {
    let found = entry(folder, name)?;
    if let Some(found) = &found {
        refuse_planted(&fstat(folder)?, found)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(
                ErrorKind::AlreadyExists,
                "the name is no longer a regular file's",
            ));
        }
    }
    let temporary = format!(".memfold-stats-{:016x}", random()?);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = if found.is_some() { 0o600 } else { 0o666 };
    let mut file = File::from(openat(
        folder,
        &temporary,
        flags,
        Mode::from_raw_mode(mode),
    )?);
    let put = || -> io::Result<bool> {
        file.write_all(document)?;
        if found.is_some_and(|found| !takes_over(&file, &found)) {
            return Ok(false);
        }
        renameat(folder, &temporary, folder, name)?;
        Ok(true)
    };
    let put = { put }();
    if !matches!(put, Ok(true)) {
        let _ = unlinkat(folder, &temporary, AtFlags::empty());
    }
    match (put?, existing) {
        (true, _) => Ok(()),
        (false, Some(existing)) => write_in_place(existing, document),
        (false, None) => Err(ErrorKind::PermissionDenied.into()),
    }
}

/// Gives a new file the owner, group and mode of another one, if this user may.
fn takes_over(file: &File, from: &Stat) -> bool {
    let Ok(now) = fstat(file) else { return false };
    let owner = (now.st_uid != from.st_uid).then(|| Uid::from_raw(from.st_uid));
    let group = (now.st_gid != from.st_gid).then(|| Gid::from_raw(from.st_gid));
    let is_same = owner.is_none() && group.is_none();
    let mode = Mode::from_raw_mode(from.st_mode & 0o777);
    (is_same || fchown(file, owner, group).is_ok()) && fchmod(file, mode).is_ok()
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Programs, Report, Statistics};
    use memfold_pager::Stats;
    use std::fs;

    fn report() -> Report {
        let statistics = Statistics::new(&Stats::default(), 0.0, 0, Programs::default());
        Report {
            exit_code: Some(3),
            signal: None,
            wall_seconds: 0.5,
            command: "true".into(),
            memfold_version: "1",
            limit_kept: true,
            statistics,
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn the_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        let file = StatsFile::open(&path).unwrap();
        assert!(!path.exists());
        file.write(&report()).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(value["exit_code"], 3);
        // Once more over the old one, then given up.
        StatsFile::open(&path).unwrap().write(&report()).unwrap();
        drop(StatsFile::open(&path).unwrap());
        assert_eq!(names(folder.path()), ["run.json"]);
    }

    #[test]
    fn an_existing_file_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        StatsFile::open(&path).unwrap().write(&report()).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!(found.permissions().mode() & 0o7777, 0o600);
        assert!(fs::read_to_string(&path).unwrap().contains("exit_code"));
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("run.json"), folder.path().join("link"));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        StatsFile::open(&link).unwrap().write(&report()).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(fs::read_to_string(&path).unwrap().contains("exit_code"));
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        assert!(StatsFile::open(folder.path()).is_err());
        assert!(StatsFile::open(&folder.path().join("no/run.json")).is_err());
        assert!(StatsFile::open(&folder.path().join("run.json/")).is_err());
        StatsFile::open(Path::new("/dev/null"))
            .unwrap()
            .write(&report())
            .unwrap();
    }
}
