//! The part of an address space that forks need.

use crate::page::VirtualPage;
use crate::supervised::fork::family::{Family, Member};
use crate::supervised::fork::inheritance::Inheritance;
use crate::supervised::fork::shared_bounds::SharedBounds;
use crate::sync::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Relation of an address space to its parent and children. `M` is the address space itself. Flags are
/// Relaxed: the gate, or creation of the child, publishes what they announce.
pub(crate) struct ForkState<M: Member> {
    /// Changes concurrent with the fork that created this child, until it is compared with its
    /// mappings. Locked before the gate.
    pub inheritance: Mutex<Option<Inheritance>>,
    /// It was not compared with its mappings yet: `inheritance`, without its lock.
    pub awaits_comparison: AtomicBool,
    /// Some inherited pages are in the swap space.
    pub inherited_stored: AtomicBool,
    /// The comparison was skipped, because no page state depended on it. Pages wiped by the fork
    /// (`MADV_WIPEONFORK`) count as inherited. Also in the child of a prepared fork, which may lack zero pages that count
    /// as resident.
    pub uncompared: AtomicBool,
    /// Some inherited pages are lost: the child must be killed.
    pub lost: AtomicBool,
    /// At how many faults the child's process was searched and not found.
    pub tries: AtomicU32,
    /// The program was forked, or has forked: its pages may be shared.
    pub forked: AtomicBool,
    /// How much of it may be shared.
    pub sharing: SharedBounds,
    /// Address spaces with which it may share pages.
    pub family: Arc<Family<M>>,
    /// IDs of the address spaces that it descends from by fork and that were served when it was forked, the oldest first.
    pub ancestors: Vec<u64>,
    /// In a child: the page in which it reads its ID.
    beacon: Option<VirtualPage>,
    /// In a child: random bytes that exist in the beacon only.
    pub secret: [u8; 16],
}

impl<M: Member> Default for ForkState<M> {
    fn default() -> Self {
        ForkState {
            inheritance: Mutex::default(),
            awaits_comparison: AtomicBool::new(false),
            inherited_stored: AtomicBool::new(false),
            uncompared: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            tries: AtomicU32::new(0),
            forked: AtomicBool::new(false),
            sharing: SharedBounds::default(),
            family: Arc::default(),
            ancestors: Vec::new(),
            beacon: None,
            secret: [0; 16],
        }
    }
}

impl<M: Member> ForkState<M> {
    /// The state of a forked child in `family` that reads its ID in `beacon`.
    ///
    /// # Panics
    ///
    /// If getrandom fails.
    pub(crate) fn of_child(
        family: Arc<Family<M>>,
        ancestors: Vec<u64>,
        beacon: Option<VirtualPage>,
    ) -> ForkState<M> {
        let mut secret = [0; 16];
        if beacon.is_some() {
            getrandom::fill(&mut secret).expect("the kernel has random numbers");
        }
        ForkState {
            forked: AtomicBool::new(true),
            family,
            ancestors,
            beacon,
            secret,
            ..ForkState::default()
        }
    }

    /// Whether some inherited pages would read as zeros without the supervisor: they are in the swap space, or lost.
    pub(crate) fn depends_on_supervisor(&self) -> bool {
        self.inherited_stored.load(Ordering::Relaxed) || self.lost.load(Ordering::Relaxed)
    }

    /// The page in which a child reads its ID; `None` in an executed program.
    pub(crate) fn beacon(&self) -> Option<VirtualPage> {
        self.beacon
    }
}
