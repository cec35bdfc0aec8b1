//! Forked children whose events were read and not applied yet.

use crate::supervised::fork::shared_estimate::PendingFork;
#[cfg(not(simulated))]
use crate::supervised::kernel::Held;
use crate::supervised::kernel::Userfaultfd;
use crate::supervised::resources::Resources;
#[cfg(not(simulated))]
use std::os::fd::AsFd;

/// A forked child that has no address space as yet. It runs as soon as its event is read, so the guardian keeps its
/// userfaultfd open from then on.
pub(crate) struct UnappliedFork {
    /// None if descriptors or memory are short; the address space tries again. Dropped before `uffd`.
    #[cfg(not(simulated))]
    held: Option<Held>,
    uffd: Userfaultfd,
    under_way: PendingFork,
}

/// What keeps a child safe and counted until it has an address space, whose guard comes before this one goes.
pub(crate) struct UntilApplied {
    #[cfg(not(simulated))]
    _held: Option<Held>,
    _under_way: PendingFork,
}

impl UnappliedFork {
    pub(crate) fn new(
        #[cfg_attr(simulated, expect(unused_variables))] resources: &Resources,
        uffd: Userfaultfd,
        under_way: PendingFork,
    ) -> UnappliedFork {
        UnappliedFork {
            #[cfg(not(simulated))]
            held: resources.guardian.hold(uffd.as_fd()).ok(),
            uffd,
            under_way,
        }
    }

    pub(crate) fn into_parts(self) -> (Userfaultfd, UntilApplied) {
        let until = UntilApplied {
            #[cfg(not(simulated))]
            _held: self.held,
            _under_way: self.under_way,
        };
        (self.uffd, until)
    }

    /// Makes the child's faults wait for good: closing the userfaultfd would let it read zeros. After this process's end
    /// the guardian ends what waits.
    pub(crate) fn leave_waiting(self) {
        std::mem::forget(self.uffd);
        #[cfg(not(simulated))]
        std::mem::forget(self.held);
    }
}
