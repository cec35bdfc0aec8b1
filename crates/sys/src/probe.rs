//! What the host allows, tried rather than guessed, and the command that fixes each gap.
//!
//! [`requirements`] is what supervised programs cannot do without; it takes well under a
//! millisecond and is asked before a program is started. [`notes`] is what a user may want to
//! know besides. [`memory_allowance`] is what a percentage is a percentage of.
//!
//! All functions may be called from any thread. They open and close descriptors of their own and
//! change nothing of the process.

mod cgroup;
mod huge;
mod move_bugs;
mod mover;
mod newer;
mod place;
mod remedy;
mod try_move;

use crate::memory::check_page_size;
use crate::owned_uffd::{self, borrow};
use crate::process::{own_id, own_user, pidfd_of, proc_text};
use crate::uffd::{
    FEATURE_EVENT_FORK, FEATURE_EVENT_REMAP, FEATURE_EVENT_REMOVE, FEATURE_EVENT_UNMAP,
    FEATURE_MOVE, FEATURE_SIGBUS, FEATURE_THREAD_ID, FEATURE_WRITE_PROTECT, open_device,
};
use crate::{Errno, PAGE_SIZE};
use rustix::process::{DumpableBehavior, Resource, getrlimit};
use std::fs;
use std::os::unix::fs::FileExt;

pub use move_bugs::{Forbidden, Managed, MoveBugs, WITH_MOVE, bugs_of, known_bugs, move_bugs};
pub use mover::{Mover, mover};
pub use try_move::WITHOUT_MOVE;

use place::Place;

pub use cgroup::{Allowance, AllowanceSource, Hierarchy, memory_allowance, memory_hierarchies};

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is there.
    Ok,
    /// It is not, and programs cannot be supervised without it.
    Missing,
    /// Worth knowing; nothing depends on it.
    Note,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// Its name, stable across versions.
    pub name: &'static str,
    /// The outcome.
    pub verdict: Verdict,
    /// What was found, in one line.
    pub found: String,
    /// What fixes it: a command where there is one, in one line.
    pub remedy: Option<String>,
}

impl Check {
    /// Something that is there.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check {
            name,
            verdict: Verdict::Ok,
            found: found.into(),
            remedy: None,
        }
    }

    /// Something that is missing, and what fixes it.
    pub fn missing(
        name: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        let remedy = Some(remedy.into());
        Check {
            name,
            verdict: Verdict::Missing,
            found: found.into(),
            remedy,
        }
    }

    /// Something worth knowing.
    pub fn note(name: &'static str, found: impl Into<String>, remedy: Option<&str>) -> Check {
        let remedy = remedy.map(str::to_owned);
        Check {
            name,
            verdict: Verdict::Note,
            found: found.into(),
            remedy,
        }
    }
}

/// The userfaultfd features that supervision is built on beside the moving of pages, and their names.
const FEATURES: [(u64, &str); 6] = [
    (FEATURE_WRITE_PROTECT, "PAGEFAULT_FLAG_WP"),
    (FEATURE_EVENT_FORK, "EVENT_FORK"),
    (FEATURE_EVENT_REMAP, "EVENT_REMAP"),
    (FEATURE_EVENT_REMOVE, "EVENT_REMOVE"),
    (FEATURE_EVENT_UNMAP, "EVENT_UNMAP"),
    (FEATURE_THREAD_ID, "THREAD_ID"),
];

/// Linux 5.14 brought the last of what memfold cannot do without (`MADV_POPULATE_WRITE`).
const NEWER_KERNEL: &str = "boot Linux 5.14 or newer";
/// Linux 6.8 brought `UFFDIO_MOVE`.
const KERNEL_THAT_MOVES: &str = "boot Linux 6.8 or newer";
const CONTAINER_SECCOMP: &str = "run the container with a seccomp profile that allows it, as Docker's default one does; \
     docs/containers.md has the commands";

/// What supervised programs cannot do without. All of it is there when no verdict is
/// [`Verdict::Missing`].
#[must_use]
pub fn requirements() -> Vec<Check> {
    let page_size = page_size();
    if page_size.verdict == Verdict::Missing {
        // The others try pages of that size.
        return vec![kernel(), page_size];
    }
    let mut checks = vec![kernel(), page_size, create()];
    if owned_uffd::create().is_ok() {
        checks.extend([features(), mover::check()]);
    }
    checks.extend([forks(), read_memory(), process_descriptors()]);
    checks.push(child_lists());
    checks
}

