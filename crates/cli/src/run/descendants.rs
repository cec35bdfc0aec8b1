//! The processes below memfold, and which of them it holds.
//!
//! The supervisor knows the processes that connected to it. One that did not (a static program, one with
//! more privileges, one whose environment was cleared) is found by scanning `/proc` now and then, and attached if it can be.
//! As memfold is the subreaper of all it started, none of them can leave its tree.

use super::attachments::Attachments;
use super::unmanaged::{self, Reason};
use crate::format::name_of;
use memfold_pager::AttachError;
use memfold_sys::deadline;
use memfold_sys::is_shortage;
use memfold_sys::privilege;
use memfold_sys::process::{self, Process};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a program image may take to load the library and connect. A process that exits sooner without
/// having connected goes unseen.
pub const GRACE: Duration = Duration::from_millis(800);

/// How long a process may take to be attached.
const ATTACHMENT: Duration = Duration::from_secs(15);

/// How long a process's executable and environment are waited for, which may lie in a FUSE file system. Longer
/// holds up the loop that takes signals.
const PATIENCE: Duration = Duration::from_millis(500);

/// A program image in a process: exec makes a new one.
#[derive(Debug)]
struct Image {
    started: u64,
    executable: Option<PathBuf>,
    /// When it was first seen, or last seen to be connected.
    since: Instant,
    standing: Standing,
    /// Whether it was under the limit at an earlier look.
    was_managed: bool,
}

/// What is known of an image that has not connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Nothing yet.
    New,
    /// It has a loader, which may bring the library.
    Interpreted,
    /// It is being attached, as no loader brings the library.
    Attaching,
    /// It is outside the limit.
    Unmanaged,
}

/// A process that was found to be outside the limit.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its PID.
    pub pid: i32,
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: Reason,
}

/// What the supervisor knows of the processes below memfold.
#[derive(Debug, Default)]
pub struct Known {
    /// Processes that have connected.
    pub managed: Vec<i32>,
    /// Small ones, which connect later if they grow, among others that are as small.
    pub waiting: Vec<i32>,
    /// memfold's own.
    pub guardian: Option<i32>,
    /// Descriptors were missing while those may have connected that are judged now.
    pub is_short: bool,
}

/// The tree below memfold as it was last looked at.
#[derive(Debug)]
pub struct Descendants {
    root: i32,
    preload: PathBuf,
    images: HashMap<i32, Image>,
    /// None where programs are not attached.
    attachments: Option<Attachments>,
    unmanaged: u64,
    /// The largest resident memory of those outside the limit.
    peak_unmanaged_bytes: u64,
    /// At the last look each was managed, known not to be, or small.
    is_settled: bool,
}

impl Descendants {
    /// Of this process; `preload` is the library that managed programs load, and others are attached with.
    pub fn new(preload: &Path, attachments: Option<Attachments>) -> Descendants {
        let root = process::own_id();
        Descendants {
            root,
            preload: preload.to_owned(),
            images: HashMap::new(),
            attachments,
            unmanaged: 0,
            peak_unmanaged_bytes: 0,
            is_settled: false,
        }
    }

    /// The largest resident memory of processes outside the limit, as far as it was looked at.
    pub fn peak_unmanaged_bytes(&self) -> u64 {
        self.peak_unmanaged_bytes
    }

    /// How many program images were found to be outside the limit so far.
    pub fn unmanaged(&self) -> u64 {
        self.unmanaged
    }

    /// Whether time alone would change nothing of what the last look found.
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Adds one that ended before it could be looked at.
    pub fn count_unseen(&mut self) {
        self.unmanaged += 1;
    }

    /// The processes that need memfold, or that may still turn out to.
    pub fn held(&self) -> Vec<i32> {
        let held = self
            .images
            .iter()
            .filter(|(_, image)| image.standing != Standing::Unmanaged);
        held.map(|(&pid, _)| pid).collect()
    }

    /// All processes below memfold, however they came there.
    pub fn all(&self) -> Vec<i32> {
        self.images.keys().copied().collect()
    }

    /// Looks at the tree; returns those newly found outside the limit.
    pub fn look(&mut self, known: &Known) -> Vec<Finding> {
        let _raised = privilege::raised();
        self.look_at(process::below(self.root), known)
    }

    /// The same, with a single walk if that finds the processes of the last look. One that started since and came to
    /// another parent during the walk is found at the next look.
    pub fn glance(&mut self, known: &Known) -> Vec<Finding> {
        let _raised = privilege::raised();
        let processes = process::mostly_below(self.root);
        // A process that comes to another parent may be found twice.
        let mut found: HashSet<i32> = processes.iter().copied().collect();
        if let Some(guardian) = known.guardian {
            found.remove(&guardian);
        }
        let is_same =
            found.len() == self.images.len() && self.images.keys().all(|pid| found.contains(pid));
        if is_same {
            self.look_at(processes, known)
        } else {
            self.look_at(process::below(self.root), known)
        }
    }

