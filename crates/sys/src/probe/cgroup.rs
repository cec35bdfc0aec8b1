//! How much memory the host and the enclosing cgroups allow this process.

use crate::process::{named_bytes, proc_text};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What sets the allowance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowanceSource {
    /// The host's memory.
    Host,
    /// A cgroup's limit: its folder.
    Cgroup(PathBuf),
}

/// How much memory this process may use, at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes.
    pub bytes: u64,
    /// Where the limit is from.
    pub source: AllowanceSource,
}

/// The host's memory, or the tightest limit among the cgroups (version 1 or 2) around this
/// process if that is less.
///
/// # Errors
/// When the host's memory cannot be read from `/proc/meminfo`.
pub fn memory_allowance() -> io::Result<Allowance> {
    let host = named_bytes(&fs::read_to_string("/proc/meminfo")?, "MemTotal")
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemTotal"))?;
    let mut least = Allowance {
        bytes: host,
        source: AllowanceSource::Host,
    };
    for hierarchy in memory_hierarchies() {
        for folder in hierarchy.folders() {
            let file = folder.join(hierarchy.limit_file);
            let Some(bytes) = fs::read_to_string(file)
                .ok()
                .and_then(|text| limit_bytes(&text))
            else {
                continue;
            };
            if bytes < least.bytes {
                least = Allowance {
                    bytes,
                    source: AllowanceSource::Cgroup(folder),
                };
            }
        }
    }
    Ok(least)
}

/// A limit file's number; none where it says "max". (Version 1 says a huge number then.)
fn limit_bytes(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// A mounted cgroup hierarchy that may count memory, and where this process is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// The folder of this process's group.
    pub folder: PathBuf,
    /// The name of the file that holds a group's limit: `memory.max` (version 2) or
    /// `memory.limit_in_bytes` (version 1).
    pub limit_file: &'static str,
}

/// The mounted cgroup hierarchies that have, or in version 2 may have, a memory controller.
#[must_use]
pub fn memory_hierarchies() -> Vec<Hierarchy> {
    let mounts = proc_text("/proc/self/mountinfo").unwrap_or_default();
    let cgroups = proc_text("/proc/self/cgroup").unwrap_or_default();
    hierarchies(&mounts, &cgroups)
}

impl Hierarchy {
    /// The process's folder and all above it, down to the mount point.
    fn folders(&self) -> Vec<PathBuf> {
        self.folder
            .ancestors()
            .take_while(|folder| folder.starts_with(&self.mount_point))
            .map(Path::to_owned)
            .collect()
    }
}

fn hierarchies(mounts: &str, cgroups: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((mount, file_system)) = line.split_once(" - ") else {
            continue;
        };
        let mount: Vec<&str> = mount.split(' ').collect();
        let (Some(root), Some(mount_point)) = (mount.get(3), mount.get(4)) else {
            continue;
        };
        let mut file_system = file_system.split(' ');
        let (limit_file, path) = match (file_system.next(), file_system.nth(1)) {
            (Some("cgroup2"), _) => ("memory.max", path_in(cgroups, str::is_empty)),
            (Some("cgroup"), Some(options)) if options.split(',').any(|one| one == "memory") => (
                "memory.limit_in_bytes",
                path_in(cgroups, |names| names.split(',').any(|one| one == "memory")),
            ),
            _ => continue,
        };
        let Some(path) = path else { continue };
        // In a container the mount's root is the container's own cgroup, and the process's path
        // may be told from the host's root or from there.
        let below = Path::new(path)
            .strip_prefix(unescaped(root))
            .unwrap_or_else(|_| Path::new(path).strip_prefix("/").unwrap_or(Path::new("")));
        let mount_point = PathBuf::from(unescaped(mount_point));
        // Joined to nothing, a path would end in a slash.
        let folder = if below.as_os_str().is_empty() {
            mount_point.clone()
        } else {
            mount_point.join(below)
        };
        found.push(Hierarchy {
            mount_point,
            folder,
            limit_file,
        });
    }
    found
}

/// A path of `/proc/self/mountinfo`, in which the kernel writes spaces, tabs, newlines and backslashes as a
/// backslash and three octal digits.
fn unescaped(path: &str) -> String {
    let mut parts = path.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3);
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// The path of the line of `/proc/self/cgroup` whose controllers are the wanted ones.
fn path_in(cgroups: &str, wanted: impl Fn(&str) -> bool) -> Option<&str> {
    cgroups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        wanted(controllers).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_is_found() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = hierarchies(mounts, "0::/user.slice/session-1.scope\n");
        assert_eq!(found.len(), 1);
        assert_eq!(
            found[0].folders(),
            [
                "/sys/fs/cgroup/user.slice/session-1.scope",
                "/sys/fs/cgroup/user.slice",
                "/sys/fs/cgroup",
            ]
            .map(PathBuf::from)
        );
        assert_eq!(found[0].limit_file, "memory.max");
    }

    #[test]
    fn version_1_in_a_container_is_found() {
        let mounts = "\
            40 30 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
            41 30 0:31 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n";
        let found = hierarchies(mounts, "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].folders(), [PathBuf::from("/sys/fs/cgroup/memory")]);
        assert_eq!(found[0].folder.as_os_str(), "/sys/fs/cgroup/memory");
        assert_eq!(found[0].limit_file, "memory.limit_in_bytes");
    }

    #[test]
    fn spaces_in_paths_are_decoded() {
        let mounts = "30 23 0:26 /my\\040pods /mnt/a\\134b\\011c rw - cgroup2 cgroup2 rw\n";
        let found = hierarchies(mounts, "0::/my pods/one\n");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].folder, PathBuf::from("/mnt/a\\b\tc/one"));
        assert_eq!(unescaped("/no\\9 escape\\"), "/no\\9 escape\\");
    }

    #[test]
    fn limits_are_read() {
        assert_eq!(limit_bytes("max\n"), None);
        assert_eq!(limit_bytes("1048576\n"), Some(1 << 20));
        assert_eq!(
            named_bytes("MemTotal:       24000000 kB\nMemFree: 1 kB\n", "MemTotal"),
            Some(24_576_000_000)
        );
    }

    #[test]
    fn this_host_allows_something() {
        let allowance = memory_allowance().unwrap();
        assert!(allowance.bytes >= 16 << 20, "{allowance:?}");
    }
}
