//! What the supervisor has written into the library's image: where it is, and how programs of the run are managed.

use memfold_sys::hello::{
    ALWAYS_STARTS_AT_ONCE, PATCHED, RENDEZVOUS_MARK, Rendezvous, SOCKET_PATH_MAX, STARTS_LATE,
    STARTS_LATE_AT,
};

/// What the supervisor writes into the image that it unpacks for the run: a [`Rendezvous`].
#[used]
static PATCHED_IN: [u8; PATCHED] = marked();

const fn marked() -> [u8; PATCHED] {
    let mut bytes = [0; PATCHED];
    let mut i = 0;
    while i < RENDEZVOUS_MARK.len() {
        bytes[i] = RENDEZVOUS_MARK[i];
        i += 1;
    }
    bytes
}

/// Part of what is patched in.
pub fn patched<const N: usize>(offset: usize) -> [u8; N] {
    let place = (&raw const PATCHED_IN).cast::<u8>();
    // SAFETY: the callers name parts of a live static; bytes of any value are numbers.
    unsafe { core::ptr::read_volatile(place.add(offset).cast()) }
}

/// Reads what is in the loaded image (the compiler knows only the unpatched one). Not to be copied: the compiler would
/// call a `memcpy` for that, and there is none.
pub fn rendezvous() -> Rendezvous {
    fn number<const N: usize>(offset: usize) -> [u8; N] {
        patched(SOCKET_PATH_MAX + offset)
    }
    let path = (&raw const PATCHED_IN).cast();
    Rendezvous {
        // SAFETY: reads the first part of a live static.
        socket_path: unsafe { core::ptr::read_volatile(path) },
        filters: u32::from_ne_bytes(number(0)),
        user: u32::from_ne_bytes(number(4)),
        pid: i32::from_ne_bytes(number(8)),
        user_namespace: u64::from_ne_bytes(number(12)),
        inspects_others: u32::from_ne_bytes(number(20)),
        carries: u32::from(carries()),
        starts_late: when_helpers_start(),
    }
}

/// Whether pages are carried off by `mremap`.
pub fn carries() -> bool {
    u32::from_ne_bytes(patched(SOCKET_PATH_MAX + 24)) != 0
}

/// Whether programs do without a helper until the supervisor has a thread of theirs start one (`entry.rs`), as most are
/// gone before that is worth it. The page is the file's: the supervisor's last word shows at once.
pub fn starts_late() -> bool {
    when_helpers_start() == STARTS_LATE
}

/// Whether the supervisor has yet to hear of a program that traces others: it may have programs start late from its next look
/// on.
pub fn may_start_late() -> bool {
    when_helpers_start() != ALWAYS_STARTS_AT_ONCE
}

fn when_helpers_start() -> u32 {
    u32::from_ne_bytes(patched(STARTS_LATE_AT))
}
