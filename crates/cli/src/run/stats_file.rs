//! The file of `--stats`: opened before the program starts, complete or absent when it ends.

use crate::failure::Failure;
use crate::report::Report;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the report goes.
#[derive(Debug)]
pub struct StatsFile {
    file: File,
    /// The name to take and the one to give up for it; none for what is no regular file (a
    /// terminal, a pipe), which is written as it is.
    rename: Option<Rename>,
}

#[derive(Debug)]
struct Rename {
    temporary: PathBuf,
    target: PathBuf,
}

impl StatsFile {
    /// Makes sure that the report can be written there.
    pub fn open(path: &Path) -> Result<StatsFile, Failure> {
        Self::try_open(path).map_err(|error| {
            Failure::own(format!(
                "--stats {}: cannot be written: {error}",
                path.display()
            ))
        })
    }

    fn try_open(path: &Path) -> io::Result<StatsFile> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if !found.is_file() => {
                let file = OpenOptions::new().write(true).open(path)?;
                return Ok(StatsFile { file, rename: None });
            }
            _ => {}
        }
        // Through a symbolic link, so that it stays one.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".memfold-{}", std::process::id()));
        let temporary = target.with_file_name(temporary);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)?;
        Ok(StatsFile {
            file,
            rename: Some(Rename { temporary, target }),
        })
    }

    /// Writes the report under its name, in one step as seen from outside.
    pub fn write(mut self, report: &Report) -> io::Result<()> {
        let mut document = serde_json::to_vec_pretty(report)?;
        document.push(b'\n');
        self.file.write_all(&document)?;
        if let Some(Rename { temporary, target }) = &self.rename {
            fs::rename(temporary, target)?;
            self.rename = None;
        }
        Ok(())
    }
}

impl Drop for StatsFile {
    /// Not written: nothing stays behind.
    fn drop(&mut self) {
        if let Some(Rename { temporary, .. }) = &self.rename {
            let _ = fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Figures;
    use memfold_pager::Stats;

    fn report() -> Report {
        let figures = Figures::new(&Stats::default(), 0.0, 0);
        Report {
            exit_code: 3,
            signal: None,
            wall_seconds: 0.5,
            figures,
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
        StatsFile::open(Path::new("/dev/null"))
            .unwrap()
            .write(&report())
            .unwrap();
    }
}
