//! A memory cgroup for one run, of version 1 or 2, whichever the host mounts.

use std::{
    fs::OpenOptions,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, bail};
use memfold_sys::probe::memory_hierarchies;

use super::{Change, Guardian, Undo, read, require_root, undo::PREFIX, write};

/// A memory cgroup. Dropping it kills its processes and removes it.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
    version: Version,
    _group: Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl MemoryGroup {
    /// Creates a cgroup with a memory limit of `limit` bytes; `None` only accounts.
    ///
    /// # Errors
    /// Without root, and if no memory controller is mounted.
    pub fn start(guardian: &Guardian, limit: Option<u64>) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        require_root("a memory cgroup")?;
        let (version, parent) = find()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
        let (group, ()) = guardian.change(&Undo::RemoveGroup(path.clone()), || {
            std::fs::create_dir(&path).with_context(|| format!("cgroup {}", path.display()))
        })?;
        let group = Self {
            path,
            version,
            _group: group,
        };
        if let Some(limit) = limit {
            group.set_limit(limit)?;
        }
        Ok(group)
    }

    /// Sets the limit; the kernel reclaims the excess before this returns.
    pub fn set_limit(&self, bytes: u64) -> Result<()> {
        let file = match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        };
        write(self.path.join(file), &bytes.to_string())
    }

    /// Makes `command` join the cgroup before exec.
    pub fn run_here(&self, command: &mut Command) -> Result<()> {
        let members = self.path.join("cgroup.procs");
        let mut members = OpenOptions::new()
            .write(true)
            .open(&members)
            .with_context(|| format!("cannot open {}", members.display()))?;
        // SAFETY: between fork and exec the closure only writes to an open descriptor, which is
        // async-signal-safe and does not allocate.
        unsafe { command.pre_exec(move || members.write_all(b"0\n")) };
        Ok(())
    }

    /// Whether zswap's pool is charged to the cgroup.
    pub fn charges_zswap(&self) -> bool {
        self.version == Version::Two
    }

    /// Number of OOM kills in the cgroup.
    pub fn kills(&self) -> Result<u64> {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        let text = read(self.path.join(file))?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.unwrap_or("0").trim().parse().context("oom_kill")
    }

    /// Faults that waited for a page to be read.
    pub fn major_faults(&self) -> Result<u64> {
        let text = read(self.path.join("memory.stat"))?;
        let count = text
            .lines()
            .find_map(|line| line.strip_prefix("pgmajfault "));
        count
            .context("pgmajfault")?
            .trim()
            .parse()
            .context("pgmajfault")
    }

    /// Anonymous memory now, in bytes: of what is charged, the kind that memfold's limits count.
    pub fn anonymous(&self) -> Result<u64> {
        let text = read(self.path.join("memory.stat"))?;
        let name = match self.version {
            Version::One => "total_rss",
            Version::Two => "anon",
        };
        number(&text, name).with_context(|| format!("memory.stat has no {name}"))
    }

    /// Peak of the charged bytes, page cache and kernel memory included.
    pub fn peak(&self) -> Result<u64> {
        let file = match self.version {
            Version::One => "memory.max_usage_in_bytes",
            Version::Two => "memory.peak",
        };
        Ok(read(self.path.join(file))?.parse()?)
    }
}

/// The mount point of the memory controller. The cgroup is created directly below it: in version 2
/// a cgroup with processes cannot enable controllers for its children.
fn find() -> Result<(Version, PathBuf)> {
    for hierarchy in memory_hierarchies() {
        let root = hierarchy.mount_point;
        if hierarchy.limit_file == "memory.limit_in_bytes" {
            return Ok((Version::One, root));
        }
        if has_memory(&root.join("cgroup.controllers")) {
            let subtree = root.join("cgroup.subtree_control");
            if !has_memory(&subtree) {
                // Not disabled afterwards: other cgroups may rely on it by then.
                write(&subtree, "+memory")?;
            }
            return Ok((Version::Two, root));
        }
    }
    bail!("no memory cgroup controller is mounted: mount cgroup2 with the memory controller")
}

/// A number of a file with a name and a number a line.
fn number(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

fn has_memory(file: &Path) -> bool {
    read(file).is_ok_and(|text| text.split_whitespace().any(|name| name == "memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_by_its_whole_name() {
        let text = "anon_thp 4096\nanon 8192\nfile 1";
        assert_eq!(number(text, "anon"), Some(8192));
        assert_eq!(number(text, "an"), None);
    }
}
