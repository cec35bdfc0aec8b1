//! Maps an address to its area, without locks, for signal handlers.
//!
//! Areas cover whole granules of 2 MiB. A two-level table, like a page table, has the area of each
//! granule. Leaves are allocated on demand and never freed.

use super::area::Area;
use super::limits::GRANULE;
use memfold_sys::addresses;
use memfold_sys::fork::Owner;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

const FANOUT: usize = 1 << 13;
/// The root has all addresses at which the kernel maps regions, which ask for none.
const ROOT_FANOUT: usize = addresses::END as usize / GRANULE / FANOUT;

/// The area of a granule.
struct Place {
    area: AtomicPtr<Area>,
    /// The number of the process that the area belongs to, or of the last area's. Beside the pointer, as another thread may
    /// free the area at any time.
    owner: AtomicU64,
}

#[repr(transparent)]
struct Leaf([Place; FANOUT]);

impl Leaf {
    /// Allocated on the heap at once: it is too large for a stack.
    fn on_heap() -> Box<Leaf> {
        let empty = || Place {
            area: AtomicPtr::new(ptr::null_mut()),
            owner: AtomicU64::new(0),
        };
        let places: Vec<Place> = (0..FANOUT).map(|_| empty()).collect();
        let places = Box::into_raw(places.into_boxed_slice());
        // SAFETY: a leaf is laid out as the slice of as many places that this allocation holds.
        unsafe { Box::from_raw(places.cast::<Leaf>()) }
    }
}

static ROOT: [AtomicPtr<Leaf>; ROOT_FANOUT] =
    [const { AtomicPtr::new(ptr::null_mut()) }; ROOT_FANOUT];

fn place(address: usize, make: bool) -> Option<&'static Place> {
    let granule = address / GRANULE;
    let root = ROOT.get(granule / FANOUT)?;
    let mut leaf = root.load(Ordering::Acquire);
    if leaf.is_null() {
        if !make {
            return None;
        }
        let fresh = Box::into_raw(Leaf::on_heap());
        match root.compare_exchange(leaf, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => leaf = fresh,
            Err(other) => {
                // SAFETY: made above by `into_raw` of a box of the same type, and not published.
                drop(unsafe { Box::from_raw(fresh) });
                leaf = other;
            }
        }
    }
    // SAFETY: leaves are made above and never freed.
    Some(unsafe { &(*leaf).0[granule % FANOUT] })
}

fn granules(area: &Area) -> impl Iterator<Item = usize> {
    let end = area.address(area.pages);
    (area.start..end).step_by(GRANULE)
}

/// Enters an area, until [`remove`].
pub(super) fn insert(area: &Arc<Area>) {
    for address in granules(area) {
        if let Some(place) = place(address, true) {
            let owner = area.ledger.owner.number();
            // Before the area, which releases it: an area is never seen with the owner of the one before.
            place.owner.store(owner, Ordering::Relaxed);
            let area = Arc::as_ptr(area).cast_mut();
            place.area.store(area, Ordering::Release);
        }
    }
}

/// Removes an area. To be called before it is unmapped, so that a later mapping at its addresses is not
/// taken for it.
pub(super) fn remove(area: &Area) {
    for address in granules(area) {
        if let Some(place) = place(address, false) {
            place.area.store(ptr::null_mut(), Ordering::Release);
        }
    }
}

/// The area that an address belongs to. Takes no lock.
///
/// # Safety
/// The caller, or the code that it interrupted, is accessing this address. So if it is in a region, the
/// region is not dropped meanwhile.
pub(super) unsafe fn find(address: usize) -> Option<Arc<Area>> {
    let area = place(address, false)?.area.load(Ordering::Acquire);
    if area.is_null() {
        return None;
    }
    // SAFETY: the region holds its area, and is not dropped meanwhile (the caller's promise), so the
    // count is not zero.
    let area = unsafe {
        Arc::increment_strong_count(area);
        Arc::from_raw(area)
    };
    area.page_at(address).is_some().then_some(area)
}

/// Whether an address is in a granule of an area. Takes no lock.
pub(super) fn is_area(address: usize) -> bool {
    place(address, false).is_some_and(|place| !place.area.load(Ordering::Acquire).is_null())
}

/// Whether an address is in a granule of an area that a parent of this process mapped. Takes no lock.
pub(super) fn is_inherited_area(address: usize) -> bool {
    let process = Owner::this().number();
    place(address, false).is_some_and(|place| place.is_inherited(process))
}

impl Place {
    /// Whether a parent of the process with this number mapped an area here.
    fn is_inherited(&self, process: u64) -> bool {
        !self.area.load(Ordering::Acquire).is_null()
            && self.owner.load(Ordering::Relaxed) != process
    }
}

/// The granules of areas that a parent of this process mapped, as ranges of addresses.
pub(super) fn inherited() -> Vec<std::ops::Range<usize>> {
    let process = Owner::this().number();
    let mut found: Vec<std::ops::Range<usize>> = Vec::new();
    for (high, root) in ROOT.iter().enumerate() {
        let leaf = root.load(Ordering::Acquire);
        if leaf.is_null() {
            continue;
        }
        // SAFETY: leaves are never freed.
        for (low, place) in unsafe { &(*leaf).0 }.iter().enumerate() {
            if !place.is_inherited(process) {
                continue;
            }
            let start = (high * FANOUT + low) * GRANULE;
            match found.last_mut() {
                Some(last) if last.end == start => last.end += GRANULE,
                _ => found.push(start..start + GRANULE),
            }
        }
    }
    found
}
