//! Bringing the preload library into a program that no loader brought it into: a static one, or one that runs already.
//!
//! A thread of the program is stopped by ptrace and made to map the library's file, is sent into it (`entry.rs` of the
//! agent) on a stack of its own, which starts the helper as the loader's call does, and goes on as it was. The
//! helper then says hello like any other, and proves itself like any other.
//!
//! Another thread of the program may have taken the descriptor's number meanwhile, so the program may have mapped
//! another file: what it mapped is compared with the library before anything of it runs.

mod confirm;
mod detach;
mod fork_sites;
mod forked;
mod image;
mod late;
mod lead;
mod place;
mod tracer;
mod trampoline;

use crate::supervised::group::Group;
use crate::supervised::helper::guests::Guests;
use crate::supervised::helper::patched::Patched;
use crate::supervised::space::AddressSpace;
pub use detach::DetachError;
pub(crate) use forked::ForkedChild;
use image::{Access, Fixup, Image, Segment};
pub(crate) use late::Haste;
use lead::Forks;
use memfold_sys::PAGE_SIZE;
use memfold_sys::deadline;
use memfold_sys::hello::{FORK_ENTRY, READY, STARTS_LATE_AT, TOO_EARLY, brought};
use memfold_sys::privilege;
use memfold_sys::process::{MapsLine, Process};
use memfold_sys::raw::nr;
use memfold_sys::tracee::Tracee;
use place::Place;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracer::by_any_thread;

/// A program could not be brought under the limit while it runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// This process may not trace it.
    #[error(
        "memfold may not trace it: it belongs to another user, has more rights, is traced by another program, or \
         kernel.yama.ptrace_scope forbids it; start memfold as root, or the program with memfold run"
    )]
    NotPermitted,
    /// It has filters of its own.
    #[error(
        "it filters its own system calls (seccomp), so memfold makes none in its name; start it with memfold run"
    )]
    Filtered,
    /// The kernel dispatches its system calls to itself.
    #[error(
        "it handles the system calls of its threads itself (PR_SET_SYSCALL_USER_DISPATCH), as Wine may have it, so memfold makes \
         none in its name; try again while it sleeps"
    )]
    Dispatched,
    /// It may fork in a way that is not known, and the kernel does not report forks to this process.
    #[error(
        "memfold would not see it fork, as it has several threads, or makes the system call in a way that memfold does not \
         know, or memfold has not started it; start memfold with CAP_SYS_PTRACE (see memfold doctor), or use a dynamically \
         linked build and memfold run"
    )]
    ForksUnseen,
    /// It is held by this memfold or another one.
    #[error("memfold's library is in it already; memfold detach lets it go")]
    Held,
    /// It runs 32-bit code.
    #[error("it is not a 64-bit program; use a 64-bit build to have it held")]
    NotSixtyFourBit,
    /// It is stopped.
    #[error("it is stopped, or a debugger holds it; let it go on first")]
    Stopped,
    /// Its mappings cannot be read.
    #[error("it has more mappings, or longer paths of mapped files, than memfold reads")]
    TooManyMappings,
    /// No thread of it could be stopped in time.
    #[error("none of its threads could be stopped; try again")]
    Busy,
    /// The library's file is not there for it.
    #[error(
        "it has another root folder, in which memfold's library is not; start memfold in there"
    )]
    OtherRoot,
    /// The library could not set itself up.
    #[error(
        "it may not use userfaultfd, or has no room for a thread or a descriptor; see memfold doctor"
    )]
    Refused,
    /// It has ended.
    #[error("it has ended")]
    Gone,
    /// Something else failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The library of a run, for programs without a loader.
#[derive(Debug)]
pub(crate) struct Library {
    path: PathBuf,
    file: Vec<u8>,
    image: Image,
    /// Where in the file the supervisor says when helpers start, which it does again and again.
    switch_at: u64,
}

/// Brings programs under a supervisor's limit while they run, and lets them go.
#[derive(Clone)]
pub struct Attacher {
    library: Arc<Library>,
    guests: Arc<Guests>,
    group: Arc<Group>,
}

impl std::fmt::Debug for Attacher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attacher").finish_non_exhaustive()
    }
}

