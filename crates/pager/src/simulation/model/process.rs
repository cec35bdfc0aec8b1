//! What `/proc` shows of a process.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::simulation::model::guardian::ProcessHandle;
use crate::simulation::model::memory::{Dropping, Frame, Mapped, Memory, Registered, spread};
use crate::simulation::time;
use crate::supervised::group::Group;
use crate::supervised::kernel::{Memory as _, Process};
use crate::supervised::space::AddressSpace;
use crate::sync::interleave;
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::{
    AreaKind, InheritedBy, InheritedRange, KeptRange, ThreadSample, VirtualMemoryArea,
};
use std::io;
use std::sync::Arc;

/// A look at a process.
pub(crate) struct Inspector(pub Arc<Memory>);

/// The process of a forked child: its userfaultfd knows it.
pub(crate) fn find_process(
    space: &AddressSpace,
    _: &Group,
    _: u32,
    beacon: VirtualPage,
) -> Option<Inspector> {
    let _ = space.uffd().put_page(beacon, &space.beacon_page());
    Some(Inspector(space.uffd().0.clone()))
}

/// Pages whose states one step of a scan of the page table reads.
const SCANNED_AT_ONCE: u64 = 4;

impl Inspector {
    /// Its PID.
    pub(crate) fn pid(&self) -> i32 {
        self.0.pid
    }

    /// Whether all threads are stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.0.state().stopped
    }

    /// Whether its helper does nothing until a signal comes.
    pub(crate) fn stands_still(&self) -> bool {
        self.is_stopped() || self.thread_has_ended()
    }

    /// Whether its helper has ended.
    pub(crate) fn thread_has_ended(&self) -> bool {
        self.0.state().has_helper_ended
    }

    /// No program is traced.
    pub(crate) fn tracer(&self) -> Option<i32> {
        None
    }

    /// The stage is.
    pub(crate) fn has_sealed(&self, _: &[(u64, u64)]) -> io::Result<bool> {
        Ok(true)
    }

    /// No program filters its system calls.
    pub(crate) fn filters(&self) -> io::Result<u32> {
        Ok(0)
    }

    /// Waits until a thread has changed mappings beside a look.
    fn await_change(&self, look: u64) {
        let is_over = |(_, answered): (u64, u64)| answered >= look;
        while !self.0.state().looks.is_none_or(is_over) {
            time::yield_now();
        }
    }

    /// Programs of the model keep nothing from their children themselves.
    pub(crate) fn kept_from_children(&self) -> io::Result<Vec<KeptRange>> {
        interleave();
        let look = {
            let mut state = self.0.state();
            if state.gone {
                return Err(Self::gone());
            }
            state.looks.as_mut().map(|(begun, _)| {
                *begun += 1;
                *begun
            })
        };
        look.into_iter().for_each(|look| self.await_change(look));
        let kept = |is_registered| {
            let is_wanted = move |mapped: &Mapped| {
                mapped.withheld && (mapped.registered != Registered::No) == is_registered
            };
            let areas = self.areas(is_wanted).into_iter();
            areas.map(move |(range, ..)| KeptRange {
                start: range.start.address(),
                end: range.end.address(),
                is_registered,
                is_of_driver: false,
            })
        };
        Ok(kept(false).chain(kept(true)).collect())
    }

    /// Nothing to close.
    pub(crate) fn close_flags(&self) {}

    /// The process.
    pub(crate) fn handle(&self) -> io::Result<ProcessHandle> {
        Ok(self.0.clone())
    }

    /// The core kills a program only if its data is lost. That may happen to a child whose parent is killed
    /// while it forks, or of which its mappings do not show what it has.
    ///
    /// # Panics
    /// If it is another.
    pub(crate) fn kill(&self, _: i32) -> io::Result<()> {
        assert!(self.0.may_be_killed(), "process {} is killed", self.pid());
        self.0.exit();
        Ok(())
    }

    fn gone() -> io::Error {
        io::Error::from_raw_os_error(libc::ESRCH)
    }
}

impl Inspector {
    /// The pages of a range whose frames are looked for. Between looks at them other threads run.
    fn pages_with(&self, range: PageRange, is_wanted: fn(&Mapped) -> bool) -> io::Result<RangeSet> {
        let mut resident = RangeSet::default();
        let (mut page, mut scanned) = (range.start, 0);
        loop {
            if scanned % SCANNED_AT_ONCE == 0 {
                interleave();
            }
            scanned += 1;
            let state = self.0.state();
            if state.gone {
                return Err(Self::gone());
            }
            let Some((found, mapped)) = state.pages.range(page..range.end).next() else {
                return Ok(resident);
            };
            if mapped.frame.is_some() && is_wanted(mapped) {
                resident.add(PageRange::around(*found, 1));
            }
            page = found.plus(1);
        }
    }
}

