//! Letting programs go that are under the limit: all of their memory comes back, and nothing of memfold's is left in them.
//!
//! With a program that was attached go the children that it forked, and theirs, as long as they executed no other program:
//! their memory is in part memfold's, and nothing but this process serves it. (Programs that a loader brought the library into
//! go alone: their children have helpers of their own.)

use super::tracer::by_any_thread;
use super::{AttachError, Attacher, Library};
use crate::page::{PageRange, VirtualPage, bytes};
use crate::range_set::RangeSet;
use crate::supervised::space::{AddressSpace, Arena};
use memfold_sys::Errno;
use memfold_sys::process::Process;
use memfold_sys::raw::nr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A program could not be let go.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DetachError {
    /// It is not under the limit.
    #[error("it is not under this limit; memfold top shows the programs that are (key p)")]
    NotHeld,
    /// It ended meanwhile, or executed another program.
    #[error("it has ended, or executed another program")]
    Gone,
    /// The supervisor is ending.
    #[error("memfold is ending")]
    Stopping,
}

/// How long other threads may refer to an address space that is let go.
const LAST_REFERENCE: Duration = Duration::from_secs(10);

/// How long it is tried to stop a thread to unmap the library. Longer delays the end of memfold where no thread can be stopped.
const LAST_TRY: Duration = Duration::from_secs(5);

/// Between two looks at what is on its way.
const STEP: Duration = Duration::from_millis(2);

/// A program that is being let go.
struct Leaving {
    space: Arc<AddressSpace>,
    process: Arc<Process>,
}

/// A program whose address space was forgotten.
struct Forgotten {
    id: u64,
    space: Weak<AddressSpace>,
    process: Arc<Process>,
    /// Unmapped with the library.
    arena: Vec<PageRange>,
    is_gone: bool,
}

/// What is let go together: an address space, and those that descend from it by fork if the library was brought there.
struct Tree {
    root: u64,
    library: Option<u64>,
    leaving: Vec<Leaving>,
    forgotten: Vec<Forgotten>,
}

impl Attacher {
    /// Brings all memory of the program with this PID back and lets it go, with the children that it forked if it was
    /// attached: nothing of memfold's runs in them any more. Waits until that is done, however long it takes; any thread
    /// may call this.
    ///
    /// A child that has never needed a page of memfold's is not waited for: it is let go when it does.
    ///
    /// # Errors
    /// See [`DetachError`].
    pub fn detach(&self, pid: i32) -> Result<(), DetachError> {
        let _detaching = self.guests.detach();
        let mut tree = self.begin_to_detach(pid)?;
        while !tree.leaving.is_empty() {
            if self.group.stopping.load(Ordering::Relaxed) {
                return Err(DetachError::Stopping);
            }
            std::thread::sleep(STEP);
            // What was forked before the memory of its parent was all back.
            self.let_go(&mut tree);
            self.drop_forgotten(&mut tree);
        }
        for one in &tree.forgotten {
            self.finish(one, tree.library);
        }
        let has_ended = |one: &Forgotten| one.id == tree.root && one.is_gone;
        if tree.forgotten.iter().any(has_ended) {
            return Err(DetachError::Gone);
        }
        Ok(())
    }

    /// The same for all programs whose process is known.
    pub fn detach_all(&self) {
        let spaces = self.group.spaces();
        let pids = spaces
            .iter()
            .filter_map(|space| Some(space.inspector()?.pid()));
        let pids: Vec<i32> = pids.collect();
        drop(spaces);
        for pid in pids {
            if let Err(error) = self.detach(pid) {
                log::debug!("process {pid} is not detached: {error}");
            }
        }
    }

    fn begin_to_detach(&self, pid: i32) -> Result<Tree, DetachError> {
        let space = self.space_of(pid).ok_or(DetachError::NotHeld)?;
        let inspector = space.inspector().ok_or(DetachError::NotHeld)?;
        let library = self.library_of(inspector.process());
        // A child that starts its helper itself relies on it.
        if space.attached().is_none() && library.is_none() {
            return Err(DetachError::NotHeld);
        }
        let mut tree = Tree {
            root: space.id,
            library,
            leaving: Vec::new(),
            forgotten: Vec::new(),
        };
        // No helper is being started meanwhile in what is asked for, nor later.
        let tracing = self.guests.trace();
        self.guests.note_detachment(&tracing);
        self.let_go(&mut tree);
        Ok(tree)
    }

    /// Where the library was brought to in a process, or in the one that it was forked from.
    fn library_of(&self, process: &Process) -> Option<u64> {
        let known = self.guests.library_in(process);
        known.or_else(|| {
            let start = self.library.find(process).ok()??;
            self.is_forked_from_guest(process, start).then_some(start)
        })
    }

