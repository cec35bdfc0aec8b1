//! What a fault message says, and how its service may end.

use crate::page::VirtualPage;
use crate::supervised::space::AddressSpace;
use memfold_sys::uffd::{FAULT_PROTECTED, FAULT_WRITE, Message};
use std::sync::atomic::Ordering;

/// A fault as its message told it.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    pub page: VirtualPage,
    pub write: bool,
    /// The page is there, and waits for leave to be written.
    pub protected: bool,
    /// How often the program had memory unregistered when this was told.
    pub unregistered: u32,
}

impl Fault {
    pub fn of_message(message: &Message, space: &AddressSpace) -> Fault {
        Fault {
            unregistered: space.unregistered.load(Ordering::Relaxed),
            page: VirtualPage::containing(message.fault_address()),
            write: message.fault_flags() & FAULT_WRITE != 0,
            protected: message.fault_flags() & FAULT_PROTECTED != 0,
        }
    }
}

impl Fault {
    /// Whether memory was unregistered since it was told, maybe its page. The kernel woke its thread
    /// then; if the page is missing still, that is another userfaultfd's to be told, and a page put
    /// there by this one would be wrong. The gate is held shared.
    pub fn is_outdated(&self, space: &AddressSpace) -> bool {
        self.unregistered != space.unregistered.load(Ordering::Relaxed)
    }
}

/// How a service ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The thread runs on, or will once the one who has its page is done.
    Done,
    /// Events must be read first; then serve it again.
    Retry,
}

/// Whether a service may wait for room, or must go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    MayDefer,
    Now,
    /// At once, too. Where pages were dropped this does not say that it is over.
    OfHelper,
}
