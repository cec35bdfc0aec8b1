#![doc = include_str!("../README.md")]

mod remote;

use ::memfold::{
    Algorithm, Error, Memfold, Mode, PinnedDetached, Region, Stats, guard_inherited, handle_signal,
    is_inherited_region, reinstall_handlers,
};
use memfold_sys::fork::PerProcess;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The version of this header: the first number.
pub const MEMFOLD_VERSION_MAJOR: u32 = 0;
/// The second number.
pub const MEMFOLD_VERSION_MINOR: u32 = 1;
/// The third number.
pub const MEMFOLD_VERSION_PATCH: u32 = 0;
/// An argument is invalid.
pub const MEMFOLD_ERROR_ARGUMENT: c_int = -1;
/// The host does not allow the mode.
pub const MEMFOLD_ERROR_UNAVAILABLE: c_int = -2;
/// The kernel refused a system call.
pub const MEMFOLD_ERROR_SYSTEM: c_int = -3;
/// The limit has no room.
pub const MEMFOLD_ERROR_LIMIT: c_int = -4;
/// The calling process is a forked child of the one that made the limit.
pub const MEMFOLD_ERROR_FORKED: c_int = -5;
/// The store on other machines cannot be used.
pub const MEMFOLD_ERROR_REMOTE: c_int = -6;

/// Signal mode where the host allows userfaultfd, else protection mode.
pub const MEMFOLD_MODE_AUTO: u32 = 0;
/// Faults are served in the faulting thread, by a SIGBUS handler.
pub const MEMFOLD_MODE_SIGNAL: u32 = 1;
/// Faults are served by a thread; system calls work on missing pages.
pub const MEMFOLD_MODE_THREAD: u32 = 2;
/// Faults are served in the faulting thread, by a SIGSEGV handler, without userfaultfd.
pub const MEMFOLD_MODE_PROTECTION: u32 = 3;

/// LZ4: the fastest.
pub const MEMFOLD_ALGORITHM_LZ4: u32 = 0;
/// Zstandard: smaller, slower.
pub const MEMFOLD_ALGORITHM_ZSTD: u32 = 1;

/// Swap the range in before it is touched, as far as there is room: `MADV_WILLNEED`. Pages on other machines stay there.
pub const MEMFOLD_PREFETCH: c_int = 0;
/// Reclaim moves the range out first: `MADV_COLD`.
pub const MEMFOLD_MARK_COLD: c_int = 1;
/// Move the range out now: `MADV_PAGEOUT`.
pub const MEMFOLD_PAGE_OUT: c_int = 2;
/// Discard the contents of the range, which reads as zeros then: `MADV_DONTNEED`. No other thread may
/// access the range until the call returns.
pub const MEMFOLD_DISCARD: c_int = 3;

/// A limit on memory.
#[derive(Debug)]
#[allow(non_camel_case_types, reason = "the name in C")]
pub struct memfold(Memfold);

/// Options of a limit. Zero in all members but `size` means the defaults.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types, reason = "the name in C")]
pub struct memfold_options {
    /// `sizeof(memfold_options)`.
    pub size: usize,
    /// The most bytes of memory for everything; 0 for half of what the host allows, unless
    /// `resident_limit_bytes` is given.
    pub limit_bytes: u64,
    /// The most bytes of regions that may be resident; 0 for no such limit.
    pub resident_limit_bytes: u64,
    /// One of `MEMFOLD_MODE_`.
    pub mode: u32,
    /// One of `MEMFOLD_ALGORITHM_`.
    pub algorithm: u32,
    /// Not 0: keep no checksums.
    pub no_checksum: u32,
    /// Not 0: do not read ahead.
    pub no_readahead: u32,
    /// Where pages go once the compressed ones take half of `limit_bytes`: to Valkey or Redis, such as
    /// `"valkey://10.0.0.7"`, with further nodes behind commas, `valkeys://` for TLS. Null for nowhere.
    /// These strings are copied, and read only if this one is given. A program that waits for a page
    /// longer than `remote_timeout_seconds`, or is returned another one, is aborted.
    pub remote: *const c_char,
    /// The user there, or null.
    pub remote_user: *const c_char,
    /// The password, or null.
    pub remote_password: *const c_char,
    /// The authorities that the servers of `valkeys://` are checked against, in PEM; null for the host's.
    pub remote_ca_certificates: *const c_char,
    /// Replicas that must have a page before it counts as stored, beside the primary.
    pub remote_replicas: u32,
    /// How long a program waits for a page; 0 for 60.
    pub remote_timeout_seconds: u32,
    /// The store forgets what was not renewed for as long; 0 for 3600. At least twice the timeout, and from 10 to 2678400.
    pub remote_time_to_live_seconds: u64,
}

