//! What can be seen of a kernel after an operation, in words that both kernels share.

use crate::page::PageRange;
use crate::simulation::conformance::operation::{HELPER, Operation, Pages, number};
use crate::simulation::model::memory::spread;
use crate::supervised::kernel::{Message, Process};
use memfold_sys::process::InheritedBy;
use memfold_sys::{Errno, PAGE_SIZE};
use std::fmt;
use std::io;

/// Stands for a fact of the model that may be so or otherwise on Linux.
const EITHER: &str = "either";

/// What a call returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It succeeded.
    Done,
    /// SIGSEGV.
    Unmapped,
    /// The contents that were read.
    Contents(u64),
    /// An error.
    Failed(Errno),
    /// This many pages were moved, then this error or none.
    Moved(u32, Errno),
    /// A child was forked.
    Forked,
}

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocked {
    /// A page.
    Fault,
    /// An event that memfold has not read.
    Event,
}

/// What is seen after one operation.
#[derive(Default)]
pub struct Facts {
    /// What, and how it is.
    said: Vec<(String, String)>,
    /// Mappings: which, and their pages.
    mappings: Vec<(String, Vec<Pages>)>,
}

/// An operation with what is seen after it.
pub struct Step {
    /// What was done.
    pub operation: Operation,
    /// What was seen then.
    pub facts: Facts,
}

impl Facts {
    /// What was seen, as a name and what it is.
    pub fn said(&self) -> &[(String, String)] {
        &self.said
    }

    /// Adds a fact.
    pub fn say(&mut self, what: impl fmt::Display, how: impl fmt::Debug) {
        self.said.push((what.to_string(), format!("{how:?}")));
    }

    /// Adds one that the model leaves open.
    pub fn leave_open(&mut self, what: impl fmt::Display) {
        self.said.push((what.to_string(), EITHER.to_owned()));
    }

    /// Adds what a call of a thread returned.
    pub fn say_answer(&mut self, thread: usize, answer: Answer) {
        self.say(name_of(thread), answer);
    }

    /// Adds that a thread waits.
    pub fn say_blocked(&mut self, thread: usize, blocked: Blocked) {
        self.say(name_of(thread), format_args!("waits: {blocked:?}"));
    }

    /// Adds messages that were read. `thread` finds the thread of a TID.
    ///
    /// Of threads that were woken together it is left to the scheduler which one faults first, so faults
    /// that follow each other are sorted.
    pub fn say_messages<U>(&mut self, messages: &[Message<U>], thread: impl Fn(u32) -> usize) {
        let is_fault = |message: &&Message<U>| matches!(message, Message::Fault { .. });
        let mut faults: Vec<String> = { messages.iter().filter(is_fault) }
            .map(|message| describe(message, &thread))
            .collect();
        faults.sort();
        // Where a fault follows an event, this is seen here.
        let order: Vec<bool> = messages.iter().map(|message| is_fault(&message)).collect();
        self.say("order of faults and events", order);
        let events = messages.iter().filter(|message| !is_fault(message));
        faults.extend(events.map(|message| describe(message, &thread)));
        self.say("messages", faults);
    }

    /// Adds mappings.
    fn map(&mut self, what: impl fmt::Display, ranges: impl Iterator<Item = PageRange>) {
        self.mappings
            .push((what.to_string(), ranges.map(Pages::of).collect()));
    }

    /// Adds what `/proc` shows of a process in a range.
    pub(crate) fn look(&mut self, process: usize, inspector: &impl Process, range: PageRange) {
        let what = |what: &str| format!("process {process}, {what}");
        let resident = inspector.resident(range).map(|resident| {
            let ranges = resident.ranges().iter();
            ranges.map(|range| Pages::of(*range)).collect::<Vec<_>>()
        });
        let present: Vec<u64> = { resident.iter().flatten() }
            .flat_map(|pages| pages.0..pages.0 + pages.1)
            .collect();
        self.say(what("resident"), resident.map_err(errno));
        self.say(what("contents"), copy_out(inspector, &present));
        let inside = |start: u64, end: u64| {
            let range = PageRange::of_addresses(start, end).intersection(range);
            (!range.is_empty()).then_some(range)
        };
        match inspector.vmas() {
            Ok(areas) => {
                let areas = areas.iter().filter_map(|area| inside(area.start, area.end));
                self.map(what("mappings"), areas);
            }
            Err(error) => self.say(what("mappings"), errno(error)),
        }
        let flags = [
            ("registered", InheritedBy::Registration),
            ("marked", InheritedBy::Mark),
        ];
        for (name, by) in flags {
            match inspector.inherited(by) {
                Ok(areas) => {
                    let areas = areas.iter().filter_map(|area| inside(area.start, area.end));
                    self.map(what(name), areas);
                }
                Err(error) => self.say(what(name), errno(error)),
            }
        }
    }