impl Attacher {
    pub(crate) fn new(library: Arc<Library>, guests: Arc<Guests>, group: Arc<Group>) -> Attacher {
        Attacher {
            library,
            guests,
            group,
        }
    }

    /// Brings a process under the limit; it need not descend from this one. Takes milliseconds, and may take
    /// seconds where the process's threads cannot be stopped. Any thread may call this.
    ///
    /// # Errors
    /// See [`AttachError`]: the program is as it was.
    pub fn attach(&self, process: &Arc<Process>) -> Result<(), AttachError> {
        privilege::give_up_in_thread()?;
        let _tracing = self.guests.trace();
        if self.group.stopping.load(Ordering::Relaxed) {
            return Err(AttachError::Gone);
        }
        if self.has_helper(process.pid()) {
            return Err(AttachError::Held);
        }
        self.library.examine(process)?;
        let found = self.library.find(process)?;
        if let Some(start) = found {
            if self.is_forked_unseen(process, start) {
                return self.join(process, start, Haste::Interrupts);
            }
            match self.library.start_loaded(process, start, Haste::Interrupts) {
                // The library that is left where a helper was let go starts none.
                Err(AttachError::Refused) if self.group.released.covers(process) => {}
                started => return started,
            }
        }
        let leads_forks = self.group.resources.prepares_forks() && !is_made_by_go(process)?;
        // A child whose parent has ended is known by its descent alone.
        if leads_forks && !process.descends_from_here()? {
            return Err(AttachError::ForksUnseen);
        }
        self.guests.invite(process);
        let injected = self.library.inject(process, leads_forks, found);
        let injected = injected.map(|start| {
            // Else it stays when the program is let go, as where a loader brought it: forks come into it.
            if !leads_forks {
                self.guests.note_library(process, start);
            }
        });
        self.invited(process, injected)?;
        self.group.released.remove(process);
        Ok(())
    }

    /// What became of a process that was invited: where no helper came, the invitation is taken back.
    fn invited(
        &self,
        process: &Process,
        started: Result<(), AttachError>,
    ) -> Result<(), AttachError> {
        started.or_else(|error| {
            // It may have been let in all the same, late.
            if self.has_helper(process.pid()) {
                return Ok(());
            }
            self.guests.forget(process);
            Err(error)
        })
    }

    /// Whether the program with this PID has, or had, a helper.
    fn has_helper(&self, pid: i32) -> bool {
        let space = self.space_of(pid);
        space.is_some_and(|space| space.attached().is_some())
    }

    /// The address space of the program with this PID.
    fn space_of(&self, pid: i32) -> Option<Arc<AddressSpace>> {
        let is_it = |space: &&Arc<AddressSpace>| {
            let inspector = space.inspector();
            !space.has_left() && inspector.is_some_and(|inspector| inspector.pid() == pid)
        };
        self.group.spaces().iter().find(is_it).cloned()
    }

    /// Whether a process was attached and not detached since.
    pub fn holds(&self, process: &Process) -> bool {
        self.guests.includes(process)
    }
}

/// How long the helper may take to be admitted. Longer keeps a thread of the program from its work.
const ADMISSION: Duration = Duration::from_secs(10);

const PROT_NONE: u64 = 0;
const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;

impl Library {
    /// The library at `path`. `None` if it cannot be brought into a program.
    pub(crate) fn new(path: &Path, patched: Patched) -> Option<Library> {
        Some(Library {
            path: path.to_owned(),
            image: Image::parse(&patched.image)?,
            file: patched.image,
            switch_at: (patched.place + STARTS_LATE_AT) as u64,
        })
    }

    /// What is in its file.
    pub(crate) fn file(&self) -> &[u8] {
        &self.file
    }

    /// Brings the library into a program, where it was `found` or not, and starts its helper. Takes some milliseconds; the
    /// program's other threads run on. Returns where the library is.
    fn inject(
        self: &Arc<Self>,
        process: &Arc<Process>,
        leads_forks: bool,
        found: Option<u64>,
    ) -> Result<u64, AttachError> {
        let (library, stopped) = (self.clone(), process.clone());
        by_any_thread(process, move |tracee| {
            library.confirm(&stopped, found)?;
            let forks = leads_forks.then(|| library.find_forks(&stopped, tracee));
            library.inject_by(&stopped, tracee, forks.transpose()?)
        })
    }