/// Statistics of a limit.
///
/// In the header each of `values` is a member with the name and the description that
/// `Stats::FIELDS` has for it: the same layout, as all of them are `uint64_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types, reason = "the name in C")]
pub struct memfold_stats {
    /// `sizeof(memfold_stats)`, to be set before the call.
    pub size: usize,
    /// The mode of the limit: one of `MEMFOLD_MODE_`.
    pub mode: u32,
    /// The numbers, in the order of `Stats::FIELDS`.
    pub values: [u64; Stats::FIELDS.len()],
}

thread_local!(static MESSAGE: RefCell<CString> = RefCell::default());

/// The regions of C programs that this process mapped, by address, and their pins.
#[derive(Default)]
struct Regions {
    by_address: BTreeMap<usize, Arc<Region>>,
    pins: BTreeMap<(usize, usize), Vec<PinnedDetached>>,
}

static REGIONS: PerProcess<Mutex<Regions>> = PerProcess::new();

fn regions() -> MutexGuard<'static, Regions> {
    let regions = REGIONS.get_or_make(Mutex::default);
    regions.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(code: c_int, message: &str) -> c_int {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // The message is gone where a destructor of the ending thread (`pthread_key_create`) fails.
    let _ = MESSAGE.try_with(|place| *place.borrow_mut() = message);
    code
}

/// The status of what returns nothing else, and cannot be done for the kernel's reasons alone.
fn done(result: Result<(), impl std::fmt::Display>, cannot: &str) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => fail(MEMFOLD_ERROR_SYSTEM, &format!("{cannot}: {error}")),
    }
}

fn fail_with(error: &Error) -> c_int {
    let code = match error {
        Error::LimitTooSmall { .. }
        | Error::Length(_)
        | Error::OutOfRange { .. }
        | Error::RemoteOptions(_) => MEMFOLD_ERROR_ARGUMENT,
        Error::Remote(_) => MEMFOLD_ERROR_REMOTE,
        Error::ModeUnavailable { .. } => MEMFOLD_ERROR_UNAVAILABLE,
        Error::TooMuchPinned { .. } => MEMFOLD_ERROR_LIMIT,
        Error::Forked => MEMFOLD_ERROR_FORKED,
        _ => MEMFOLD_ERROR_SYSTEM,
    };
    fail(code, &with_causes(error))
}

fn with_causes(error: &Error) -> String {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        message.push_str(&format!(": {error}"));
        cause = error.source();
    }
    message
}

/// Whether a structure of this size is a `T`, or the shorter one of an older header.
fn is_size_of<T>(size: usize) -> bool {
    (size_of::<usize>()..=size_of::<T>()).contains(&size)
}

fn mode_number(mode: Mode) -> u32 {
    match mode {
        Mode::Signal => MEMFOLD_MODE_SIGNAL,
        Mode::Thread => MEMFOLD_MODE_THREAD,
        Mode::Protection => MEMFOLD_MODE_PROTECTION,
        _ => MEMFOLD_MODE_AUTO,
    }
}

