//! Mappings and pages of one program, and accesses by its threads.
//!
//! A page's contents are a number (its *tag*), spread over a whole page where the core sees it, so that a
//! page that was mixed with another is found out.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity;
use crate::simulation::model::queues::Queues;
use crate::simulation::progress;
use crate::simulation::sync::lock_model;
use crate::simulation::trace::trace;
use crate::sync::interleave;
use crate::time;
use memfold_swap::Page;
use shuttle::thread::{self, Thread};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// What a page in memory is.
#[derive(Debug, Clone)]
pub enum Frame {
    /// The kernel's page of zeros.
    Zero,
    /// A page of memory; more than one owner share it since a fork.
    Page(Arc<AtomicU64>),
}

impl Frame {
    /// A page of memory with these contents.
    pub fn of(tag: u64) -> Frame {
        Frame::Page(Arc::new(AtomicU64::new(tag)))
    }

    /// Its contents.
    pub fn tag(&self) -> u64 {
        match self {
            Frame::Zero => 0,
            Frame::Page(tag) => tag.load(Ordering::Relaxed),
        }
    }
}

/// How a page's mapping is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registered {
    /// Not at all.
    No,
    /// For missing pages.
    Missing,
    /// For missing and write-protected pages.
    Protectable,
    /// For missing pages, and for tracking accesses.
    Tracked,
}

/// One mapped page.
#[derive(Debug, Clone)]
pub struct Mapped {
    /// The `mmap` that made it; neighbours of one number and one way of being registered are one VMA.
    pub area: u32,
    /// How it is registered.
    pub registered: Registered,
    /// What is there; nothing if it is missing.
    pub frame: Option<Frame>,
    /// Writes are faults; of tracked pages: none was accessed since.
    pub protected: bool,
    /// Another process may map the page, too: it was there at a fork, and was not written since. Linux
    /// does not look whether the other one has left.
    pub shared: bool,
    /// The mapping has an `anon_vma`. Without one it has zero pages at most, which a fork does not copy.
    pub prepared: bool,
    /// The helper's, which no scan offers for management.
    pub own: bool,
    /// Kept from forked children (`MADV_DONTFORK`).
    pub withheld: bool,
    /// Was withheld once (`MADV_RANDOM`).
    pub marked: bool,
    /// Was moved as it was kept from children and not registered, of which no event tells: they may lack it
    /// (docs/limits.md).
    pub astray: bool,
}

impl Mapped {
    /// Neighbours of one kind are one VMA.
    pub fn kind(&self) -> (u32, Registered, bool, bool) {
        (self.area, self.registered, self.withheld, self.marked)
    }
}

/// What the program must read from a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// These contents.
    Exactly(u64),
    /// These contents or zeros: a `madvise` is in progress.
    OrZero(u64),
    /// These contents, which were written while a `madvise` was in progress, or zeros.
    WrittenOrZero(u64),
}

impl Expected {
    fn allows(self, tag: u64) -> bool {
        match self {
            Expected::Exactly(expected) => tag == expected,
            Expected::OrZero(expected) | Expected::WrittenOrZero(expected) => {
                tag == expected || tag == 0
            }
        }
    }
}

/// What `madvise` is dropping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropping {
    /// Tells it from others.
    pub number: u32,
    /// The pages.
    pub range: PageRange,
    /// Its event was read, and it holds `mmap_lock`.
    pub is_locked: bool,
}

/// An address space as the kernel has it.
#[derive(Default)]
pub struct MemoryState {
    /// Mapped pages.
    pub pages: BTreeMap<VirtualPage, Mapped>,
    /// What the program's pages must hold. The stage has none.
    pub expected: BTreeMap<VirtualPage, Expected>,
    /// Calls of `madvise` in progress that drop pages.
    pub dropping: Vec<Dropping>,
    /// Number of the next one.
    pub next_drop: u32,
    /// The userfaultfd's queues.
    pub queues: Queues,
    /// The last number given to an `mmap`.
    pub areas: u32,
    /// Calls of `madvise` that drop pages; they hold `mmap_lock`, and no mapping changes.
    pub zapping: u32,
    /// The program has exited: no thread is in it any more.
    pub gone: bool,
    /// All threads of the program are stopped.
    pub stopped: bool,
    /// Runs that the helper begins to carry off before it is killed, if it is.
    pub carries_left: Option<u32>,
    /// Looks at what is kept from children that began, and those beside which a thread has changed mappings, if one does at
    /// each.
    pub looks: Option<(u64, u64)>,
    /// The helper was killed; another process uses the memory still.
    pub has_helper_ended: bool,
}

