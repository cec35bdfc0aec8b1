//! Leading a program's forks into the library, where the kernel does not report them and no loader brought the library.
//!
//! The code of the program's C library is changed where it forks, while the program's one thread is stopped. It stays
//! so: see `trampoline.rs`.

use super::fork_sites::{ForkSites, LOAD, OVERLAP};
use super::place::{Mapping, free_below};
use super::trampoline::{self, MOST_SITES, Trampolines};
use super::{AttachError, Library, PROT_EXEC, PROT_READ, PROT_WRITE, protect};
use memfold_sys::process::Process;
use memfold_sys::raw::nr;
use memfold_sys::tracee::Tracee;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

/// What is looked through of a program at most: it may map a file as often as it likes. The program stands still meanwhile.
const MOST_BYTES: u64 = 1 << 30;
const MOST_TIME: Duration = Duration::from_secs(3);
/// Mappings that may have sites.
const MOST_LED: usize = 16;

/// Where a program forks.
#[derive(Debug, Default)]
pub(super) struct Forks {
    mappings: Vec<Mapping>,
    /// In each part of the code that does.
    found: Vec<(Range<u64>, ForkSites)>,
}

/// The trampolines of a program whose forks are led into the library.
#[derive(Debug, Default)]
pub(super) struct Led(Vec<Trampolines>);

impl Library {
    /// Finds where a program forks.
    ///
    /// # Errors
    /// `ForksUnseen` where it may fork in a way that is not known, or has other threads, which may fork just now or run what is
    /// changed.
    pub(super) fn find_forks(
        &self,
        process: &Process,
        tracee: &Tracee,
    ) -> Result<Forks, AttachError> {
        let is_alone = process.threads() == [tracee.thread()];
        if cfg!(not(target_arch = "x86_64")) || !is_alone {
            return Err(AttachError::ForksUnseen);
        }
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let mut forks = Forks {
            mappings: Mapping::all(process)?,
            ..Forks::default()
        };
        let began = Instant::now();
        let mut bytes = 0;
        for code in forks.mappings.iter().filter(|one| one.is_executable) {
            // Of a run that has ended, perhaps.
            if code.name.contains(&*name) || code.is_kernels() {
                continue;
            }
            bytes += code.range.end - code.range.start;
            if !code.is_of_file || bytes > MOST_BYTES || began.elapsed() > MOST_TIME {
                return Err(AttachError::ForksUnseen);
            }
            let found = look_through(tracee, &code.range)?;
            if !found.sites.is_empty() {
                forks.found.push((code.range.clone(), found));
            }
            if forks.found.len() > MOST_LED {
                return Err(AttachError::ForksUnseen);
            }
        }
        let is_at_site = |(_, found): &(_, ForkSites)| found.is_about_to_fork(tracee.place());
        if forks.found.iter().any(is_at_site) {
            return Err(AttachError::Busy);
        }
        Ok(forks)
    }
}

/// A jump in the place of a site's first instruction, and where that is.
type Jump = (u64, [u8; LOAD]);

impl Forks {
    /// Leads forks to a function of the library. The program is as it was where this fails, or has pages that make the call
    /// and nothing else.
    pub(super) fn lead(self, tracee: &mut Tracee, target: u64) -> Result<Led, AttachError> {
        let mut led = Led::default();
        let jumps = self.make_trampolines(tracee, &mut led);
        let jumps = jumps.inspect_err(|_| led.free(tracee))?;
        if let Err(error) = led.patch(tracee, &jumps, target) {
            led.leave(tracee)?;
            return Err(error.into());
        }
        Ok(led)
    }

    fn make_trampolines(self, tracee: &mut Tracee, led: &mut Led) -> io::Result<Vec<Jump>> {
        let mut mappings = self.mappings;
        let mut jumps = Vec::new();
        for (code, found) in &self.found {
            let trampolines = make(tracee, &mut mappings, (code, found))?;
            led.0.push(trampolines);
            for (number, site) in found.sites.iter().enumerate() {
                let jump = trampolines.jump(number, site);
                jumps.push((site.address, jump.ok_or_else(no_room)?));
            }
        }
        Ok(jumps)
    }
}

impl Led {
    /// Has the program's code jump to the stubs, and these call `target`.
    fn patch(&self, tracee: &Tracee, jumps: &[Jump], target: u64) -> io::Result<()> {
        for (site, jump) in jumps {
            tracee.write(*site, jump)?;
        }
        let target = target.to_ne_bytes();
        let mut all = self.0.iter();
        all.try_for_each(|trampolines| tracee.write(trampolines.target(), &target))
    }

    /// Unmaps them, as nothing jumps there yet.
    fn free(&self, tracee: &mut Tracee) {
        for made in &self.0 {
            let _ = tracee.call(nr::MUNMAP, [made.0, trampoline::LENGTH, 0, 0, 0, 0]);
        }
    }

    /// Has forks be made without the library from now on.
    pub(super) fn leave(&self, tracee: &Tracee) -> io::Result<()> {
        self.0.iter().try_for_each(|trampolines| {
            let plain = trampolines.plain().to_ne_bytes();
            tracee.write(trampolines.target(), &plain)
        })
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
        if found.has_unknown || found.sites.len() > MOST_SITES {
            return Err(AttachError::ForksUnseen);
        }
        start = end;
    }
    Ok(found)
}

fn no_room() -> io::Error {
    io::Error::other("there is no room near its code")
}

/// Makes the trampolines of some code, and adds them to the mappings. They call nothing of the library's as yet.
fn make(
    tracee: &mut Tracee,
    mappings: &mut Vec<Mapping>,
    (code, found): (&Range<u64>, &ForkSites),
) -> io::Result<Trampolines> {
    const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
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
    mappings.push(Mapping::at(start..start + trampoline::LENGTH));
    mappings.sort_unstable_by_key(|one| one.range.start);
    Ok(pages)
}