/// What is worth knowing besides.
#[must_use]
pub fn notes() -> Vec<Check> {
    vec![
        library(),
        container(),
        seccomp(),
        memlock(),
        addresses(),
        memory_limit(),
        host_swap(),
        huge::programs(),
        huge::pool(),
        move_bugs::check(),
        newer::check(),
    ]
}

/// Whether its version is enough, the other checks find out: distributions bring features to older kernels.
fn kernel() -> Check {
    let release = read_line("/proc/sys/kernel/osrelease").unwrap_or_default();
    Check::ok("kernel", format!("Linux {release}"))
}

fn page_size() -> Check {
    const NAME: &str = "page-size";
    match check_page_size() {
        Ok(()) => Check::ok(NAME, format!("{PAGE_SIZE} bytes")),
        Err(error) => Check::missing(NAME, error.to_string(), "boot a kernel with 4 KiB pages"),
    }
}

fn create() -> Check {
    const NAME: &str = "userfaultfd";
    let allowed_to_all = read_line("/proc/sys/vm/unprivileged_userfaultfd").as_deref() == Some("1");
    let device = open_device().is_ok();
    match owned_uffd::create() {
        Ok(_) if is_root() || allowed_to_all || device => {
            let by = match allowed_to_all {
                true => "vm.unprivileged_userfaultfd is 1",
                _ if has_capability(CAP_SYS_PTRACE) => "by CAP_SYS_PTRACE",
                _ => "/dev/userfaultfd opens",
            };
            Check::ok(NAME, format!("may be created ({by})"))
        }
        Ok(_) => Check::missing(
            NAME,
            "memfold may create a userfaultfd, the programs it starts may not",
            granting(),
        ),
        Err(Errno(libc::ENOSYS)) => Check::missing(
            NAME,
            "the kernel has no userfaultfd, or a container hides it",
            format!("use a kernel with CONFIG_USERFAULTFD=y; {}", granting()),
        ),
        Err(_) if has_capability(CAP_SYS_PTRACE) || allowed_to_all => Check::missing(
            NAME,
            "refused by a seccomp filter (Docker's default profile has one), and /dev/userfaultfd does not open",
            granting(),
        ),
        Err(_) => Check::missing(
            NAME,
            "a userfaultfd that serves the kernel's faults is not permitted to this user",
            granting(),
        ),
    }
}

/// [`device_remedy`] with what its grantor should know.
fn granting() -> String {
    format!("{}. {}", device_remedy(), remedy::BEFORE_GRANTING)
}

fn device_remedy() -> String {
    let error = open_device().err().unwrap_or(Errno(libc::EACCES));
    remedy::device_remedy(place::place(), error)
}

/// What gives this user, root or not, a folder for runs, where none can hold them.
#[must_use]
pub fn folder_remedy(is_root: bool) -> String {
    remedy::folder_remedy(place::place(), is_root)
}

fn features() -> Check {
    const NAME: &str = "userfaultfd-features";
    match owned_uffd::create().and_then(|uffd| borrow(&uffd).api(0)) {
        Ok(has) => {
            let lacks: Vec<&str> = FEATURES
                .iter()
                .filter(|(bit, _)| has & bit == 0)
                .map(|&(_, name)| name)
                .collect();
            if lacks.is_empty() {
                let names: Vec<&str> = FEATURES.iter().map(|&(_, name)| name).collect();
                Check::ok(NAME, names.join(" "))
            } else {
                Check::missing(NAME, format!("lacks {}", lacks.join(" ")), NEWER_KERNEL)
            }
        }
        Err(errno) => Check::missing(NAME, format!("the handshake failed: {errno}"), NEWER_KERNEL),
    }
}

/// Whether the kernel reports forks to this process, with the rights that are raised now: the handshake that asks for it
/// takes `CAP_SYS_PTRACE`, of the host's first user namespace. Being root in a container is not enough.
#[must_use]
pub fn reports_forks() -> bool {
    owned_uffd::create().is_ok_and(|uffd| borrow(&uffd).api(FEATURE_EVENT_FORK).is_ok())
}

