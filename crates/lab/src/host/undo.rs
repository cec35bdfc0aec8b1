//! How changes to the host are undone. Each is idempotent, and a no-op if its change was never
//! made.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{read, retry, swap, write};

/// Prefix of the names of the lab's cgroups, swap files and folders.
pub const PREFIX: &str = "memfold-lab-";

/// How one change to the host is undone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// Kill the processes of a cgroup and remove it.
    RemoveGroup(PathBuf),
    /// swapoff of a device or file.
    StopSwapping(PathBuf),
    /// Reset a zram device and remove it.
    RemoveZram(u32),
    /// Write a sysfs file's former content back.
    WriteBack(PathBuf, String),
    /// Remove a file, or a folder recursively; its name must start with [`PREFIX`].
    Delete(PathBuf),
}

impl Undo {
    /// As one line of the journal.
    pub fn to_json(&self) -> Value {
        match self {
            Undo::RemoveGroup(path) => json!({ "remove_group": path }),
            Undo::StopSwapping(path) => json!({ "stop_swapping": path }),
            Undo::RemoveZram(number) => json!({ "remove_zram": number }),
            Undo::WriteBack(path, text) => json!({ "write_back": path, "text": text }),
            Undo::Delete(path) => json!({ "delete": path }),
        }
    }

    /// Parses what [`Undo::to_json`] wrote.
    pub fn from_json(value: &Value) -> Result<Self> {
        let path = |name: &str| value[name].as_str().map(PathBuf::from);
        if let Some(group) = path("remove_group") {
            return Ok(Undo::RemoveGroup(group));
        }
        if let Some(area) = path("stop_swapping") {
            return Ok(Undo::StopSwapping(area));
        }
        if let Some(number) = value["remove_zram"].as_u64() {
            return Ok(Undo::RemoveZram(u32::try_from(number)?));
        }
        if let (Some(file), Some(text)) = (path("write_back"), value["text"].as_str()) {
            return Ok(Undo::WriteBack(file, text.to_owned()));
        }
        let deleted =
            path("delete").with_context(|| format!("the journal has an unknown entry {value}"))?;
        Ok(Undo::Delete(deleted))
    }

    /// Undoes the change. Something that no longer exists is no error.
    pub fn apply(&self) -> Result<()> {
        match self {
            Undo::RemoveGroup(path) => remove_group(path),
            Undo::StopSwapping(path) => swap::stop(path),
            Undo::RemoveZram(number) => remove_zram(*number),
            Undo::WriteBack(path, text) => write(path, text),
            Undo::Delete(path) => delete(path),
        }
    }
}

fn remove_group(path: &Path) -> Result<()> {
    retry(|| {
        if !path.exists() {
            return Ok(());
        }
        for member in read(path.join("cgroup.procs"))?.lines() {
            let process: libc::pid_t = member.parse()?;
            // SAFETY: kill(2) touches no memory of this process; the cgroup lists the target.
            unsafe { libc::kill(process, libc::SIGKILL) };
        }
        std::fs::remove_dir(path)
            .with_context(|| format!("cannot remove cgroup {}", path.display()))
    })
}

fn remove_zram(number: u32) -> Result<()> {
    let folder = PathBuf::from(format!("/sys/block/zram{number}"));
    retry(|| {
        if !folder.exists() {
            return Ok(());
        }
        write(folder.join("reset"), "1")?;
        write("/sys/class/zram-control/hot_remove", &number.to_string())
    })
}

fn delete(path: &Path) -> Result<()> {
    let ours = path
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    ensure!(
        ours,
        "refusing to remove {}: its name does not start with {PREFIX}",
        path.display()
    );
    let removed = if path.is_dir() {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_file(path)
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
