//! The context of a signal, and a switch of stacks.

/// The general registers in a signal's context, up to the records that follow them.
#[repr(C)]
struct Context {
    flags: u64,
    link: usize,
    stack: [usize; 3],
    /// Room for 1024 signals.
    mask: [u64; 16],
    /// 16-byte aligned.
    machine: Machine,
}

#[repr(C, align(16))]
struct Machine {
    fault_address: u64,
    registers: [u64; 31],
    stack_pointer: u64,
    program_counter: u64,
    state: u64,
    records: Records,
}

/// A sequence of records, each of which begins with a mark and its length in bytes; one of length 0 ends it.
#[repr(C, align(16))]
struct Records([u8; RECORDS]);

const RECORDS: usize = 4096;

/// Whether a fault was raised by the fetch of an instruction.
///
/// # Safety
/// `context` is what the kernel gave a handler of SIGSEGV.
pub unsafe fn is_fetch(context: *const libc::c_void) -> bool {
    // SAFETY: the caller's promise.
    let records = unsafe { &(*context.cast::<Context>()).machine.records.0 };
    syndrome(records).is_some_and(is_of_fetch)
}

/// The stack pointer of what a signal interrupted.
///
/// # Safety
/// `context` is what the kernel gave a handler.
pub unsafe fn stack_pointer(context: *const libc::c_void) -> usize {
    // SAFETY: the caller's promise.
    unsafe { (*context.cast::<Context>()).machine.stack_pointer as usize }
}

/// Whether an exception syndrome (`ESR_EL1`) is of an instruction abort.
fn is_of_fetch(syndrome: u64) -> bool {
    const CLASS_SHIFT: u32 = 26;
    const INSTRUCTION_ABORT: u64 = 0x20;
    syndrome >> CLASS_SHIFT & 0x3f == INSTRUCTION_ABORT
}

/// The exception syndrome of a fault, which the kernel adds to its context.
fn syndrome(records: &[u8]) -> Option<u64> {
    const ESR_MAGIC: u32 = 0x4553_5201;
    let mut rest = records;
    loop {
        let mark = u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?);
        let length = u32::from_ne_bytes(rest.get(4..8)?.try_into().ok()?) as usize;
        if mark == ESR_MAGIC {
            return Some(u64::from_ne_bytes(rest.get(8..16)?.try_into().ok()?));
        }
        // Shorter than its own head, it is the end.
        rest = rest.get(length..).filter(|_| length >= 8)?;
    }
}

/// Calls `function(argument)` on another stack.
///
/// # Safety
/// `top` is the end of a mapped range, aligned to 16 bytes, that no other thread uses as a stack,
/// and is large enough. The function must not unwind.
#[inline(never)]
pub unsafe fn call_on_stack(
    top: *mut u8,
    function: extern "C" fn(*mut libc::c_void),
    argument: *mut libc::c_void,
) {
    // SAFETY: x20 is kept by the callee, so the old stack pointer comes back; everything else that a C
    // function may change is declared.
    unsafe {
        std::arch::asm!(
            "mov x20, sp",
            "mov sp, x9",
            "blr x10",
            "mov sp, x20",
            in("x9") top,
            in("x10") function,
            in("x0") argument,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_syndrome_is_found_behind_other_records() {
        let record = |mark: u32, words: &[u64]| {
            let length = 8 + 8 * words.len() as u32;
            let mut bytes = [mark.to_ne_bytes(), length.to_ne_bytes()].concat();
            bytes.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
            bytes
        };
        let fetch = record(0x4553_5201, &[0x8200_000f]);
        let vectors = record(0x4650_8001, &[0; 65]);
        let end = [0_u8; 16];
        let records = [&vectors[..], &fetch, &end].concat();
        assert_eq!(syndrome(&records), Some(0x8200_000f));
        assert!(is_of_fetch(0x8200_000f) && !is_of_fetch(0x9200_004f));
        assert_eq!(syndrome(&[&vectors[..], &end].concat()), None);
        assert_eq!(syndrome(&vectors), None);
    }

    #[test]
    fn the_records_are_where_the_c_library_has_them() {
        assert_eq!(
            std::mem::offset_of!(Context, machine),
            std::mem::offset_of!(libc::ucontext_t, uc_mcontext)
        );
    }
}