/// Where it does not, the programs' library prepares forks, with system calls that the kernel hands to it.
fn forks() -> Check {
    const NAME: &str = "forks";
    if reports_forks() {
        return Check::ok(NAME, "reported by the kernel (CAP_SYS_PTRACE)");
    }
    if cfg!(target_arch = "x86_64") && dispatches_system_calls() {
        return Check::ok(
            NAME,
            "prepared by the programs' library (no capability needed)",
        );
    }
    let remedy = remedy::ptrace_remedy(place::place());
    if cfg!(target_arch = "x86_64") {
        return Check::missing(
            NAME,
            "this kernel does not dispatch system calls to user space, by which forks are followed without CAP_SYS_PTRACE",
            format!("boot a kernel that does (Linux 5.11 or newer), or: {remedy}"),
        );
    }
    Check::missing(
        NAME,
        "not reported to this user: without CAP_SYS_PTRACE memfold follows them on x86-64 only",
        remedy,
    )
}

/// Whether the kernel has syscall user dispatch. It is turned on for the calling thread, with all allowed, and off.
fn dispatches_system_calls() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    // SAFETY: all addresses may make system calls, and without a selector byte none is dispatched before it is off.
    unsafe {
        let on = libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0, usize::MAX >> 1, 0);
        let off = libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0);
        on == 0 && off == 0
    }
}

/// Programs' memory is read through `/proc/PID/mem`, which takes the rights of ptrace.
fn read_memory() -> Check {
    const NAME: &str = "read-memory";
    let word = 0x5eed_u64;
    let mut copy = [0; size_of::<u64>()];
    let read = fs::File::open("/proc/self/mem")
        .and_then(|memory| memory.read_exact_at(&mut copy, (&raw const word) as u64));
    // That of memfold itself is root's where it has a file capability; programs' is not.
    let is_of_root = rustix::process::dumpable_behavior()
        .is_ok_and(|behavior| behavior != DumpableBehavior::Dumpable);
    if let Err(error) = read {
        if is_of_root && error.kind() == std::io::ErrorKind::PermissionDenied {
            return ptrace_scope(NAME);
        }
        return Check::missing(
            NAME,
            format!("/proc/self/mem: {error}"),
            "mount /proc, with nothing over /proc/PID/mem",
        );
    }
    if u64::from_ne_bytes(copy) != word {
        return Check::missing(
            NAME,
            "/proc/self/mem has other contents",
            "use a kernel of Linux itself",
        );
    }
    ptrace_scope(NAME)
}

/// Yama's setting, the rest of [`read_memory`].
fn ptrace_scope(name: &'static str) -> Check {
    match read_line("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        Some("3") => Check::missing(
            name,
            "kernel.yama.ptrace_scope is 3: no process may read another's memory",
            "boot with kernel.yama.ptrace_scope=1 in /etc/sysctl.d (3 cannot be lowered)",
        ),
        Some("2") if !has_capability(CAP_SYS_PTRACE) => Check::missing(
            name,
            "kernel.yama.ptrace_scope is 2: reading another process's memory takes CAP_SYS_PTRACE",
            "sudo sysctl -w kernel.yama.ptrace_scope=1   (until the next boot; in /etc/sysctl.d to keep it)",
        ),
        _ => Check::ok(name, "works"),
    }
}

fn process_descriptors() -> Check {
    const NAME: &str = "pidfd";
    match pidfd_of(own_id()) {
        Ok(_) => Check::ok(NAME, "works"),
        Err(error) => Check::missing(NAME, format!("pidfd_open: {error}"), CONTAINER_SECCOMP),
    }
}

/// By these memfold finds what a program leaves running, which it must not leave behind.
fn child_lists() -> Check {
    const NAME: &str = "child-lists";
    // That of the main thread is there as long as this process lives.
    let path = format!("/proc/self/task/{}/children", std::process::id());
    match fs::read_to_string(&path) {
        Ok(_) => Check::ok(NAME, "works"),
        Err(error) => Check::missing(
            NAME,
            format!("{path}: {error}"),
            "mount /proc, and use a kernel with CONFIG_PROC_CHILDREN=y (distributions' have it)",
        ),
    }
}

/// Which of its modes the library chooses here; see the `memfold` crate.
fn library() -> Check {
    const NAME: &str = "library-mode";
    let features = owned_uffd::create_for_user_mode()
        .or_else(|_| owned_uffd::create())
        .and_then(|uffd| borrow(&uffd).api(FEATURE_SIGBUS));
    match (features, owned_uffd::create()) {
        (Ok(has), _) if has & FEATURE_MOVE == 0 => Check::note(
            NAME,
            "signal, pages being moved by mremap; no thread mode, which needs UFFDIO_MOVE",
            Some(KERNEL_THAT_MOVES),
        ),
        (Ok(_), Ok(_)) => Check::note(NAME, "signal; thread mode is possible too", None),
        (Ok(_), Err(_)) => Check::note(
            NAME,
            "signal; no thread mode, which serves system calls on regions",
            Some(&device_remedy()),
        ),
        (Err(errno), _) => Check::note(
            NAME,
            format!("protection, the slow one: no userfaultfd with SIGBUS ({errno})"),
            Some(&match errno.0 {
                libc::EPERM => device_remedy(),
                _ => NEWER_KERNEL.to_owned(),
            }),
        ),
    }
}