/// # Safety
/// The strings of the options are null or end with a zero byte.
unsafe fn build(options: &memfold_options) -> Result<Memfold, c_int> {
    let mut builder = Memfold::builder()
        .checksum(options.no_checksum == 0)
        .readahead(options.no_readahead == 0);
    if options.limit_bytes != 0 {
        builder = builder.limit(options.limit_bytes);
    }
    if options.resident_limit_bytes != 0 {
        builder = builder.resident_limit(options.resident_limit_bytes);
    }
    builder = match options.mode {
        MEMFOLD_MODE_AUTO => builder,
        MEMFOLD_MODE_SIGNAL => builder.mode(Mode::Signal),
        MEMFOLD_MODE_THREAD => builder.mode(Mode::Thread),
        MEMFOLD_MODE_PROTECTION => builder.mode(Mode::Protection),
        _ => {
            return Err(fail(
                MEMFOLD_ERROR_ARGUMENT,
                "options.mode is not one of MEMFOLD_MODE_",
            ));
        }
    };
    builder = match options.algorithm {
        MEMFOLD_ALGORITHM_LZ4 => builder.algorithm(Algorithm::Lz4),
        MEMFOLD_ALGORITHM_ZSTD => builder.algorithm(Algorithm::Zstd),
        _ => {
            return Err(fail(
                MEMFOLD_ERROR_ARGUMENT,
                "options.algorithm is not one of MEMFOLD_ALGORITHM_",
            ));
        }
    };
    // SAFETY: the caller's promise.
    if let Some(store) = unsafe { remote::store(options) }? {
        builder = builder.remote(store);
    }
    builder.build().map_err(|error| fail_with(&error))
}

/// Makes a limit, and stores it in `*made`. `options` may be null for the defaults.
///
/// # Safety
/// `options` is null or points to as many bytes as its `size` says, and its strings end with a zero byte;
/// `made` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_new(
    options: *const memfold_options,
    made: *mut *mut memfold,
) -> c_int {
    if made.is_null() {
        return fail(MEMFOLD_ERROR_ARGUMENT, "made is a null pointer");
    }
    let mut given = memfold_options {
        size: size_of::<memfold_options>(),
        limit_bytes: 0,
        resident_limit_bytes: 0,
        mode: MEMFOLD_MODE_AUTO,
        algorithm: MEMFOLD_ALGORITHM_LZ4,
        no_checksum: 0,
        no_readahead: 0,
        remote: ptr::null(),
        remote_user: ptr::null(),
        remote_password: ptr::null(),
        remote_ca_certificates: ptr::null(),
        remote_replicas: 0,
        remote_timeout_seconds: 0,
        remote_time_to_live_seconds: 0,
    };
    if !options.is_null() {
        // SAFETY: the caller's promise; the size is the first field.
        unsafe {
            let size = (*options).size;
            if !is_size_of::<memfold_options>(size) {
                return fail(
                    MEMFOLD_ERROR_ARGUMENT,
                    "options.size is not that of a memfold_options: set it to sizeof",
                );
            }
            ptr::copy_nonoverlapping(options.cast::<u8>(), (&raw mut given).cast::<u8>(), size);
        }
    }
    // SAFETY: the caller's promise, as the strings are among the bytes.
    match unsafe { build(&given) } {
        Ok(one) => {
            // SAFETY: the caller's promise.
            unsafe { *made = Box::into_raw(Box::new(memfold(one))) };
            0
        }
        Err(code) => code,
    }
}

/// Frees a limit. Its regions stay mapped until they are unmapped. Null is ignored.
///
/// # Safety
/// `limit` came from [`memfold_new`] and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_free(limit: *mut memfold) {
    if !limit.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(limit) });
    }
}