/// An address space, shared by its threads, its userfaultfd and its `/proc` files.
pub struct Memory {
    /// The process.
    pub pid: i32,
    /// The guardian kills it when the supervisor dies.
    pub guarded: AtomicBool,
    /// Of it and of each ancestor, whether it was killed, or what it had at its fork is not known. The last is its own.
    may_be_killed: Vec<Arc<AtomicBool>>,
    state: Mutex<MemoryState>,
}

/// A segmentation fault: nothing is mapped there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped;

impl Memory {
    /// An empty address space.
    pub fn new(pid: i32) -> Memory {
        Memory {
            pid,
            guarded: AtomicBool::new(false),
            may_be_killed: vec![Arc::default()],
            state: Mutex::default(),
        }
    }

    /// That of a child, still empty.
    pub fn of_child(parent: &Memory, pid: i32) -> Memory {
        let ancestors = parent.may_be_killed.iter().cloned();
        Memory {
            may_be_killed: ancestors.chain([Arc::default()]).collect(),
            ..Memory::new(pid)
        }
    }

    /// Notes that memfold may kill the program, and what descends from it.
    pub fn let_kill(&self) {
        let own = self.may_be_killed.last();
        own.expect("its own").store(true, Ordering::Relaxed);
    }

    /// Notes that the program was compared with changes beside its fork. If its mappings did not tell which of them it
    /// contains, memfold may kill it.
    pub fn note_compared(&self, is_clear: bool) {
        adversity::note_compared(is_clear);
        if !is_clear {
            self.let_kill();
        }
    }

    /// Whether memfold may kill the program.
    pub fn may_be_killed(&self) -> bool {
        let mut flags = self.may_be_killed.iter();
        flags.any(|may| may.load(Ordering::Relaxed))
    }

