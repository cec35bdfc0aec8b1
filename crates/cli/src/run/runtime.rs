//! Where the private folders of runs are.
//!
//! The preload library is mapped from there as code, and its path stays in the `LD_PRELOAD` of
//! processes that memfold does not wait for. So the path must lead through folders that only this
//! user and root can make, during the run and after it: runs are in a *home*, which stays.

use super::home::{Home, Names, SHARED};
use memfold_sys::inherited;
use memfold_sys::probe::{self, Check};
use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags, accessat};
use rustix::process::Uid;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A home's name, or its beginning.
const HOME: &str = "memfold";
/// Bytes that a socket's path may have, without the zero behind it.
const LONGEST_PATH: usize = memfold_sys::hello::SOCKET_PATH_MAX - 1;
/// What comes after a base at most: the home, a run's folder and a socket in it.
const LONGEST_REST: usize = "/memfold-123456-1234567890/123456789012/command.sock".len();

/// Where systemd makes a folder for each user who is logged in.
const RUNTIME_FOLDERS: &str = "/run/user";

/// Where root's homes may be, the first that fits is taken: `/run` is mounted noexec on some
/// distributions.
pub const ROOTS: [&str; 3] = ["/run", "/var/lib", "/usr/local/lib"];

const SEARCH_BY_OTHERS: u32 = 0o001;
const WRITE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// A folder in which a home may be.
#[derive(Debug)]
struct Base {
    path: PathBuf,
    /// Perhaps a file system that other hosts have mounted, too.
    may_be_remote: bool,
}

impl Base {
    fn local(path: impl Into<PathBuf>) -> Base {
        Base {
            path: path.into(),
            may_be_remote: false,
        }
    }

    fn named_by(variable: &str) -> Option<Base> {
        let value = inherited::variable(variable)?;
        (!value.is_empty()).then(|| Base {
            path: value.into(),
            may_be_remote: variable != "XDG_RUNTIME_DIR",
        })
    }

    fn names(&self, kind: Kind) -> Names {
        match kind {
            Kind::Private if self.may_be_remote => Names::OfBoot(HOME),
            Kind::Private => Names::Fixed(HOME),
            Kind::Sticky => Names::Random(HOME),
        }
    }
}

/// Which users can create names in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// This user and root.
    Private,
    /// All users, but only root and a name's owner can remove it.
    Sticky,
}

/// The bases of this user's runs, in order of preference.
fn bases() -> Vec<Base> {
    let is_root = rustix::process::geteuid().is_root();
    let mut bases = Vec::new();
    if is_root {
        bases.extend(ROOTS.map(Base::local));
    } else {
        bases.extend(Base::named_by("XDG_RUNTIME_DIR"));
    }
    bases.extend(Base::named_by("TMPDIR"));
    if !is_root {
        bases.extend(SHARED.map(Base::local));
    }
    bases
}

/// The home for this run, made where it is not there yet, or why none of the bases does.
pub fn prepare() -> Result<Home, String> {
    let mut reasons = Vec::new();
    for base in bases() {
        let made = fits(&base.path)
            .map_err(str::to_owned)
            .and_then(|kind| Home::make(&base.path, base.names(kind)));
        match made {
            Ok(home) => {
                home.sweep();
                return Ok(home);
            }
            Err(reason) => reasons.push(format!("{} {reason}", base.path.display())),
        }
    }
    Err(reasons.join(", "))
}

/// What `prepare` needs, as a check of `memfold doctor`.
pub fn check() -> Check {
    const NAME: &str = "runtime-folder";
    let mut reasons = Vec::new();
    for base in bases() {
        match fits(&base.path) {
            Ok(_) => return Check::ok(NAME, base.path.display().to_string()),
            Err(reason) => reasons.push(format!("{} {reason}", base.path.display())),
        }
    }
    Check::missing(NAME, reasons.join(", "), remedy())
}

/// What makes one of the bases do.
pub fn remedy() -> String {
    probe::folder_remedy(rustix::process::geteuid().is_root())
}

/// The folders in which this user's homes may be, and for root those of all users. Runs may have been started with
/// another environment.
fn folders_of_homes(bases: Vec<Base>, own: Uid) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = bases.into_iter().map(|base| base.path).collect();
    if own.is_root() {
        folders.extend(SHARED.map(PathBuf::from));
        let entries = fs::read_dir(RUNTIME_FOLDERS)
            .into_iter()
            .flatten()
            .flatten();
        folders.extend(entries.map(|entry| entry.path()));
    } else {
        // `XDG_RUNTIME_DIR` of a session: cron, sudo -u and units with User= do not set it.
        folders.push(Path::new(RUNTIME_FOLDERS).join(own.as_raw().to_string()));
    }
    let mut once = Vec::new();
    for folder in folders {
        if !once.contains(&folder) {
            once.push(folder);
        }
    }
    once
}