    /// How these facts of the model differ from Linux's.
    pub fn differs(&self, linux: &Facts) -> Option<String> {
        for (index, (what, how)) in self.said.iter().enumerate() {
            let (also, real) = match linux.said.get(index) {
                Some((also, real)) => (also.as_str(), real.as_str()),
                None => ("nothing more", ""),
            };
            if what != also || how != real && how != EITHER {
                return Some(format!("model: {what}: {how}\n    Linux: {also}: {real}"));
            }
        }
        if let Some((what, how)) = linux.said.get(self.said.len()) {
            return Some(format!("model: nothing more\n    Linux: {what}: {how}"));
        }
        let both = self.mappings.iter().zip(&linux.mappings);
        both.into_iter()
            .find(|(model, linux)| !merge(&model.1, &linux.1))
            .map(|(model, linux)| {
                format!(
                    "model: {}: {:?}\n    Linux: {}: {:?}",
                    model.0, model.1, linux.0, linux.1
                )
            })
    }
}

/// Whether merging neighbours of the first mappings makes the second.
///
/// Linux merges neighbours that are alike, which depends on where each was made and on what has shared
/// their pages (`anon_vma`, page offsets). memfold can not rely on either, and the model never merges.
fn merge(parts: &[Pages], whole: &[Pages]) -> bool {
    let mut parts = parts.iter();
    let is_made = |whole: &Pages| {
        let mut next = whole.0;
        while next < whole.0 + whole.1 {
            match parts.next() {
                Some(part) if part.0 == next => next += part.1,
                _ => return false,
            }
        }
        next == whole.0 + whole.1
    };
    whole.iter().all(is_made) && parts.next().is_none()
}

fn name_of(thread: usize) -> String {
    match thread {
        HELPER => "helper".to_owned(),
        thread => format!("thread {thread}"),
    }
}

fn describe<U>(message: &Message<U>, thread_of: impl Fn(u32) -> usize) -> String {
    match message {
        Message::Fault {
            page,
            write,
            protected,
            thread,
        } => {
            let (page, thread) = (number(*page), name_of(thread_of(*thread)));
            format!("{thread} faults on {page}, write {write}, protected {protected}")
        }
        Message::Unmap(range) => format!("unmap {:?}", Pages::of(*range)),
        Message::Remove(range) => format!("remove {:?}", Pages::of(*range)),
        Message::Remap { from, to } => format!("remap {:?} to {}", Pages::of(*from), number(*to)),
        Message::Fork(_) => "fork".to_owned(),
    }
}

/// The error of a look.
pub fn errno(error: io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(0))
}

/// Copies pages out, which must be what was once written to them as a whole.
pub(crate) fn copy_out(inspector: &impl Process, pages: &[u64]) -> Result<Vec<u64>, Errno> {
    if pages.is_empty() {
        return Ok(Vec::new());
    }
    let address = |page: &u64| Pages(*page, 1).range().start.address();
    let addresses: Vec<u64> = pages.iter().map(address).collect();
    let mut target = vec![0xff; pages.len() * PAGE_SIZE];
    let copied = inspector.copy_out(&addresses, &mut target).map_err(errno)?;
    let tag = |page: &[u8]| {
        let tag = u64::from_le_bytes(page[..8].try_into().expect("eight bytes"));
        let mut whole = [0; PAGE_SIZE];
        spread(tag, &mut whole);
        if whole == page { tag } else { u64::MAX }
    };
    let copied = target.chunks(PAGE_SIZE).take(copied);
    Ok(copied.map(tag).collect())
}
