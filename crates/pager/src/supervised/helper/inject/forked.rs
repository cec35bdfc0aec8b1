//! Starting the helper of a forked child of a program that was attached.
//!
//! No handler of the library runs when such a program forks (unless forks are prepared: `lead.rs`). The kernel reports the fork, so the child is served; its helper
//! is started by ptrace, once that is worth it (`helper/forked.rs`). The library is in the child, as it was in the parent.

use super::image::{Access, Fixup};
use super::late::by_thread_in;
use super::{AttachError, Attacher, Haste, Library, has_mapping};
use crate::supervised::space::AddressSpace;
use memfold_sys::hello::brought;
use memfold_sys::process::{self, Process};
use memfold_sys::tracee::Tracee;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A process that was found to descend from a guest.
#[derive(Debug, Clone)]
pub(crate) struct ForkedChild {
    pub process: Arc<Process>,
    /// Where the library is in the guest, and so in the child.
    pub library: u64,
    /// How many detachments had begun by then.
    pub detachments: u64,
}

impl Attacher {
    /// The guests, by which forked children are found.
    pub(crate) fn guests_with_library(&self) -> (u64, Vec<(Arc<Process>, u64)>) {
        // In this order: a guest that is detached in between is one that is compared.
        let detachments = self.guests.detachments();
        (detachments, self.guests.with_library())
    }

    /// Whether the library is where it was brought to in a guest, in a process forked from one.
    pub(super) fn is_forked_from_guest(&self, process: &Process, library: u64) -> bool {
        let is_ancestor = |guest: &(Arc<Process>, u64)| {
            guest.1 == library && process.descends_from(&guest.0).unwrap_or(false)
        };
        process::is_fork(process.pid())
            && !self.group.released.covers(process)
            && self.guests.with_library().iter().any(is_ancestor)
    }

    /// The same, where no handler of the library saw the fork.
    pub(super) fn is_forked_unseen(&self, process: &Process, library: u64) -> bool {
        !self.group.resources.prepares_forks() && self.is_forked_from_guest(process, library)
    }

    /// Whether a child is being let go whose process is not known: any could be it.
    fn is_unknown_let_go(&self) -> bool {
        let is_unknown = |space: &Arc<AddressSpace>| {
            space.let_go.is_asked() && !space.has_left() && space.inspector().is_none()
        };
        self.group.spaces().iter().any(is_unknown)
    }

    /// Whether the library is in a process where it is in its guest.
    pub(crate) fn has_library(&self, child: &ForkedChild) -> bool {
        self.library
            .is_at(&child.process, child.library)
            .unwrap_or(false)
    }

    /// Starts the helper of a forked child. `Gone` if the child is not to have one any more.
    pub(crate) fn start_forked(
        &self,
        child: &ForkedChild,
        haste: Haste,
    ) -> Result<(), AttachError> {
        let _tracing = self.guests.trace();
        let is_outdated = self.guests.detachments() != child.detachments;
        if is_outdated || self.group.stopping.load(Ordering::Relaxed) {
            return Err(AttachError::Gone);
        }
        self.library.examine(&child.process)?;
        self.join(&child.process, child.library, haste)
    }

    /// The same while it is traced.
    pub(super) fn join(
        &self,
        process: &Arc<Process>,
        library: u64,
        haste: Haste,
    ) -> Result<(), AttachError> {
        // With no address space of the supervisor's, a child that begins to start a helper would end itself.
        if self.group.released.covers(process) || !self.library.is_at(process, library)? {
            return Err(AttachError::Gone);
        }
        if self.is_unknown_let_go() {
            return Err(AttachError::Busy);
        }
        // A helper in the memory of another process would be that one's.
        if process.shares_memory_with_parent()? {
            return Err(AttachError::Busy);
        }
        self.guests.invite(process);
        self.guests.note_library(process, library);
        self.invited(
            process,
            self.library.start_inherited(process, library, haste),
        )
    }
}

impl Library {
    /// Whether the library's first page is mapped there in a process.
    pub(super) fn is_at(&self, process: &Process, start: u64) -> Result<bool, AttachError> {
        let path = self.path.to_string_lossy();
        has_mapping(process, |line| {
            line.range.start == start && line.name.contains(&*path)
        })
    }

    fn start_inherited(
        self: &Arc<Self>,
        process: &Arc<Process>,
        start: u64,
        haste: Haste,
    ) -> Result<(), AttachError> {
        let (library, stopped) = (self.clone(), process.clone());
        by_thread_in(process, haste, move |tracee| {
            library.compare_inherited(tracee, start)?;
            library.start_by(&stopped, tracee, (start, brought::INHERITED))
        })
    }

    /// Whether the code at `start` is the library's.
    pub(super) fn compare_code(&self, tracee: &Tracee, start: u64) -> Result<(), AttachError> {
        let segments = self.image.segments.iter();
        let mut code = segments.filter(|one| one.access == Access::Execute);
        code.try_for_each(|segment| self.compare(tracee, start, segment))
    }

    /// Whether the library is whole in a forked child: its parent may have been forked while it was being mapped.
    fn compare_inherited(&self, tracee: &Tracee, start: u64) -> Result<(), AttachError> {
        let incomplete = || io::Error::other("its copy of memfold's library is not whole");
        self.compare_code(tracee, start)?;
        for fixup in &self.image.fixups {
            let (place, wanted) = match *fixup {
                Fixup::Relative { place, addend } => (place, start.wrapping_add(addend)),
                Fixup::Absent { place } => (place, 0),
            };
            let mut found = [0; size_of::<u64>()];
            tracee.read(start + place, &mut found)?;
            if u64::from_ne_bytes(found) != wanted {
                return Err(incomplete().into());
            }
        }
        Ok(())
    }
}
