//! Leading a program's forks into the library, where the kernel does not report them and no loader brought the library.
//!
//! The code of the program's C library is changed where it forks, while all threads are stopped. It stays so: see
//! `trampoline.rs`.

use super::fork_sites::{ForkSites, LOAD, OVERLAP};
use super::place::{Mapping, free_below};
use super::trampoline::{self, MOST_SITES, Trampolines};
use super::{AttachError, Library, PROT_EXEC, PROT_READ, PROT_WRITE, halt, protect};
use memfold_sys::PAGE_SIZE;
use memfold_sys::hello::FORK_ENTRY;
use memfold_sys::process::Process;
use memfold_sys::raw::nr;
use memfold_sys::tracee::Tracee;
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How long each of the other threads may take to stop.
const STOPPING: Duration = Duration::from_millis(200);

/// Where a program forks.
#[derive(Debug, Default)]
pub(super) struct Forks {
    /// In each part of the code.
    fresh: Vec<(Range<u64>, ForkSites)>,
    /// The trampolines that are there.
    led: Vec<Trampolines>,
}

impl Library {
    /// Finds where a program forks, for [`lead_forks`](Library::lead_forks).
    ///
    /// # Errors
    /// `ForksUnseen` where it may fork in a way that is not known.
    pub(super) fn find_forks(
        &self,
        process: &Process,
        tracee: &Tracee,
    ) -> Result<Forks, AttachError> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(AttachError::ForksUnseen);
        }
        let forks = self.look_for_forks(process, tracee)?;
        let is_known =
            |(_, found): &(_, ForkSites)| !found.has_unknown && found.sites.len() <= MOST_SITES;
        if forks.fresh.iter().all(is_known) {
            Ok(forks)
        } else {
            Err(AttachError::ForksUnseen)
        }
    }

    fn look_for_forks(&self, process: &Process, tracee: &Tracee) -> Result<Forks, AttachError> {
        let mut forks = Forks::default();
        let own = self.path.to_string_lossy();
        let mappings = Mapping::all(process)?.into_iter();
        let of_program = |one: &Mapping| one.code_of.as_ref().is_some_and(|path| *path != own);
        for code in mappings.filter(of_program) {
            let found = look_through(tracee, &code.range)?;
            for &(site, target) in &found.jumps {
                let trampolines = Trampolines::around(target);
                let mut page = vec![0; PAGE_SIZE];
                let is_ours = tracee.read(trampolines.plain(), &mut page).is_ok()
                    && trampolines.has_stub(site, target, &page);
                if is_ours && !forks.led.contains(&trampolines) {
                    forks.led.push(trampolines);
                }
            }
            forks.fresh.push((code.range.clone(), found));
        }
        Ok(forks)
    }

    /// Leads forks into the library at `start`. Where this fails they may be led there all the same: see
    /// [`leave_forks`](Library::leave_forks).
    pub(super) fn lead_forks(
        &self,
        process: &Arc<Process>,
        tracee: &mut Tracee,
        (forks, start): (Forks, u64),
    ) -> Result<(), AttachError> {
        let mut jumps = Vec::new();
        let mut all = forks.led;
        for (code, found) in &forks.fresh {
            if found.sites.is_empty() {
                continue;
            }
            let trampolines = make_trampolines(process, tracee, (code, found))?;
            for (number, site) in found.sites.iter().enumerate() {
                let jump = trampolines.jump(number, site);
                jumps.push((site.address, jump.ok_or(AttachError::ForksUnseen)?));
            }
            all.push(trampolines);
        }
        let target = start + self.image.entry + FORK_ENTRY;
        let sites: Vec<u64> = jumps.iter().map(|(site, _)| *site).collect();
        let _stopped = stop_between_forks(process, tracee, (&sites, &all))?;
        for (site, jump) in jumps {
            tracee.write(site, &jump)?;
        }
        for trampolines in all {
            tracee.write(trampolines.target(), &target.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Has forks be made without the library from now on.
    ///
    /// # Errors
    /// `Busy` if a thread is in the library for a fork.
    pub(super) fn leave_forks(
        &self,
        process: &Arc<Process>,
        tracee: &Tracee,
    ) -> Result<(), AttachError> {
        let forks = self.look_for_forks(process, tracee)?;
        let _stopped = stop_others(process, tracee)?;
        for trampolines in &forks.led {
            let plain = trampolines.plain();
            tracee.write(trampolines.target(), &plain.to_ne_bytes())?;
        }
        if is_any_inside(tracee, &forks.led)? {
            return Err(AttachError::Busy);
        }
        Ok(())
    }
}

/// Looks through code.
fn look_through(tracee: &Tracee, code: &Range<u64>) -> Result<ForkSites, AttachError> {
    /// Bytes that are looked through at a time.
    const PART: u64 = 4 << 20;
    let mut found = ForkSites::default();
    let mut start = code.start;
    while start < code.end {
        let known = (start - code.start).min(OVERLAP as u64);
        let end = code.end.min(start + PART);
        let mut part = vec![0; (end - start + known) as usize];
        tracee.read(start - known, &mut part)?;
        found.look(&part, start - known, known as usize);
        start = end;
    }
    Ok(found)
}

/// Makes the trampolines of some code. They call nothing of the library's as yet.
fn make_trampolines(
    process: &Process,
    tracee: &mut Tracee,
    (code, found): (&Range<u64>, &ForkSites),
) -> Result<Trampolines, AttachError> {
    /// How often other threads may take the addresses.
    const TRIES: u32 = 5;
    let mut tries = 1;
    loop {
        let mappings = Mapping::all(process)?;
        match make(tracee, &mappings, (code, found)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < TRIES => {
                tries += 1;
            }
            made => return Ok(made?),
        }
    }
}

/// The same beside these mappings. `AlreadyExists` if there are new ones.
fn make(
    tracee: &mut Tracee,
    mappings: &[Mapping],
    (code, found): (&Range<u64>, &ForkSites),
) -> io::Result<Trampolines> {
    const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let no_room = || io::Error::other("there is no room near its code");
    let start = free_below(mappings, code, trampoline::LENGTH).ok_or_else(no_room)?;
    let pages = Trampolines(start);
    let bytes = pages.code(&found.sites).ok_or_else(no_room)?;
    let access = PROT_READ | PROT_WRITE;
    let arguments = [start, trampoline::LENGTH, access, FLAGS as u64, u64::MAX, 0];
    let mapped = tracee.call(nr::MMAP, arguments)?;
    let mut fill = || -> io::Result<()> {
        if mapped != start {
            return Err(no_room());
        }
        tracee.write(pages.plain(), &bytes)?;
        tracee.write(pages.target(), &pages.plain().to_ne_bytes())?;
        let code = pages.plain()..start + trampoline::LENGTH;
        protect(tracee, &code, PROT_READ | PROT_EXEC)
    };
    if let Err(error) = fill() {
        let _ = tracee.call(nr::MUNMAP, [mapped, trampoline::LENGTH, 0, 0, 0, 0]);
        return Err(error);
    }
    Ok(pages)
}

/// Stops all threads of a process but one that is stopped, while none of them forks: what is begun before memory is managed
/// is made without the library.
fn stop_between_forks(
    process: &Arc<Process>,
    stopped: &Tracee,
    (sites, led): (&[u64], &[Trampolines]),
) -> Result<Vec<Tracee>, AttachError> {
    /// How often, and how long apart, it is tried. More keeps a thread from its work that is in a fork itself.
    const TRIES: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(1);
    // Past the number, or in a call that is made again.
    let is_at_site = |thread: &Tracee| {
        let is_at =
            |site: &u64| (1..=LOAD as u64 + 2).contains(&thread.place().wrapping_sub(*site));
        sites.iter().any(is_at)
    };
    for _ in 0..TRIES {
        let others = stop_others(process, stopped)?;
        let is_any_at_site = others.iter().chain([stopped]).any(is_at_site);
        if !is_any_at_site && !is_any_inside(stopped, led)? {
            return Ok(others);
        }
        drop(others);
        std::thread::sleep(PAUSE);
    }
    Err(AttachError::Busy)
}

/// Whether a thread is between a stub and its end.
fn is_any_inside(tracee: &Tracee, led: &[Trampolines]) -> Result<bool, AttachError> {
    for trampolines in led {
        let mut count = [0; size_of::<u64>()];
        tracee.read(trampolines.inside(), &mut count)?;
        if u64::from_ne_bytes(count) != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Stops all threads of a process but one that is stopped. They go on when the result is dropped.
fn stop_others(process: &Arc<Process>, stopped: &Tracee) -> Result<Vec<Tracee>, AttachError> {
    let mut others = Vec::new();
    let mut seen = HashSet::from([stopped.thread()]);
    loop {
        let mut threads = process.threads();
        threads.retain(|thread| seen.insert(*thread));
        if threads.is_empty() {
            return Ok(others);
        }
        for thread in threads {
            match halt(process, thread, STOPPING) {
                Ok(other) => others.push(other),
                // It has ended, perhaps the main thread.
                Err(AttachError::Gone) => {}
                Err(error) => return Err(error),
            }
        }
    }
}