    /// The state, for one step.
    #[track_caller]
    pub fn state(&self) -> Step<'_> {
        Step(Some(lock_model(&self.state)))
    }

    /// Resident pages.
    pub fn resident_pages(&self) -> u64 {
        let state = self.state();
        let frames = state.pages.values().filter_map(|page| page.frame.as_ref());
        frames
            .filter(|frame| matches!(frame, Frame::Page(_)))
            .count() as u64
    }

    /// Reads a page, as the thread with this TID.
    pub fn read(&self, page: VirtualPage, thread: u32) -> Result<u64, Unmapped> {
        self.access(page, thread, false, |state, frame, dropping| {
            progress::note_access();
            let tag = frame.tag();
            trace(|| format!("reads {:#x}: {tag:#x}", page.0));
            if let Some(expected) = state.get_mut(&page) {
                assert!(
                    expected.allows(tag),
                    "process {}: page {:#x} reads as {tag:#x}, but {expected:x?} was expected",
                    current_pid(),
                    page.0
                );
                if !dropping {
                    *expected = Expected::Exactly(tag);
                }
            }
            tag
        })
    }

    /// Writes a page of the program.
    pub fn write(&self, page: VirtualPage, thread: u32, tag: u64) -> Result<(), Unmapped> {
        self.access(page, thread, true, |state, frame, dropping| {
            progress::note_access();
            if let Frame::Page(contents) = frame {
                contents.store(tag, Ordering::Relaxed);
                trace(|| format!("writes {:#x}: {tag:#x}", page.0));
            }
            if let Some(expected) = state.get_mut(&page) {
                *expected = match dropping {
                    true => Expected::WrittenOrZero(tag),
                    false => Expected::Exactly(tag),
                };
            }
        })
    }

    /// A reference of the memory that is mapped at a page (`FOLL_GET`); nothing if it is missing.
    pub fn reference(&self, page: VirtualPage) -> Weak<AtomicU64> {
        let state = self.state();
        let frame = state.pages.get(&page).and_then(|page| page.frame.as_ref());
        match frame {
            Some(Frame::Page(contents)) => Arc::downgrade(contents),
            _ => Weak::new(),
        }
    }

    /// Writes to memory by a reference of it. The program waits for it, and expects it in a page.
    pub fn write_late(&self, page: VirtualPage, frame: Weak<AtomicU64>, tag: u64) {
        let mut state = self.state();
        if let Some(contents) = frame.upgrade() {
            contents.store(tag, Ordering::Relaxed);
        }
        if let Some(expected) = state.expected.get_mut(&page) {
            *expected = Expected::Exactly(tag);
        }
    }

    /// Writes to a page without changing it (`MADV_POPULATE_WRITE`).
    pub fn populate_write(&self, page: VirtualPage, thread: u32) -> Result<(), Unmapped> {
        self.access(page, thread, true, |_, _, _| ())
    }

    /// One access: faults until the page is there and may be accessed so, then does `then` in one step.
    fn access<R>(
        &self,
        page: VirtualPage,
        thread: u32,
        write: bool,
        then: impl FnOnce(&mut BTreeMap<VirtualPage, Expected>, &Frame, bool) -> R,
    ) -> Result<R, Unmapped> {
        CURRENT.set(self.pid);
        loop {
            self.wait_while_stopped();
            let mut state = self.state();
            let MemoryState {
                pages,
                queues,
                expected,
                dropping,
                ..
            } = &mut *state;
            let mapped = pages.get_mut(&page).ok_or(Unmapped)?;
            let protected = match (&mapped.frame, mapped.registered) {
                (None, Registered::No) => {
                    // The kernel's own zeros.
                    mapped.frame = Some(if write { Frame::of(0) } else { Frame::Zero });
                    if write {
                        state.prepare(page);
                    }
                    continue;
                }
                (None, _) => false,
                (Some(_), Registered::Protectable) if write && mapped.protected => true,
                (Some(frame), registered) => {
                    if registered == Registered::Tracked {
                        mapped.protected = false;
                    }
                    if write && (mapped.shared || matches!(frame, Frame::Zero)) {
                        // COW.
                        mapped.frame = Some(Frame::of(frame.tag()));
                        mapped.shared = false;
                        state.prepare(page);
                        continue;
                    }
                    let dropping = dropping.iter().any(|drop| drop.range.contains(page));
                    return Ok(then(expected, frame, dropping));
                }
            };
            let number = queues.fault(page, write, protected, thread);
            drop(state);
            trace(|| {
                format!(
                    "fault on {:#x}, write {write}, protected {protected}",
                    page.0
                )
            });
            self.wait(|state| !state.queues.waits(number));
        }
    }

    /// Nothing but the death of its program makes an access fail.
    ///
    /// # Panics
    /// If it failed otherwise.
    #[track_caller]
    pub fn must_be_mapped<T>(&self, result: Result<T, Unmapped>) {
        if result.is_err() {
            assert!(self.state().gone, "a page is not mapped");
        }
    }

    /// A point at which the threads of a stopped program wait.
    pub fn wait_while_stopped(&self) {
        interleave();
        while self.state().stopped {
            time::yield_now();
        }
    }

    /// Stops all threads of the program, with the helper that calls this, for a while.
    pub fn stop_sometimes(&self) {
        let looks = adversity::stop();
        if looks == 0 {
            return;
        }
        trace(|| "is stopped".to_owned());
        self.state().stopped = true;
        for _ in 0..looks {
            if self.state().gone {
                break;
            }
            time::yield_now();
        }
        self.state().stopped = false;
        trace(|| "goes on".to_owned());
    }

    /// Whether the helper, which is in the gate and about to carry a run off, is killed.
    pub fn ends_helper(&self) -> bool {
        let mut state = self.state();
        let left = state.carries_left.map(|left| left.checked_sub(1));
        state.carries_left = left.flatten();
        state.has_helper_ended = left == Some(None);
        state.has_helper_ended
    }

    /// Sleeps until `is_over`, which another thread makes true before it wakes this one.
    pub fn wait(&self, is_over: impl Fn(&MemoryState) -> bool) {
        while !is_over(&self.state()) {
            thread::park();
        }
    }
}

/// The state, locked for one step. At its end, the threads that it woke can run.
pub struct Step<'a>(Option<MutexGuard<'a, MemoryState>>);

impl Deref for Step<'_> {
    type Target = MemoryState;

    fn deref(&self) -> &MemoryState {
        self.0.as_ref().expect("locked until dropped")
    }
}

impl DerefMut for Step<'_> {
    fn deref_mut(&mut self) -> &mut MemoryState {
        self.0.as_mut().expect("locked until dropped")
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        let woken = self.queues.take_woken();
        self.0 = None;
        if !std::thread::panicking() {
            // Each of these is a point of scheduling.
            woken.iter().for_each(Thread::unpark);
        }
    }
}

thread_local! {
    static CURRENT: std::cell::Cell<i32> = const { std::cell::Cell::new(0) };
}

fn current_pid() -> i32 {
    CURRENT.get()
}