    fn look_at(&mut self, processes: Vec<i32>, known: &Known) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut seen = HashMap::new();
        self.is_settled = true;
        for pid in processes {
            if known.guardian == Some(pid) {
                continue;
            }
            let Some(started) = process::living_since(pid) else {
                continue;
            };
            let mut image = self.image_of(pid, started);
            if known.managed.contains(&pid) {
                image.since = Instant::now();
                image.standing = Standing::Interpreted;
                image.was_managed = true;
                seen.insert(pid, image);
                continue;
            }
            if let Some(reason) = self.judge(pid, &mut image, known) {
                self.unmanaged += 1;
                image.standing = Standing::Unmanaged;
                let name = name_of(pid);
                findings.push(Finding { pid, name, reason });
            }
            self.is_settled &= match image.standing {
                Standing::New | Standing::Attaching => false,
                Standing::Interpreted => known.waiting.contains(&pid),
                Standing::Unmanaged => true,
            };
            seen.insert(pid, image);
        }
        if let Some(attachments) = &self.attachments {
            attachments.forget(|pid| !seen.contains_key(&pid));
        }
        self.images = seen;
        let unmanaged = self
            .images
            .iter()
            .filter(|(_, image)| image.standing == Standing::Unmanaged);
        let resident = unmanaged.map(|(pid, _)| resident_bytes(*pid)).sum();
        self.peak_unmanaged_bytes = self.peak_unmanaged_bytes.max(resident);
        findings
    }

    /// Why an image that has not connected is outside the limit, if that is known by now. It is attached if that can be.
    fn judge(&self, pid: i32, image: &mut Image, known: &Known) -> Option<Reason> {
        if image.standing == Standing::New {
            let is_static = within(pid, move || unmanaged::is_static(pid));
            if !matches!(is_static, Ok(Some(true))) || !self.attach(pid, image)? {
                image.standing = Standing::Interpreted;
            }
        }
        match image.standing {
            Standing::Attaching if !is_ending(pid) => {
                self.judge_attachment(pid, image.since.elapsed())
            }
            Standing::Interpreted if image.since.elapsed() >= GRACE && !is_ending(pid) => {
                let (preload, is_short) = (self.preload.clone(), known.is_short);
                let reason = match within(pid, move || unmanaged::reason(pid, &preload, is_short)) {
                    Err(error) if is_shortage(&error) => Some(Reason::Descriptors),
                    reason => reason.ok().flatten(),
                };
                if reason == Some(Reason::Environment) && self.attach(pid, image)? {
                    return None;
                }
                let has_library = matches!(&reason, Some(reason) if reason.has_library());
                if has_library && known.waiting.contains(&pid) {
                    image.since = Instant::now();
                    return None;
                }
                Some(match reason.unwrap_or(Reason::Unseen) {
                    Reason::Refused | Reason::Forked | Reason::NotAttached(None)
                        if image.was_managed =>
                    {
                        Reason::Detached
                    }
                    reason => reason,
                })
            }
            _ => None,
        }
    }

    /// Why a process that has been attached for some time is outside the limit, if it is.
    fn judge_attachment(&self, pid: i32, elapsed: Duration) -> Option<Reason> {
        let attachments = self.attachments.as_ref()?;
        let is_late = elapsed >= ATTACHMENT;
        match attachments.take_failure(pid) {
            None if !is_late => None,
            // A child forked from a held program has its helper before that is connected; one that uses its parent's memory
            // executes a program soon.
            Some(AttachError::Held | AttachError::Busy | AttachError::Dispatched) if !is_late => {
                attachments.begin(pid);
                None
            }
            failed => Some(Reason::NotAttached(failed.map(|error| error.to_string()))),
        }
    }

    /// Begins to attach a process. Returns whether that is done at all; `None` if it is at a later look.
    fn attach(&self, pid: i32, image: &mut Image) -> Option<bool> {
        let Some(attachments) = &self.attachments else {
            return Some(false);
        };
        if !attachments.begin(pid) {
            return None;
        }
        image.standing = Standing::Attaching;
        image.since = Instant::now();
        Some(true)
    }

    /// The image as it is known, or a new one where the process or its program changed.
    fn image_of(&mut self, pid: i32, started: u64) -> Image {
        let executable = executable_of(pid);
        match self.images.remove(&pid) {
            Some(known) if known.started == started && known.executable == executable => known,
            _ => Image {
                started,
                executable,
                since: Instant::now(),
                standing: Standing::New,
                was_managed: false,
            },
        }
    }
}

/// What a process executes, by its name; the same once the file is removed or replaced, as an update does it. (To ask for
/// the file itself may take as long as a FUSE file system likes.)
fn executable_of(pid: i32) -> Option<PathBuf> {
    let name = fs::read_link(format!("{}/exe", process::living_folder(pid)))
        .ok()?
        .into_os_string();
    let mut name = name.into_vec();
    if let Some(kept) = name.strip_suffix(b" (deleted)") {
        name.truncate(kept.len());
    }
    Some(OsString::from_vec(name).into())
}