    fn inject_by(
        &self,
        process: &Process,
        tracee: &mut Tracee,
        forks: Option<Forks>,
    ) -> Result<u64, AttachError> {
        let place = Place::reserve(process, tracee, self.image.length)?;
        self.map(tracee, &place)
            .inspect_err(|_| place.free(tracee))?;
        let how = if forks.is_some() {
            brought::WITH_FORK_SITES
        } else {
            brought::BY_SUPERVISOR
        };
        let target = place.start + self.image.entry + FORK_ENTRY;
        let led = forks.map(|forks| forks.lead(tracee, target)).transpose();
        let led = led.inspect_err(|_| place.free(tracee))?;
        let entered = self.enter(tracee, (place.start, how), &place.stack);
        match &entered {
            // What is not needed any more.
            Ok(()) => place.free_stack(tracee),
            Err(AttachError::Refused) => {
                // No other thread runs, so none is in there.
                let left = led.map_or(Ok(()), |led| led.leave(tracee));
                if left.is_ok() {
                    place.free(tracee);
                }
            }
            // A helper may run.
            Err(_) => {}
        }
        entered.map(|()| place.start)
    }

    /// What rules it out.
    fn examine(&self, process: &Process) -> Result<(), AttachError> {
        // The main thread may have ended before others.
        let living = process.living_thread();
        match living.and_then(|thread| process.state(thread)) {
            Some('T' | 't') => return Err(AttachError::Stopped),
            None | Some('Z' | 'X') => return Err(AttachError::Gone),
            _ => {}
        }
        // The library alone may be left of an earlier memfold.
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let is_helper = |thread: &i32| {
            let name = process.text(&format!("task/{thread}/comm"));
            name.is_ok_and(|name| name == "memfold\n")
        };
        if has_mapping(process, |line| line.name.contains(&*name))?
            && process.threads().iter().any(is_helper)
        {
            return Err(AttachError::Held);
        }
        Ok(())
    }

