//! Starting the helper of a program that its loader brought the library into, once that is worth it.
//!
//! Until then nothing of memfold's runs in such a program. A thread of it is stopped by ptrace and sent into the library, as
//! in a program that is attached.

use super::tracer::by_one_of;
use super::{AttachError, Attacher, Library, Place, has_mapping};
use memfold_sys::hello::brought;
use memfold_sys::process::{self, MapsLine, Process};
use memfold_sys::tracee::Tracee;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a thread may take to stop: longer delays the start of others.
const STOPPING: Duration = Duration::from_millis(20);

/// Which threads may be sent to start a helper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Haste {
    /// Those that run.
    Waits,
    /// Those that sleep in a system call as well, which is made again then, with its whole timeout.
    Interrupts,
}

impl Attacher {
    /// Starts the helper of a process below this one, whose loader has brought the library. `Busy` if no thread of it can
    /// be sent now, `Gone` if it has ended or the library is not there.
    pub(crate) fn start_late(
        &self,
        process: &Arc<Process>,
        haste: Haste,
    ) -> Result<(), AttachError> {
        let _tracing = self.guests.trace();
        if self.group.stopping.load(Ordering::Relaxed) || !process.descends_from_here()? {
            return Err(AttachError::Gone);
        }
        let start = self.library.find(process)?.ok_or(AttachError::Gone)?;
        self.library.examine(process)?;
        if self.is_forked_unseen(process, start) {
            return self.join(process, start, haste);
        }
        self.library.start_loaded(process, start, haste)
    }
}

impl Library {
    /// Where the loader has mapped the library in a process; none if it has not.
    pub(super) fn find(&self, process: &Process) -> Result<Option<u64>, AttachError> {
        let path = self.path.to_string_lossy();
        let found = Cell::new(None);
        has_mapping(process, |line| {
            found.set(start_of_image(&line, &path));
            found.get().is_some()
        })?;
        Ok(found.get())
    }

    /// Has a thread start the helper by the library, which was found at `start`. What is there is compared with it, so the
    /// thread is sent nowhere in a program that was executed since: that may have more rights than the one that said where
    /// the library is. Other threads may change the code afterwards, and have the thread run what the program could run
    /// anyway.
    pub(super) fn start_loaded(
        self: &Arc<Self>,
        process: &Arc<Process>,
        start: u64,
        haste: Haste,
    ) -> Result<(), AttachError> {
        let (library, stopped) = (self.clone(), process.clone());
        by_thread_in(process, haste, move |tracee| {
            // It cannot execute anything from here on, as long as this thread of it is stopped and goes on afterwards.
            if !library.is_at(&stopped, start)? {
                return Err(AttachError::Gone);
            }
            library.compare_code(tracee, start)?;
            let how = if process::is_fork(stopped.pid()) {
                brought::BY_FORK
            } else {
                brought::BY_LOADER
            };
            library.start_by(&stopped, tracee, (start, how))
        })
    }

    pub(super) fn start_by(
        &self,
        process: &Process,
        tracee: &mut Tracee,
        image: (u64, u64),
    ) -> Result<(), AttachError> {
        let place = Place::reserve(process, tracee, 0)?;
        let entered = self.enter(tracee, image, &place.stack);
        if matches!(
            entered,
            Ok(()) | Err(AttachError::Busy | AttachError::Refused)
        ) {
            place.free(tracee);
        }
        // Else a helper may come to run, and uses what is on the stack.
        entered
    }
}

/// Stops a thread that may be sent now, and does something by it.
pub(super) fn by_thread_in(
    process: &Arc<Process>,
    haste: Haste,
    work: impl Fn(&mut Tracee) -> Result<(), AttachError> + Send + Sync + 'static,
) -> Result<(), AttachError> {
    let mut threads = Vec::new();
    let mut sleeping = Vec::new();
    for thread in process.threads() {
        match process.state(thread) {
            Some('R') => threads.push(thread),
            Some('S') => sleeping.push(thread),
            // In a system call that nothing interrupts, as the parent of a `vfork` is, or at its end.
            _ => {}
        }
    }
    if haste == Haste::Interrupts {
        threads.append(&mut sleeping);
    }
    if threads.is_empty() {
        return Err(AttachError::Busy);
    }
    by_one_of(process, &threads, STOPPING, work)
}

/// The first address of a mapping, if that is of the first page of a file.
fn start_of_image(line: &MapsLine<'_>, path: &str) -> Option<u64> {
    (line.offset == 0 && line.name.ends_with(path)).then_some(line.range.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervised::helper::patched::Patched;
    use std::path::Path;
    use std::process::Command;

    /// Bytes of a file that has a page of headers and one of code.
    fn library_file() -> Vec<u8> {
        const CODE: u64 = 0x1000;
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        // A shared object of any machine.
        file.extend([3, 0, 0, 0, 1, 0, 0, 0]);
        let words = |file: &mut Vec<u8>, words: &[u64]| {
            words
                .iter()
                .for_each(|word| file.extend(word.to_le_bytes()));
        };
        // Entry, program headers, no section headers.
        words(&mut file, &[CODE, 64, 0]);
        file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        // To be loaded, read and executed.
        file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
        words(&mut file, &[CODE, CODE, CODE, 4, 4, CODE]);
        file.resize(CODE as usize + 4, 0);
        file
    }

    #[test]
    fn no_thread_is_sent_to_where_another_program_had_the_library() {
        let patched = Patched {
            image: library_file(),
            place: 0,
        };
        let library = Library::new(Path::new("/run/memfold/libmemfold.so"), patched);
        let library = Arc::new(library.unwrap());
        let mut child = Command::new("/bin/sleep").arg("0.5").spawn().unwrap();
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let start = || library.start_loaded(&process, 0x10_0000, Haste::Interrupts);
        // It may just be executed.
        let mut started = start();
        while matches!(started, Err(AttachError::Busy)) {
            std::thread::sleep(Duration::from_millis(1));
            started = start();
        }
        assert!(matches!(started, Err(AttachError::Gone)), "{started:?}");
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn an_image_starts_where_its_files_first_page_is() {
        let path = "/run/memfold/libmemfold.so";
        for (addresses, offset, name, start) in [
            ("7f00d0000000-7f00d0002000", 0, path, Some(0x7f00_d000_0000)),
            ("7f00d0002000-7f00d0004000", 0x2000, path, None),
            ("7f00d0000000-7f00d0002000", 0, "/lib/libc.so.6", None),
        ] {
            let line = format!("{addresses} r--p {offset:08x} 00:1b 42    {name}");
            let line = MapsLine::parse(&line).unwrap();
            assert_eq!(start_of_image(&line, path), start, "{line:?}");
        }
    }
}