/// All homes that this user's questions may go to, with their owners: its own, and for root
/// those of all users.
pub fn homes() -> Vec<(PathBuf, u32)> {
    let own = rustix::process::geteuid();
    let folders = folders_of_homes(bases(), own);
    let mut found: Vec<(PathBuf, u32)> = Vec::new();
    for entry in folders.iter().flat_map(fs::read_dir).flatten().flatten() {
        let is_home = entry.file_name().as_bytes().starts_with(HOME.as_bytes());
        // Of the entry itself: no link is followed.
        let folder = entry
            .metadata()
            .ok()
            .filter(|found| is_home && found.is_dir());
        if let Some(folder) = folder.filter(|folder| own.is_root() || folder.uid() == own.as_raw())
        {
            found.push((entry.path(), folder.uid()));
        }
    }
    found
}

/// Whether a folder may be a base, and of which kind, or why not.
fn fits(folder: &Path) -> Result<Kind, &'static str> {
    let bytes = folder.as_os_str().as_bytes();
    if !folder.is_absolute() {
        return Err("is not absolute");
    }
    if bytes.len() + LONGEST_REST > LONGEST_PATH {
        return Err("is too long a path");
    }
    // `$` would be expanded by the loader ($ORIGIN and its like).
    if bytes
        .iter()
        .any(|byte| b" :$\\".contains(byte) || byte.is_ascii_control())
    {
        return Err("has a character that LD_PRELOAD cannot hold");
    }
    if !folder.is_dir() {
        return Err("is no folder");
    }
    let kind = kind(folder)?;
    if accessat(
        CWD,
        folder,
        Access::WRITE_OK | Access::EXEC_OK,
        AtFlags::EACCESS,
    )
    .is_err()
    {
        return Err("is not writable");
    }
    match rustix::fs::statvfs(folder) {
        Ok(file_system) if file_system.f_flag.contains(StatVfsMountFlags::NOEXEC) => {
            Err("is mounted noexec")
        }
        Ok(_) => Ok(kind),
        Err(_) => Err("cannot be examined"),
    }
}

fn kind(folder: &Path) -> Result<Kind, &'static str> {
    let own = rustix::process::geteuid();
    // As it is reached: by way of links there are other folders above it.
    let real = fs::canonicalize(folder).map_err(|_| "cannot be examined")?;
    let mut kind = Kind::Private;
    for (level, folder) in real.ancestors().enumerate() {
        let found = fs::metadata(folder).map_err(|_| "cannot be examined")?;
        if found.uid() != 0 && found.uid() != own.as_raw() {
            return Err("belongs to another user, or is in a folder that does");
        }
        if own.is_root() && found.mode() & SEARCH_BY_OTHERS == 0 {
            // Root's programs may become other users, and must find the library then.
            return Err("is closed to other users");
        }
        let is_shared = found.mode() & WRITE_BY_OTHERS != 0;
        if is_shared && (own.is_root() || found.mode() & STICKY == 0) {
            return Err("can be written by other users, or is in a folder that can");
        }
        if level == 0 && is_shared {
            kind = Kind::Sticky;
        } else if level == 0 && found.uid() != own.as_raw() {
            return Err("belongs to another user");
        }
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn folders_that_cannot_serve_are_told_apart() {
        assert_eq!(fits(Path::new("tmp")), Err("is not absolute"));
        assert_eq!(fits(Path::new("/no/such/folder")), Err("is no folder"));
        assert_eq!(
            fits(Path::new(&format!("/{}", "x".repeat(80)))),
            Err("is too long a path")
        );
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let spaced = folder.path().join("a b");
        std::fs::create_dir(&spaced).unwrap();
        assert_eq!(
            fits(&spaced),
            Err("has a character that LD_PRELOAD cannot hold")
        );
    }

    #[test]
    fn runs_of_a_session_are_found_without_its_variables() {
        let local = |folders: &[&str]| folders.iter().map(Base::local).collect::<Vec<_>>();
        let own = Uid::from_raw(1234);
        let expected = ["/tmp", "/run/user/1234"].map(PathBuf::from);
        assert_eq!(folders_of_homes(local(&["/tmp"]), own), expected);
        let twice = local(&["/run/user/1234/", "/tmp", "/tmp"]);
        let expected = ["/run/user/1234", "/tmp"].map(PathBuf::from);
        assert_eq!(folders_of_homes(twice, own), expected);
        let of_root = folders_of_homes(local(&["/tmp"]), Uid::ROOT);
        let shared = SHARED.map(PathBuf::from);
        assert_eq!(of_root[..shared.len()], shared);
    }

    #[test]
    fn only_folders_where_names_are_safe_serve() {
        let is_root = rustix::process::geteuid().is_root();
        let parent = if is_root { "/var/lib" } else { "/tmp" };
        let folder = tempfile::tempdir_in(parent).unwrap();
        let with_mode = |mode| {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(folder.path(), permissions).unwrap();
            fits(folder.path())
        };
        assert_eq!(with_mode(0o755), Ok(Kind::Private));
        let others = "can be written by other users, or is in a folder that can";
        assert_eq!(with_mode(0o777), Err(others));
        if is_root {
            assert_eq!(with_mode(0o1777), Err(others));
            assert_eq!(with_mode(0o700), Err("is closed to other users"));
            assert_eq!(fits(Path::new("/tmp")), Err(others));
        } else {
            assert_eq!(with_mode(0o1777), Ok(Kind::Sticky));
            assert_eq!(with_mode(0o700), Ok(Kind::Private));
        }
    }
}
