//! Forks of a program that no loader brought the library into, where the kernel does not report them.
//!
//! There is no `pthread_atfork` to call. The supervisor has changed the program's code where its C library makes the system
//! call: it jumps to a trampoline (`inject/trampoline.rs` of the pager), which calls the second entry (`entry.rs`). What is
//! done before and after the call is what the handlers do where a loader brought the library.

use crate::fork::{child, parent, prepare};
use crate::prepared::own_thread;
use crate::system;
use memfold_sys::raw::{nr, syscall};

/// Before the system call. Whether [`after`] is to be called.
pub extern "C" fn before() -> bool {
    // The thread that forks is known by its pointer, which a program without a C library may lack.
    if !system::is_filtered() {
        let pointer = thread_pointer();
        if pointer == 0 || pointer != own_thread() {
            return false;
        }
    }
    prepare();
    true
}

/// After it, in the parent and in the child, with what it has returned.
pub extern "C" fn after(result: isize) {
    if result == 0 {
        child();
    } else {
        parent();
    }
}

fn thread_pointer() -> usize {
    const ARCH_GET_FS: usize = 0x1003;
    let mut pointer = 0usize;
    // SAFETY: the kernel writes the word.
    unsafe {
        let place = &raw mut pointer as usize;
        syscall(nr::ARCH_PRCTL, [ARCH_GET_FS, place, 0, 0, 0, 0]);
    }
    pointer
}
