//! Which area an address belongs to: asked in signal handlers, so without locks.
//!
//! Areas cover whole granules of 2 MiB. A table of two levels, as the hardware's, says whose each
//! granule is. Its leaves are made when they are first needed and stay.

use super::area::{Area, GRANULE};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

const FANOUT: usize = 1 << 13;
const ADDRESS_BITS: u32 = 47;
const _: () = assert!(FANOUT * FANOUT * GRANULE == 1 << ADDRESS_BITS);

#[repr(transparent)]
struct Leaf([AtomicPtr<Area>; FANOUT]);

impl Leaf {
    /// Made in place: it is too large for a stack.
    fn on_heap() -> Box<Leaf> {
        let words: Vec<AtomicPtr<Area>> = (0..FANOUT)
            .map(|_| AtomicPtr::new(ptr::null_mut()))
            .collect();
        let words = Box::into_raw(words.into_boxed_slice());
        // SAFETY: a leaf is laid out as the slice of as many words that this allocation holds.
        unsafe { Box::from_raw(words.cast::<Leaf>()) }
    }
}

static ROOT: [AtomicPtr<Leaf>; FANOUT] = [const { AtomicPtr::new(ptr::null_mut()) }; FANOUT];

fn place(address: usize, make: bool) -> Option<&'static AtomicPtr<Area>> {
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
                // SAFETY: made above by `into_raw` of a box of the same layout, shown to nobody.
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

/// Makes the area known, until [`remove`].
pub fn insert(area: &Arc<Area>) {
    for address in granules(area) {
        if let Some(place) = place(address, true) {
            place.store(Arc::as_ptr(area).cast_mut(), Ordering::Release);
        }
    }
}

/// Forgets the area. To be called before it is unmapped, so that nobody else's address can be taken
/// for one of it.
pub fn remove(area: &Area) {
    for address in granules(area) {
        if let Some(place) = place(address, false) {
            place.store(ptr::null_mut(), Ordering::Release);
        }
    }
}

/// The area that an address belongs to. Takes no lock.
///
/// # Safety
/// The caller, or the code that it interrupted, is using the region at this address if there is
/// one, so that nobody drops it.
pub unsafe fn find(address: usize) -> Option<Arc<Area>> {
    let area = place(address, false)?.load(Ordering::Acquire);
    if area.is_null() {
        return None;
    }
    // SAFETY: known areas are held by their region, which nobody drops meanwhile (the caller's
    // promise), so the count is not zero.
    let area = unsafe {
        Arc::increment_strong_count(area);
        Arc::from_raw(area)
    };
    area.page_at(address).is_some().then_some(area)
}