impl MemoryState {
    /// The mapping that a page is in.
    pub fn mapping(&self, page: VirtualPage) -> Option<PageRange> {
        let kind = Mapped::kind;
        let here = kind(self.pages.get(&page)?);
        let is_alike = |page: VirtualPage| self.pages.get(&page).map(kind) == Some(here);
        let (mut start, mut end) = (page, page.plus(1));
        while start.0 > 0 && is_alike(VirtualPage(start.0 - 1)) {
            start = VirtualPage(start.0 - 1);
        }
        while is_alike(end) {
            end = end.plus(1);
        }
        Some(PageRange { start, end })
    }

    /// Registers the mappings of a range in another way: returns the parts of mappings that changed, none if
    /// nothing is mapped there.
    ///
    /// Parts that are split stay so. Linux merges them again when they are alike, but not always: not in a
    /// forked child, and not after each has got its own `anon_vma`.
    pub fn register(
        &mut self,
        range: PageRange,
        how: impl Fn(Registered) -> Registered,
    ) -> Option<Vec<PageRange>> {
        let mut changed = None;
        let mut next = range.start;
        while let Some((&page, mapped)) = self.pages.range(next..range.end).next() {
            let (before, mapping) = (mapped.registered, self.mapping(page)?);
            let part = mapping.intersection(range);
            next = part.end;
            let changed = changed.get_or_insert_with(Vec::new);
            if how(before) == before {
                continue;
            }
            changed.push(part);
            self.split(mapping, part);
            for (_, page) in self.mapped(part) {
                page.registered = how(before);
            }
        }
        changed
    }

    /// Makes a part of a mapping one of its own.
    pub fn split(&mut self, mapping: PageRange, part: PageRange) {
        if part != mapping {
            self.set_apart(part);
        }
    }

    /// Makes a range a mapping of its own, and what is left behind it another.
    pub fn set_apart(&mut self, range: PageRange) {
        let last = VirtualPage(range.end.0 - 1);
        let end = self.mapping(last).map_or(range.end, |last| last.end);
        self.renumber(PageRange {
            start: range.end,
            end,
        });
        self.renumber(range);
    }

    fn renumber(&mut self, range: PageRange) {
        self.areas += 1;
        let area = self.areas;
        for (_, page) in self.mapped(range) {
            page.area = area;
        }
    }

    /// Gives the mapping that a page is in an `anon_vma`.
    pub fn prepare(&mut self, page: VirtualPage) {
        if let Some(range) = self.mapping(page) {
            self.mapped(range)
                .for_each(|(_, page)| page.prepared = true);
        }
    }

    /// The mapped pages of a range.
    pub fn mapped(&mut self, range: PageRange) -> impl Iterator<Item = (VirtualPage, &mut Mapped)> {
        let range = self.pages.range_mut(range.start..range.end);
        range.map(|(page, mapped)| (*page, mapped))
    }

    /// Maps a range, which is free.
    pub fn map(&mut self, range: PageRange, own: bool) {
        self.areas += 1;
        let area = self.areas;
        for page in range.start.0..range.end.0 {
            let page = VirtualPage(page);
            let mapped = Mapped {
                area,
                registered: Registered::No,
                frame: None,
                protected: false,
                shared: false,
                prepared: false,
                own,
                withheld: false,
                marked: false,
                astray: false,
            };
            let before = self.pages.insert(page, mapped);
            assert!(before.is_none(), "page {:#x} is mapped twice", page.0);
            if !own {
                self.expected.insert(page, Expected::Exactly(0));
            }
        }
    }

    /// Whether nothing is mapped in a range.
    pub fn is_free(&self, range: PageRange) -> bool {
        self.pages.range(range.start..range.end).next().is_none()
    }
}

/// A page as the core sees it.
pub(crate) fn spread(tag: u64, page: &mut [u8]) {
    page.fill(0);
    if tag != 0 {
        let last = page.len() - 8;
        page[..8].copy_from_slice(&tag.to_le_bytes());
        page[8..16].copy_from_slice(&tag.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        page[last..].copy_from_slice(&(!tag).to_le_bytes());
    }
}

/// The tag of a page that the core copies in.
///
/// # Panics
/// If it is no page that [`spread`] made.
pub(crate) fn gather(page: &[u8]) -> u64 {
    let tag = u64::from_le_bytes(page[..8].try_into().expect("eight bytes"));
    let mut whole: Page = [0; memfold_sys::PAGE_SIZE];
    spread(tag, &mut whole);
    if whole != page {
        // A beacon, whose contents are its own matter.
        return BEACON | tag;
    }
    tag
}

/// Marks what is no page of a program.
pub(crate) const BEACON: u64 = 1 << 63;