/// Maps a region of `length` bytes, which reads as zeros, and stores its address in `*start`.
///
/// # Safety
/// `limit` came from [`memfold_new`]; `start` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_map(
    limit: *mut memfold,
    length: usize,
    start: *mut *mut c_void,
) -> c_int {
    if limit.is_null() || start.is_null() {
        return fail(MEMFOLD_ERROR_ARGUMENT, "a null pointer");
    }
    // SAFETY: the caller's promise.
    match unsafe { &*limit }.0.map(length) {
        Ok(region) => {
            let address = region.base().as_ptr();
            let region = Arc::new(region);
            regions().by_address.insert(address as usize, region);
            // SAFETY: the caller's promise.
            unsafe { *start = address.cast() };
            0
        }
        Err(error) => fail_with(&error),
    }
}

/// Unmaps a region that [`memfold_map`] mapped, and ends its pins. Its pages in the pool are released
/// in the background.
///
/// # Safety
/// No thread accesses the region any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_unmap(start: *mut c_void) -> c_int {
    let region = {
        let mut all = regions();
        let Some(region) = all.by_address.remove(&(start as usize)) else {
            if is_inherited_region(start as usize) {
                // It is unmapped here.
                return 0;
            }
            return fail(
                MEMFOLD_ERROR_ARGUMENT,
                "no region starts at this address: give the one that memfold_map returned",
            );
        };
        let end = start as usize + region.len();
        all.pins
            .retain(|(address, _), _| !(start as usize..end).contains(address));
        region
    };
    drop(region);
    0
}

/// The region that holds an address, and the offset in it.
fn region_at(address: usize) -> Option<(Arc<Region>, usize)> {
    let all = regions();
    let (start, region) = all.by_address.range(..=address).next_back()?;
    let offset = address - start;
    (offset < region.len()).then(|| (region.clone(), offset))
}

fn at<R>(
    start: *mut c_void,
    length: usize,
    run: impl FnOnce(&Region, std::ops::Range<usize>) -> Result<R, Error>,
) -> Result<R, c_int> {
    let Some((region, offset)) = region_at(start as usize) else {
        if is_inherited_region(start as usize) {
            return Err(fail_with(&Error::Forked));
        }
        return Err(fail(MEMFOLD_ERROR_ARGUMENT, "the address is in no region"));
    };
    let range = offset..offset.saturating_add(length);
    run(&region, range).map_err(|error| fail_with(&error))
}

/// Advises on a range of a region. `advice` is one of `MEMFOLD_PREFETCH`, `MEMFOLD_MARK_COLD`,
/// `MEMFOLD_PAGE_OUT` and `MEMFOLD_DISCARD`.
///
/// # Safety
/// For `MEMFOLD_DISCARD`, no other thread accesses the range until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_advise(start: *mut c_void, length: usize, advice: c_int) -> c_int {
    let done = at(start, length, |region, range| match advice {
        MEMFOLD_PREFETCH => region.prefetch(range),
        MEMFOLD_MARK_COLD => region.mark_cold(range),
        MEMFOLD_PAGE_OUT => region.page_out(range).map(drop),
        // SAFETY: the caller's promise.
        MEMFOLD_DISCARD => unsafe { region.discard_shared(range) },
        _ => Ok(()),
    });
    match done {
        Err(code) => code,
        Ok(()) if (MEMFOLD_PREFETCH..=MEMFOLD_DISCARD).contains(&advice) => 0,
        Ok(()) => fail(
            MEMFOLD_ERROR_ARGUMENT,
            "advice is not MEMFOLD_PREFETCH, _MARK_COLD, _PAGE_OUT or _DISCARD",
        ),
    }
}

/// Swaps a range in and keeps it resident until [`memfold_unpin`] was called for it as often as this.
/// In signal and protection mode, pin a range before a system call reads or writes it.
///
/// # Safety
/// `start` is only compared with the addresses of regions: any value is sound.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_pin(start: *mut c_void, length: usize) -> c_int {
    match at(start, length, Region::pin_detached) {
        Ok(pin) => {
            let key = (start as usize, length);
            regions().pins.entry(key).or_default().push(pin);
            0
        }
        Err(code) => code,
    }
}

