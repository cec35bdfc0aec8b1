//! What forks leave behind in an address space.

use crate::page::VirtualPage;
use crate::supervised::fork::family::{Family, Member};
use crate::supervised::fork::inheritance::Inheritance;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// The relations of an address space by forks. `M` is the address space itself.
pub struct ForkState<M: Member> {
    /// For a forked child, until it was compared with its mappings: what it may have inherited.
    /// Locked before the gate.
    pub inheritance: Mutex<Option<Inheritance>>,
    /// Some of what was inherited is in the swap space.
    pub inherited_stored: AtomicBool,
    /// The child was not compared with its mappings, as nothing depended on it. What the fork wiped
    /// (`MADV_WIPEONFORK`) counts as inherited.
    pub uncompared: AtomicBool,
    /// Part of what was inherited is lost: the program must not run on.
    pub lost: AtomicBool,
    /// Made by a fork, or has forked: its pages may be shared.
    pub forked: AtomicBool,
    /// Address spaces with which it may share pages.
    pub family: Arc<Family<M>>,
    /// For an address space made by a fork: the page from which the child reads its ID.
    beacon: Option<VirtualPage>,
    /// Random bytes that are in that page and nowhere else.
    pub secret: [u8; 16],
}

impl<M: Member> Default for ForkState<M> {
    fn default() -> Self {
        ForkState {
            inheritance: Mutex::default(),
            inherited_stored: AtomicBool::new(false),
            uncompared: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            forked: AtomicBool::new(false),
            family: Arc::default(),
            beacon: None,
            secret: [0; 16],
        }
    }
}

impl<M: Member> ForkState<M> {
    /// Of a forked child in `family`, which reads its ID from `beacon`.
    ///
    /// # Panics
    ///
    /// Where the kernel has no random numbers.
    pub fn of_child(family: Arc<Family<M>>, beacon: Option<VirtualPage>) -> ForkState<M> {
        let mut secret = [0; 16];
        if beacon.is_some() {
            getrandom::fill(&mut secret).expect("the kernel has random numbers");
        }
        ForkState {
            forked: AtomicBool::new(true),
            family,
            beacon,
            secret,
            ..ForkState::default()
        }
    }

    /// The page from which a child reads its ID, if this is a child's address space.
    pub fn beacon(&self) -> Option<VirtualPage> {
        self.beacon
    }
}