/// Resident memory of a process, of all kinds.
fn resident_bytes(pid: i32) -> u64 {
    let pages = process::sizes(pid).map_or(0, |sizes| sizes.resident_pages + sizes.shared_pages);
    pages * memfold_sys::PAGE_SIZE as u64
}

/// Looks at files of a process, whose program can hold that up; `None` if it does.
///
/// # Errors
/// If the process is gone, or descriptors are short.
fn within<T: Send + 'static>(
    pid: i32,
    look: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let user = Process::open(pid)?.user()?;
    Ok(deadline::within(user, PATIENCE, look))
}

/// Whether no thread of a process has memory any more. It may take long to end after that.
fn is_ending(pid: i32) -> bool {
    let Ok(process) = Process::open(pid) else {
        return true;
    };
    let mut sizes = process.threads().into_iter().filter_map(process::sizes);
    sizes.all(|sizes| sizes.mapped_pages == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_does_not_connect_in_time_is_found_once() {
        let mut child = Command::new("/bin/sleep").arg("30").spawn().unwrap();
        let pid = child.id() as i32;
        let mut descendants = Descendants::new(Path::new("/no/library"), None);
        descendants.look(&Known::default());
        descendants.images.get_mut(&pid).unwrap().since -= GRACE;
        descendants.look(&Known {
            managed: vec![pid],
            ..Known::default()
        });
        assert!(descendants.held().contains(&pid), "it has connected");
        descendants.images.get_mut(&pid).unwrap().since -= GRACE;
        let ours = |findings: Vec<Finding>| findings.iter().filter(|one| one.pid == pid).count();
        assert_eq!(ours(descendants.look(&Known::default())), 1);
        assert_eq!(ours(descendants.look(&Known::default())), 0);
        assert!(!descendants.held().contains(&pid) && descendants.all().contains(&pid));
        // It may only now be loaded.
        let deadline = Instant::now() + Duration::from_secs(10);
        while descendants.peak_unmanaged_bytes() <= 100_000 {
            assert!(Instant::now() < deadline, "no memory is seen");
            std::thread::sleep(Duration::from_millis(10));
            descendants.look(&Known::default());
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_without_memory_is_ending() {
        assert!(!is_ending(process::own_id()));
        let mut child = Command::new("/bin/sleep").arg("30").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(!is_ending(pid));
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_ending(pid) {
            assert!(Instant::now() < deadline, "a zombie has no memory");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait().unwrap();
    }

    #[test]
    fn a_program_whose_file_goes_away_is_found_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sleep");
        fs::copy("/bin/sleep", &file).unwrap();
        let mut child = started(&file);
        let pid = child.id() as i32;
        let mut descendants = Descendants::new(Path::new("/no/library"), None);
        let found = |descendants: &mut Descendants| {
            descendants.images.get_mut(&pid).unwrap().since -= GRACE;
            let findings = descendants.look(&Known::default());
            findings.iter().filter(|one| one.pid == pid).count()
        };
        descendants.look(&Known::default());
        assert_eq!(found(&mut descendants), 1);
        fs::remove_file(&file).unwrap();
        assert_eq!(found(&mut descendants), 0);
        assert_eq!(found(&mut descendants), 0, "it is the same program");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// A child that another test forks meanwhile may have a new file open for writing for a moment.
    fn started(file: &Path) -> std::process::Child {
        loop {
            match Command::new(file).arg("30").spawn() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
                child => return child.unwrap(),
            }
        }
    }

    #[test]
    fn a_glance_finds_what_starts_and_what_ends() {
        let start = || Command::new("/bin/sleep").arg("30").spawn().unwrap();
        let mut one = start();
        let mut descendants = Descendants::new(Path::new("/no/library"), None);
        descendants.glance(&Known::default());
        let mut other = start();
        let pids = [&one, &other].map(|child| child.id() as i32);
        let has = |descendants: &Descendants| pids.map(|pid| descendants.all().contains(&pid));
        assert_eq!(has(&descendants), [true, false]);
        for _ in 0..2 {
            descendants.glance(&Known::default());
            assert_eq!(has(&descendants), [true, true]);
        }
        descendants.glance(&Known {
            guardian: Some(pids[1]),
            ..Known::default()
        });
        assert_eq!(has(&descendants), [true, false]);
        for child in [&mut one, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        descendants.glance(&Known::default());
        assert_eq!(has(&descendants), [false, false]);
    }

    #[test]
    fn the_tree_reaches_grandchildren() {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "sleep 30 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        let grandchild: i32 = line.trim().parse().unwrap();
        let found = process::below(process::own_id());
        assert!(found.contains(&(child.id() as i32)), "{found:?}");
        assert!(found.contains(&grandchild), "{found:?}");
        let mut descendants = Descendants::new(Path::new("/no/library"), None);
        assert_eq!(
            descendants.look(&Known::default()),
            [],
            "too early to judge"
        );
        assert!(descendants.held().contains(&grandchild));
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(grandchild),
            nix::sys::signal::SIGKILL,
        )
        .unwrap();
        child.wait().unwrap();
        descendants.look(&Known::default());
        assert!(!descendants.held().contains(&grandchild));
    }
}