    /// Maps the segments, and writes what depends on the address.
    fn map(&self, tracee: &mut Tracee, place: &Place) -> Result<(), AttachError> {
        const AT_FDCWD: u64 = -100_i64 as u64;
        const O_RDONLY_CLOEXEC: u64 = 0o2_000_000;
        let mut path = self.path.as_os_str().as_bytes().to_vec();
        path.push(0);
        tracee.write(place.stack.start, &path)?;
        let arguments = [AT_FDCWD, place.stack.start, O_RDONLY_CLOEXEC, 0, 0, 0];
        let file = tracee
            .call(nr::OPENAT, arguments)
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => AttachError::OtherRoot,
                _ => error.into(),
            })?;
        let mapped = self
            .image
            .segments
            .iter()
            .try_for_each(|segment| map_segment(tracee, place.start, file, segment));
        tracee.call(nr::CLOSE, [file, 0, 0, 0, 0, 0])?;
        mapped?;
        for segment in &self.image.segments {
            self.compare(tracee, place.start, segment)?;
        }
        for fixup in &self.image.fixups {
            let (at, word) = match *fixup {
                Fixup::Relative { place: at, addend } => (at, place.start.wrapping_add(addend)),
                Fixup::Absent { place: at } => (at, 0),
            };
            tracee.write(place.start + at, &word.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Whether the program has mapped what it was to map; empties what lies behind that in the last page.
    fn compare(&self, tracee: &Tracee, start: u64, segment: &Segment) -> Result<(), AttachError> {
        let mut found = vec![0; (segment.file.end - segment.file.start) as usize];
        if found.is_empty() {
            return Ok(());
        }
        tracee.read(start + segment.file.start, &mut found)?;
        let begins = segment.offset + segment.file.start % PAGE_SIZE as u64;
        let wanted = self.file.get(begins as usize..).unwrap_or_default();
        if let Some(at) = self.switch_at.checked_sub(begins) {
            let word = at as usize..at as usize + size_of::<u32>();
            if let (Some(found), Some(wanted)) = (found.get_mut(word.clone()), wanted.get(word)) {
                found.copy_from_slice(wanted);
            }
        }
        if !wanted.starts_with(&found) {
            return Err(
                io::Error::other("it has mapped another file than memfold's library").into(),
            );
        }
        if segment.access == Access::Write {
            let page = PAGE_SIZE as u64;
            let rest = segment.file.end.div_ceil(page) * page - segment.file.end;
            tracee.write(start + segment.file.end, &vec![0; rest as usize])?;
        }
        Ok(())
    }

    /// Has the thread start the helper.
    fn enter(
        &self,
        tracee: &mut Tracee,
        (start, how): (u64, u64),
        stack: &Range<u64>,
    ) -> Result<(), AttachError> {
        let entry = (start + self.image.entry, how);
        // Half of the register.
        match tracee.run(entry, stack.end, ADMISSION)? as u32 {
            READY => Ok(()),
            TOO_EARLY => Err(AttachError::Busy),
            _ => Err(AttachError::Refused),
        }
    }
}

/// Whether a mapping of a process is meant.
fn has_mapping(
    process: &Process,
    is_meant: impl Fn(MapsLine<'_>) -> bool,
) -> Result<bool, AttachError> {
    let found = process.find_mapping(|line| is_meant(line).then_some(()));
    Ok(found.map_err(unreadable)?.is_some())
}

/// Why mappings could not be read.
fn unreadable(error: io::Error) -> AttachError {
    match error.kind() {
        io::ErrorKind::FileTooLarge => AttachError::TooManyMappings,
        _ => AttachError::NotPermitted,
    }
}

/// Whether Go's linker made what the process executes now, which may be on a file system that does not answer.
fn is_made_by_go(process: &Arc<Process>) -> Result<bool, AttachError> {
    /// Headers and notes are in it.
    const HEAD: u64 = 1 << 16;
    /// Longer keeps other programs from being attached.
    const PATIENCE: Duration = Duration::from_millis(500);
    let user = process.user().map_err(|_| AttachError::Gone)?;
    let process = process.clone();
    let read = move || -> io::Result<Vec<u8>> {
        let mut head = Vec::new();
        let file = process.open_living("exe")?;
        file.take(HEAD).read_to_end(&mut head)?;
        Ok(head)
    };
    let read = deadline::within(user, PATIENCE, read);
    let head = read.ok_or_else(|| io::Error::other("its executable cannot be read in time"))?;
    Ok(head.is_ok_and(|head| image::is_go(&head)))
}

fn map_segment(
    tracee: &mut Tracee,
    start: u64,
    file: u64,
    segment: &Segment,
) -> Result<(), AttachError> {
    const FIXED: i32 = libc::MAP_PRIVATE | libc::MAP_FIXED;
    let page = PAGE_SIZE as u64;
    let access = match segment.access {
        Access::Read => PROT_READ,
        Access::Execute => PROT_READ | PROT_EXEC,
        Access::Write => PROT_READ | PROT_WRITE,
    };
    let pages = shifted(&segment.pages, start);
    let of_file = if segment.file.is_empty() {
        0
    } else {
        segment.file.end.div_ceil(page) * page - segment.pages.start
    };
    if of_file > 0 {
        let arguments = [
            pages.start,
            of_file,
            access,
            FIXED as u64,
            file,
            segment.offset,
        ];
        tracee.call(nr::MMAP, arguments)?;
    }
    let rest = pages.end - pages.start - of_file;
    if rest > 0 {
        let flags = (FIXED | libc::MAP_ANONYMOUS) as u64;
        let arguments = [pages.start + of_file, rest, access, flags, u64::MAX, 0];
        tracee.call(nr::MMAP, arguments)?;
    }
    Ok(())
}

fn protect(tracee: &mut Tracee, pages: &Range<u64>, access: u64) -> io::Result<()> {
    let arguments = [pages.start, pages.end - pages.start, access, 0, 0, 0];
    tracee.call(nr::MPROTECT, arguments).map(|_| ())
}

fn shifted(range: &Range<u64>, start: u64) -> Range<u64> {
    start + range.start..start + range.end
}