impl Process for Inspector {
    fn resident(&self, range: PageRange) -> io::Result<RangeSet> {
        self.pages_with(range, |_| true)
    }

    fn zero_pages(&self, range: PageRange) -> io::Result<RangeSet> {
        self.pages_with(range, |mapped| matches!(mapped.frame, Some(Frame::Zero)))
    }

    fn accessed(&self, range: PageRange) -> io::Result<RangeSet> {
        self.pages_with(range, |mapped| {
            mapped.registered == Registered::Tracked && !mapped.protected
        })
    }

    fn copy_out(&self, addresses: &[u64], target: &mut [u8]) -> io::Result<usize> {
        for (index, address) in addresses.iter().enumerate() {
            interleave();
            let page = VirtualPage::containing(*address);
            let mut state = self.0.state();
            let gone = state.gone;
            let frame = state.pages.get_mut(&page).and_then(|mapped| {
                if mapped.registered == Registered::No {
                    // This reads as the program does.
                    mapped.frame.get_or_insert(Frame::Zero);
                }
                mapped.frame.as_ref()
            });
            let Some(frame) = frame else {
                return match index {
                    0 if gone => Err(Self::gone()),
                    0 => Err(io::Error::from_raw_os_error(libc::EIO)),
                    _ => Ok(index),
                };
            };
            spread(frame.tag(), &mut target[index * PAGE_SIZE..][..PAGE_SIZE]);
        }
        Ok(addresses.len())
    }

    fn released(&self) -> Option<bool> {
        Some(self.0.state().gone)
    }

    /// Each `madvise` in progress is a thread, which is seen to have run for long only once it holds `mmap_lock`.
    /// What other threads do cannot be told from what ones do that are done with theirs.
    fn threads(&self) -> io::Result<Vec<ThreadSample>> {
        interleave();
        let state = self.0.state();
        if state.gone {
            return Err(Self::gone());
        }
        let thread = |call: &Dropping| ThreadSample {
            id: call.number as i32,
            started: 0,
            is_interruptible: false,
            cpu_ticks: if call.is_locked { 100 } else { 0 },
        };
        Ok(state.dropping.iter().map(thread).collect())
    }

    fn shares_memory(&self) -> io::Result<bool> {
        Ok(false)
    }

    fn vmas(&self) -> io::Result<Vec<VirtualMemoryArea>> {
        interleave();
        let areas = self.areas(|_| true);
        let area = |(range, own, _): &(PageRange, bool, bool)| VirtualMemoryArea {
            start: range.start.address(),
            end: range.end.address(),
            kind: if *own {
                AreaKind::Private
            } else {
                AreaKind::Movable
            },
        };
        Ok(areas.iter().map(area).collect())
    }

    fn guard_regions(&self, _: PageRange) -> io::Result<Vec<PageRange>> {
        Ok(Vec::new())
    }

    fn mapping_around(&self, page: VirtualPage) -> io::Result<Option<(u64, u64)>> {
        interleave();
        let found = self.areas(|_| true).into_iter();
        let range = { found }
            .map(|(range, ..)| range)
            .find(|range| range.contains(page));
        Ok(range.map(|range| (range.start.address(), range.end.address())))
    }

    fn inherited(&self, by: InheritedBy) -> io::Result<Vec<InheritedRange>> {
        interleave();
        if self.0.state().gone {
            return Err(Self::gone());
        }
        let areas = self.areas(|mapped| match by {
            InheritedBy::Registration => mapped.registered != Registered::No,
            InheritedBy::Mark => mapped.marked,
        });
        let area = |(range, own, _): &(PageRange, bool, bool)| InheritedRange {
            start: range.start.address(),
            end: range.end.address(),
            wiped: false,
            movable: !own,
        };
        Ok(areas.iter().map(area).collect())
    }
}

impl Inspector {
    /// The VMAs that are registered so: range, whether it is the helper's, whether anything is resident.
    fn areas(&self, wanted: impl Fn(&Mapped) -> bool) -> Vec<(PageRange, bool, bool)> {
        let state = self.0.state();
        let mut areas: Vec<(PageRange, bool, bool)> = Vec::new();
        let mut last = None;
        for (page, mapped) in &state.pages {
            if !wanted(mapped) {
                continue;
            }
            let kind = mapped.kind();
            let resident = matches!(mapped.frame, Some(Frame::Page(_)));
            match areas.last_mut() {
                Some((range, _, any)) if range.end == *page && last == Some(kind) => {
                    range.end = page.plus(1);
                    *any |= resident;
                }
                _ => areas.push((PageRange::around(*page, 1), mapped.own, resident)),
            }
            last = Some(kind);
        }
        areas
    }
}