fn container() -> Check {
    Check::note("container", place::place().name(), None)
}

fn seccomp() -> Check {
    let filtered = status_field("Seccomp:").is_some_and(|mode| mode.trim() != "0");
    let found = if filtered {
        "a seccomp filter is in force"
    } else {
        "no seccomp filter"
    };
    Check::note("seccomp", found, None)
}

fn memlock() -> Check {
    if may_lock_memory() {
        return Check::note("memlock", "memfold may lock its own memory", None);
    }
    let bytes = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    Check::note(
        "memlock",
        format!(
            "at most {} KiB may be locked: the host may swap memfold out",
            bytes / 1024
        ),
        Some(match place::place() {
            Place::Docker => "docker run --ulimit memlock=-1 …",
            Place::Podman => "podman run --ulimit memlock=-1 …",
            _ => "ulimit -l unlimited   (as root, or in /etc/security/limits.conf)",
        }),
    )
}

/// What may leave the pool with fewer addresses than it likes.
fn addresses() -> Check {
    const NAME: &str = "addresses";
    if read_line("/proc/sys/vm/overcommit_memory").as_deref() == Some("2") {
        return Check::note(
            NAME,
            "vm.overcommit_memory is 2: the pool's address space counts as committed, and may be refused",
            Some("sudo sysctl -w vm.overcommit_memory=0   (or give a small --limit)"),
        );
    }
    if let Some(bytes) = getrlimit(Resource::As).maximum {
        return Check::note(
            NAME,
            format!("limited to {} MiB for each process", bytes >> 20),
            Some("ulimit -v unlimited   (or give a small --limit)"),
        );
    }
    Check::note(NAME, "not limited", None)
}

/// Whether this process may lock any amount of memory.
#[must_use]
pub fn may_lock_memory() -> bool {
    has_capability(CAP_IPC_LOCK) || getrlimit(Resource::Memlock).current.is_none()
}

fn memory_limit() -> Check {
    let found = match memory_allowance() {
        Ok(Allowance {
            bytes,
            source: AllowanceSource::Host,
        }) => {
            format!("{} MiB, the host's memory (no cgroup limit)", bytes >> 20)
        }
        Ok(Allowance {
            bytes,
            source: AllowanceSource::Cgroup(path),
        }) => {
            format!(
                "{} MiB, the limit of the cgroup {}",
                bytes >> 20,
                path.display()
            )
        }
        Err(error) => format!("unknown: {error}"),
    };
    Check::note("memory-allowed", found, None)
}

/// How many swap areas the host has. 0 if `/proc/swaps` cannot be read.
pub fn swap_areas() -> usize {
    // One line of headings, and one for each.
    let lines = proc_text("/proc/swaps").unwrap_or_default().lines().count();
    lines.saturating_sub(1)
}

fn host_swap() -> Check {
    Check::note("host-swap", with_swap_areas(swap_areas()), None)
}

fn with_swap_areas(count: usize) -> String {
    match count {
        0 => "the host has no swap".to_owned(),
        1 => "the host has one swap area; memfold works beside it".to_owned(),
        count => format!("the host has {count} swap areas; memfold works beside them"),
    }
}

const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_PTRACE: u32 = 19;

fn has_capability(number: u32) -> bool {
    status_field("CapEff:")
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> number & 1 == 1)
}

fn is_root() -> bool {
    own_user() == 0
}

fn status_field(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix(name).map(str::to_owned))
}

fn read_line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_areas_are_counted_in_english() {
        assert!(with_swap_areas(0).ends_with("no swap"));
        assert!(with_swap_areas(1).contains("one swap area; "));
        assert!(with_swap_areas(2).contains("2 swap areas; "));
    }

    #[test]
    fn every_gap_comes_with_its_remedy() {
        for check in requirements() {
            assert_eq!(
                check.verdict == Verdict::Missing,
                check.remedy.is_some(),
                "{check:?}"
            );
            assert!(!check.found.contains('\n'), "{check:?}");
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = requirements()
            .into_iter()
            .chain(notes())
            .map(|check| check.name)
            .collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