/// Ends one pin of exactly this range.
///
/// # Safety
/// No system call uses the range any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_unpin(start: *mut c_void, length: usize) -> c_int {
    let key = (start as usize, length);
    let mut all = regions();
    let Some(pins) = all.pins.get_mut(&key) else {
        if is_inherited_region(start as usize) {
            return 0;
        }
        return fail(MEMFOLD_ERROR_ARGUMENT, "this range is not pinned");
    };
    let pin = pins.pop();
    if pins.is_empty() {
        all.pins.remove(&key);
    }
    drop(all);
    drop(pin);
    0
}

/// Stores the statistics of a limit in `*stats`, whose `size` must be set.
///
/// # Safety
/// `limit` came from [`memfold_new`]; `stats` can be written, as many bytes as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_get_stats(
    limit: *const memfold,
    stats: *mut memfold_stats,
) -> c_int {
    if limit.is_null() || stats.is_null() {
        return fail(MEMFOLD_ERROR_ARGUMENT, "a null pointer");
    }
    // SAFETY: the caller's promise.
    let (now, size) = unsafe { ((*limit).0.stats(), (*stats).size) };
    if !is_size_of::<memfold_stats>(size) {
        return fail(
            MEMFOLD_ERROR_ARGUMENT,
            "stats.size is not that of a memfold_stats: set it to sizeof",
        );
    }
    let filled = memfold_stats {
        size,
        mode: mode_number(now.mode),
        values: now.values(),
    };
    // SAFETY: the caller's promise; `size` is at most that of `filled`.
    unsafe {
        ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), stats.cast::<u8>(), size);
    }
    0
}

/// Serves a fault from a SIGBUS or SIGSEGV handler that the program installed after it made its first
/// limit. Returns 1 if the fault was on a region: the handler must return then. Returns 0 if it was
/// not. Preserves `errno`, and blocks all signals meanwhile.
///
/// # Safety
/// `info` is the `siginfo_t` that the kernel passed to the handler. (Strict C has no such type.)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_handle_signal(info: *const c_void) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(unsafe { handle_signal(info.cast()) })
}

/// Returns 1 if the kernel calls the library's handler for the signal of the limit's mode, or the mode has none; 0 if the
/// program, or another library, has installed one since, which must pass faults on by [`memfold_handle_signal`].
///
/// # Safety
/// `limit` came from [`memfold_new`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_is_handler_installed(limit: *const memfold) -> c_int {
    if limit.is_null() {
        return fail(MEMFOLD_ERROR_ARGUMENT, "a null pointer");
    }
    // SAFETY: the caller's promise.
    c_int::from(unsafe { (*limit).0.is_handler_installed() })
}

/// Puts the library's handlers above those that the program, or a library of it, has installed since and that pass no
/// faults on. Faults that are on no region go to these, and from there to what was installed first.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_reinstall_handlers() -> c_int {
    done(reinstall_handlers(), "cannot install the signal handlers")
}

/// The version of the library that is linked, such as "0.1.0". `MEMFOLD_VERSION_MAJOR` and so on are the
/// header's.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// To be called in a forked child before it maps anything, as by `pthread_atfork`: nothing is mapped at
/// the addresses of the parent's regions, and an access to them ends the child with a message.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_guard_inherited() -> c_int {
    done(guard_inherited(), "cannot guard the parent's regions")
}

/// The message of the last failed call of this thread, valid until the next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_error_message() -> *const c_char {
    const ENDING: &CStr = c"a call failed while its thread ended: there is no message then";
    let message = MESSAGE.try_with(|message| message.borrow().as_ptr());
    message.unwrap_or(ENDING.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_librarys_version() {
        // SAFETY: a string of this library.
        let version = unsafe { CStr::from_ptr(memfold_version()) };
        let header = [
            MEMFOLD_VERSION_MAJOR,
            MEMFOLD_VERSION_MINOR,
            MEMFOLD_VERSION_PATCH,
        ];
        let header = header.map(|number| number.to_string()).join(".");
        assert_eq!(version.to_str(), Ok(header.as_str()));
    }
}
