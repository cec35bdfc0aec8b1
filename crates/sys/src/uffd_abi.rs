//! The userfaultfd interface against the kernel's headers. (A child of `uffd`, whose numbers are private.)

use super::*;
use crate::abi::{read_write, same_layout};
use linux_raw_sys::{general, ioctl};

#[test]
fn requests_have_the_kernels_numbers() {
    for (ours, theirs) in [
        (IOC_API, ioctl::UFFDIO_API),
        (IOC_REGISTER, ioctl::UFFDIO_REGISTER),
        (IOC_UNREGISTER, ioctl::UFFDIO_UNREGISTER),
        (IOC_WAKE, ioctl::UFFDIO_WAKE),
        (IOC_COPY, ioctl::UFFDIO_COPY),
        (IOC_ZEROPAGE, ioctl::UFFDIO_ZEROPAGE),
        (IOC_WRITEPROTECT, ioctl::UFFDIO_WRITEPROTECT),
        (IOC_CONTINUE, ioctl::UFFDIO_CONTINUE),
    ] {
        assert_eq!(ours, theirs as usize, "{theirs:#x}");
    }
    // linux-raw-sys has the number and the structure, not the request.
    let size = size_of::<general::uffdio_move>();
    let request = read_write(general::UFFDIO as u8, general::_UFFDIO_MOVE, size);
    assert_eq!(IOC_MOVE, request);
    let size = size_of::<general::uffdio_poison>();
    let request = read_write(general::UFFDIO as u8, general::_UFFDIO_POISON, size);
    assert_eq!(IOC_POISON, request);
    assert_eq!(IOC_NEW, (general::UFFDIO as usize) << 8);
    let flags = general::O_CLOEXEC | general::O_NONBLOCK;
    assert_eq!(CREATED, flags as usize);
}

#[test]
fn events_features_and_modes_have_the_kernels_numbers() {
    for (ours, theirs) in [
        (EVENT_PAGEFAULT, general::UFFD_EVENT_PAGEFAULT),
        (EVENT_FORK, general::UFFD_EVENT_FORK),
        (EVENT_REMAP, general::UFFD_EVENT_REMAP),
        (EVENT_REMOVE, general::UFFD_EVENT_REMOVE),
        (EVENT_UNMAP, general::UFFD_EVENT_UNMAP),
    ] {
        assert_eq!(u32::from(ours), theirs);
    }
    for (ours, theirs) in [
        (UFFD_API, general::UFFD_API),
        (
            FEATURE_WRITE_PROTECT,
            general::UFFD_FEATURE_PAGEFAULT_FLAG_WP,
        ),
        (FEATURE_EVENT_FORK, general::UFFD_FEATURE_EVENT_FORK),
        (FEATURE_EVENT_REMAP, general::UFFD_FEATURE_EVENT_REMAP),
        (FEATURE_EVENT_REMOVE, general::UFFD_FEATURE_EVENT_REMOVE),
        (FEATURE_EVENT_UNMAP, general::UFFD_FEATURE_EVENT_UNMAP),
        (FEATURE_SIGBUS, general::UFFD_FEATURE_SIGBUS),
        (FEATURE_THREAD_ID, general::UFFD_FEATURE_THREAD_ID),
        (FEATURE_EXACT_ADDRESS, general::UFFD_FEATURE_EXACT_ADDRESS),
        (FEATURE_POISON, general::UFFD_FEATURE_POISON),
        (FEATURE_MOVE, general::UFFD_FEATURE_MOVE),
        (FAULT_WRITE, general::UFFD_PAGEFAULT_FLAG_WRITE),
        (FAULT_PROTECTED, general::UFFD_PAGEFAULT_FLAG_WP),
        (REGISTER_MODE_MISSING, general::UFFDIO_REGISTER_MODE_MISSING),
        (REGISTER_MODE_WP, general::UFFDIO_REGISTER_MODE_WP),
        (MODE_DONTWAKE, general::UFFDIO_COPY_MODE_DONTWAKE),
        (MODE_DONTWAKE, general::UFFDIO_ZEROPAGE_MODE_DONTWAKE),
    ] {
        assert_eq!(ours, u64::from(theirs));
    }
}

#[test]
fn a_message_has_the_kernels_layout() {
    same_layout!(Message, general::uffd_msg, { event => event, arguments => arg });
    // Each kind of event as the accessors read it.
    type Fault = general::uffd_msg__bindgen_ty_1__bindgen_ty_1;
    assert_eq!(core::mem::offset_of!(Fault, flags), 0);
    assert_eq!(core::mem::offset_of!(Fault, address), 8);
    assert_eq!(core::mem::offset_of!(Fault, feat), 16);
    type Remap = general::uffd_msg__bindgen_ty_1__bindgen_ty_3;
    assert_eq!(core::mem::offset_of!(Remap, from), 0);
    assert_eq!(core::mem::offset_of!(Remap, to), 8);
    assert_eq!(core::mem::offset_of!(Remap, len), 16);
    type Range = general::uffd_msg__bindgen_ty_1__bindgen_ty_4;
    assert_eq!(core::mem::offset_of!(Range, start), 0);
    assert_eq!(core::mem::offset_of!(Range, end), 8);
}

/// The ioctls pass arrays of words: each field must lie at the index that is used.
#[test]
fn arguments_have_the_kernels_layout() {
    macro_rules! words {
        ($theirs:ident: $($field:ident at $index:expr),*; $words:expr) => {
            assert_eq!(size_of::<general::$theirs>(), $words * 8, stringify!($theirs));
            $(assert_eq!(
                core::mem::offset_of!(general::$theirs, $field),
                $index * 8,
                "{}.{}", stringify!($theirs), stringify!($field),
            );)*
        };
    }
    words!(uffdio_api: api at 0, features at 1; 3);
    words!(uffdio_range: start at 0, len at 1; 2);
    words!(uffdio_register: range at 0, mode at 2; 4);
    words!(uffdio_copy: dst at 0, src at 1, len at 2, mode at 3, copy at 4; 5);
    words!(uffdio_zeropage: range at 0, mode at 2, zeropage at 3; 4);
    words!(uffdio_writeprotect: range at 0, mode at 2; 3);
    words!(uffdio_continue: range at 0, mode at 2, mapped at 3; 4);
    words!(uffdio_poison: range at 0, mode at 2; 4);
    words!(uffdio_move: dst at 0, src at 1, len at 2, mode at 3, move_ at 4; 5);
}
