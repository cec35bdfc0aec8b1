//! Registering mappings with a program's userfaultfd.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::range_set::RangeSet;
use crate::supervised::kernel::{Inspector, Memory, Process};
use crate::supervised::registration::vma_scan::VmaScan;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::lock;
use memfold_sys::Errno;
use std::sync::atomic::Ordering;

impl AddressSpace {
    /// Registers a range for missing pages, and for tracking accesses or else for write protection.
    pub(crate) fn register(&self, range: PageRange) -> Result<(), Errno> {
        if self.resources.tracks_accesses() {
            match self.uffd().register_tracked(range) {
                // It may not be accessed now (`PROT_NONE`), or it was not when it was registered.
                Err(Errno::EINVAL | Errno::EBUSY) => {}
                registered => return registered,
            }
        }
        self.uffd().register_protectable(range)
    }
}

/// Registers mappings. `false` if they must be scanned again.
///
/// A range may count as managed only if it was registered before its resident pages were looked up:
/// a page moved out of unregistered memory is lost, because the kernel fills the hole with zeros.
/// The scan may be outdated, and the kernel registers whatever is mapped in a range; gaps may be
/// mapped without an event. So the range is checked afterwards to be one registered mapping. Only a
/// change with an event could have altered it in between, so no change may be in progress then.
///
/// Nor may a change be in progress before: a fork that has copied the mappings, but not queued its
/// event, would create a child whose page states say managed although its mappings are not
/// registered.
///
/// Ranges that were registered and do not count stay registered, because other memory may have
/// moved there. Unmanaged memory is never paged out, and its faults are served.
pub(crate) fn register(
    space: &AddressSpace,
    gate: &Exclusive<'_>,
    attached: &Attached,
    scan: &VmaScan,
) -> bool {
    debug_assert!(gate.is_of(space));
    if space.is_changing() {
        return false;
    }
    let uffd = space.uffd();
    if lock(&space.managed).ranges().is_empty()
        && uffd
            .register(PageRange::around(attached.arena.beacon, 1))
            .is_err()
    {
        return false;
    }
    let mut found = Vec::new();
    let mut complete = true;
    for range in &scan.unmanaged {
        if !is_still_mapped(attached, *range) {
            complete = false;
            continue;
        }
        for part in lock(&space.managed).uncovered(*range) {
            if let Err(errno) = space.register(part) {
                // It has another userfaultfd, or is of a kind that may have none, or is gone. Whatever else is wrong may
                // pass sooner.
                if matches!(errno, Errno::EBUSY | Errno::EINVAL | Errno::EPERM) {
                    lock(&space.refused).note(part);
                } else {
                    complete = false;
                }
                continue;
            }
            match space.present(part) {
                Ok(present) if uffd.is_registered(part) => found.push((part, present)),
                _ => complete = false,
            }
        }
    }
    if space.is_changing() {
        return false;
    }
    for (part, present) in found {
        for piece in scan.guards.uncovered(part) {
            note_present(space, gate, piece, &present);
            lock(&space.managed).add(piece);
            space.note_arrived(piece);
            space.protect_new(piece);
            protect_zeros(space, &attached.inspector, piece, &present);
        }
    }
    complete
}

/// Pages of zeros in a new range that may be written without waiting for room. More spares looking for them in small ranges,
/// and exceeds the limit by more.
const UNSEEN_ZEROS: u64 = 256;
/// Requests that protect them, one for each part without other pages. More take longer at registration, and protect more
/// where such pages and others alternate.
const MOST_REQUESTS: usize = 1024;

/// Protects the pages of zeros in a range that becomes managed: what was read before, which the kernel copies as it is written.
fn protect_zeros(
    space: &AddressSpace,
    inspector: &Inspector,
    piece: PageRange,
    present: &RangeSet,
) {
    let present = present.covered(piece);
    if present.iter().map(|run| run.pages()).sum::<u64>() <= UNSEEN_ZEROS {
        return;
    }
    let Ok(zeros) = inspector.zero_pages(piece) else {
        return;
    };
    if zeros.pages() <= UNSEEN_ZEROS {
        return;
    }
    for part in parts_of_zeros(piece, &present, &zeros) {
        space.protect_zeros(part);
    }
}

/// Protects the pages of zeros of a program that a tracer held: it was allowed all writes meanwhile.
pub(crate) fn protect_zeros_again(space: &AddressSpace) {
    let protects_zeros = space.cow.protects_zeros.load(Ordering::Relaxed);
    let Some(inspector) = space.inspector().filter(|_| protects_zeros) else {
        return;
    };
    let ranges = lock(&space.managed).ranges().to_vec();
    for range in ranges {
        if let Ok(present) = inspector.resident(range) {
            protect_zeros(space, &inspector, range, &present);
        }
    }
}

/// The parts of a range with pages of zeros and no other pages, the fullest ones if there are too many.
fn parts_of_zeros(piece: PageRange, present: &[PageRange], zeros: &RangeSet) -> Vec<PageRange> {
    let others = present.iter().flat_map(|run| zeros.uncovered(*run));
    let others: RangeSet = others.collect();
    let number = |part: PageRange| {
        zeros
            .covered(part)
            .iter()
            .map(|run| run.pages())
            .sum::<u64>()
    };
    let parts = others.uncovered(piece).into_iter();
    let mut parts: Vec<(u64, PageRange)> = parts.map(|part| (number(part), part)).collect();
    parts.retain(|(zeros, _)| *zeros > 0);
    parts.sort_by_key(|(zeros, _)| std::cmp::Reverse(*zeros));
    parts.truncate(MOST_REQUESTS);
    parts.into_iter().map(|(_, part)| part).collect()
}

/// Whether a range still lies in one mapping, as far as the kernel reports it. Registering a part of a
/// mapping splits it, and mremap fails on a split mapping.
fn is_still_mapped(attached: &Attached, range: PageRange) -> bool {
    match attached.inspector.mapping_around(range.start) {
        Ok(Some((start, end))) => start <= range.start.address() && range.end.address() <= end,
        Ok(None) => false,
        Err(_) => true,
    }
}

/// Sets the page states of resident pages of a range that becomes managed.
fn note_present(space: &AddressSpace, gate: &Exclusive<'_>, piece: PageRange, present: &RangeSet) {
    let note = |range: PageRange, state: PageState| {
        for page in range.start.0..range.end.0 {
            let entry = gate.table().entry(VirtualPage(page));
            entry.replace(PageState::Hole, state);
        }
    };
    let present = present.covered(piece);
    if !Bug::DropUnknownWhereUnmanaged.is_back()
        && let Some((ranges, removal)) =
            lock(&space.removed.unmanaged).pending(space.resources.seconds())
    {
        let removed = present.iter().flat_map(|range| ranges.covered(*range));
        removed.for_each(|range| note(range, PageState::Removed(removal)));
    }
    let state = PageState::Resident {
        skips: 0,
        shared: space.fork.forked.load(Ordering::Relaxed),
    };
    present.into_iter().for_each(|range| note(range, state));
}