    /// Asks for a tree to be let go, and adds those to it whose process is known, once.
    fn let_go(&self, tree: &mut Tree) {
        let with_children = tree.library.is_some();
        for space in self.group.spaces() {
            let is_descendant = with_children && space.fork.ancestors.contains(&tree.root);
            if space.id != tree.root && !is_descendant || space.has_left() {
                continue;
            }
            space.let_go.ask(with_children);
            let is_new = tree.leaving.iter().all(|one| one.space.id != space.id);
            if let Some(inspector) = space.inspector().filter(|_| is_new) {
                let process = inspector.process().clone();
                self.guests.forget(&process);
                self.group.released.add(&process);
                tree.leaving.push(Leaving { space, process });
            }
        }
    }

    /// Drops the references to address spaces that the governor has forgotten. With the last one the userfaultfd is closed,
    /// in the guardian, too: until then a fork waits for its event to be read.
    fn drop_forgotten(&self, tree: &mut Tree) {
        let leaving = std::mem::take(&mut tree.leaving).into_iter();
        let is_there = |one: &Leaving| self.group.space(one.space.id).is_some();
        let (leaving, forgotten): (Vec<_>, Vec<_>) = leaving.partition(is_there);
        tree.leaving = leaving;
        tree.forgotten.extend(forgotten.into_iter().map(|one| {
            let arena = one.space.attached();
            Forgotten {
                id: one.space.id,
                is_gone: one.space.is_gone(),
                arena: arena.map_or(Vec::new(), |attached| parts_of(&attached.arena)),
                space: Arc::downgrade(&one.space),
                process: one.process,
            }
        }));
    }

    /// After an address space was forgotten.
    fn finish(&self, one: &Forgotten, library: Option<u64>) {
        if one.is_gone {
            return;
        }
        let since = Instant::now();
        while one.space.strong_count() > 0 && since.elapsed() < LAST_REFERENCE {
            std::thread::sleep(STEP);
        }
        let pid = one.process.pid();
        if one.space.strong_count() > 0 {
            log::error!("process {pid} is still referred to, and may hang; please report this");
        }
        // Where a loader brought the library, the C library calls it when the program forks, and it stays.
        if let Some(start) = library
            && let Err(error) = self.unmap_library(one, start)
        {
            log::debug!("the library stays mapped in process {pid}: {error}");
        }
    }

    /// Unmaps the library from a program that may have no thread for a while that can be stopped.
    fn unmap_library(&self, one: &Forgotten, start: u64) -> Result<(), AttachError> {
        let since = Instant::now();
        loop {
            // Others are traced between two tries.
            let tracing = self.guests.trace();
            let unmapped = self.library.unmap(&one.process, start, &one.arena);
            drop(tracing);
            match unmapped {
                Err(AttachError::Busy) if since.elapsed() < LAST_TRY => std::thread::sleep(STEP),
                unmapped => return unmapped,
            }
        }
    }
}

impl Library {
    /// Unmaps the library and these parts of its arena from a program whose helper has ended.
    fn unmap(
        self: &Arc<Self>,
        process: &Arc<Process>,
        start: u64,
        arena: &[PageRange],
    ) -> Result<(), AttachError> {
        let (library, stopped, arena) = (self.clone(), process.clone(), arena.to_vec());
        by_any_thread(process, move |tracee| {
            // With a thread stopped: it may have executed another program until then, whose memory this would be.
            if !library.is_at(&stopped, start)? {
                return Err(AttachError::Gone);
            }
            tracee.call(nr::MUNMAP, [start, library.image.length, 0, 0, 0, 0])?;
            for part in &arena {
                let (start, length) = (part.start.address(), bytes(part.pages()));
                match tracee.call(nr::MUNMAP, [start, length, 0, 0, 0, 0]) {
                    // It is sealed. What this process has read of it since it was emptied are zeros, which a later memfold
                    // would page out and bring back as memory. (Locked memory refuses.)
                    Err(error) if error.raw_os_error() == Some(Errno::EPERM.0) => {
                        let advice = libc::MADV_DONTNEED as u64;
                        let _ = tracee.call(nr::MADVISE, [start, length, advice, 0, 0, 0]);
                    }
                    unmapped => drop(unmapped?),
                }
            }
            Ok(())
        })
    }
}

/// An arena in parts that are sealed as a whole or not at all: the beacon is, and the stage with the trash, where the kernel
/// can, and the stage is not where pages are carried to it. The last page is a guard.
fn parts_of(arena: &Arena) -> Vec<PageRange> {
    let whole = arena.whole;
    let last = VirtualPage(whole.end.0 - 1);
    let range = |start, end| PageRange { start, end };
    // A forked child has its parent's, which is elsewhere.
    let beacon = PageRange::around(arena.beacon, 1);
    let mut parts = RangeSet::default();
    parts.add(range(whole.start, arena.stage.start));
    parts.remove(beacon);
    let mut parts = parts.ranges().to_vec();
    parts.extend([
        beacon,
        range(arena.stage.start, last),
        range(last, whole.end),
    ]);
    parts
}
