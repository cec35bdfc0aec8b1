//! What becomes of address spaces that outlive the supervisor: their faults are handled no more.
//!
//! Programs that have a helper, or are guarded by their process, end at once. What is left after [`PATIENCE`] is a process
//! of which nothing but its userfaultfd is known: the number of a thread that its faults name may be another's by now.
//! So the kernel ends it where it faults: the missing page becomes one whose access is a `SIGBUS`. A program that
//! catches this signal never gets further than that either, and never reads zeros. What its other events wait for, a fork
//! or a change of its mappings, goes on. A forked child is held as its parent is.

use super::{HELPERS_TIME, Kind, List, POLLIN, SPACE, each, pause, poll};
use crate::PAGE_SIZE;
use crate::addresses::END;
use crate::errno::Errno;
use crate::uffd::{EVENT_FORK, EVENT_PAGEFAULT, FAULT_PROTECTED, Message, Uffd};
use core::sync::atomic::Ordering;

/// Looks, ten a second, in the time that helpers have to end their programs with a message.
const PATIENCE: u32 = 10 * HELPERS_TIME as u32;
/// Messages of an address space that are taken at a look. More delays the others if one faults without end, as it may
/// where it catches the signal.
const TAKEN: usize = 64;

/// Waits until all address spaces on the list are gone, and ends what faults there.
pub(super) fn see_them_gone(list: &'static List) {
    let mut looks = 0;
    loop {
        let mut is_any_left = false;
        each(list, |uffd, kind| {
            if kind == Kind::Space && !Uffd(uffd).is_gone() {
                is_any_left = true;
                if looks == PATIENCE {
                    wake_all(Uffd(uffd));
                }
                if looks >= PATIENCE {
                    end_faults(Uffd(uffd), list);
                }
            }
        });
        if !is_any_left {
            return;
        }
        looks = (looks + 1).min(PATIENCE + 1);
        pause();
    }
}

/// Has threads fault again whose messages the supervisor read.
fn wake_all(uffd: Uffd) {
    // The lowest address that may be mapped is a setting, and where addresses end depends on the kernel.
    for first in [PAGE_SIZE as u64, 1 << 16, 1 << 20] {
        for last in [END, 1 << 42, 1 << 39] {
            let end = last - PAGE_SIZE as u64;
            if uffd.wake(first, end - first).is_ok() {
                return;
            }
        }
    }
}

/// Ends what waits for a page, and lets all else go on.
fn end_faults(uffd: Uffd, list: &'static List) {
    for _ in 0..TAKEN {
        // A descriptor that the program has made wait is never ready; a message that comes with a descriptor needs a place.
        let Some(place) = list.free_place() else {
            return;
        };
        let mut message = [Message::default()];
        if poll(uffd.0, Some(0)) != (1, POLLIN) || uffd.read_now(&mut message) != Ok(1) {
            return;
        }
        let [message] = message;
        match message.event {
            EVENT_PAGEFAULT => end_fault(uffd, &message),
            EVENT_FORK => {
                let child = message.fork_descriptor();
                place.store(child | SPACE, Ordering::SeqCst);
            }
            _ => {}
        }
    }
}

fn end_fault(uffd: Uffd, message: &Message) {
    let page = message.fault_address();
    let ended = if message.fault_flags() & FAULT_PROTECTED == 0 {
        uffd.poison(page)
    } else {
        // The page is there, and is the program's own.
        uffd.unprotect(page, PAGE_SIZE as u64)
    };
    match ended {
        // Woken by the call; or, before Linux 6.6, left to wait.
        Ok(()) | Err(Errno::EINVAL) => {}
        // It has changed meanwhile: the thread looks again.
        Err(_) => drop(uffd.wake(page, PAGE_SIZE as u64)),
    }
}
