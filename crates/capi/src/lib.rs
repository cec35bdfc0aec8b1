#![doc = include_str!("../README.md")]

use ::memfold::{Algorithm, DetachedPin, Error, Memfold, Mode, Region, handle_signal};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An argument makes no sense.
pub const MEMFOLD_ERROR_ARGUMENT: c_int = -1;
/// The host does not allow what was asked for.
pub const MEMFOLD_ERROR_UNAVAILABLE: c_int = -2;
/// The system refused something.
pub const MEMFOLD_ERROR_SYSTEM: c_int = -3;
/// The limit has no room.
pub const MEMFOLD_ERROR_LIMIT: c_int = -4;
/// The calling process was forked from the one that made it.
pub const MEMFOLD_ERROR_FORKED: c_int = -5;

/// Choose signal mode where the host allows it, else protection mode.
pub const MEMFOLD_MODE_AUTO: u32 = 0;
/// Faults are served in the faulting thread, by a handler of SIGBUS.
pub const MEMFOLD_MODE_SIGNAL: u32 = 1;
/// Faults are served by a thread; system calls work on missing pages.
pub const MEMFOLD_MODE_THREAD: u32 = 2;
/// Faults are served in the faulting thread, by a handler of SIGSEGV, without userfaultfd.
pub const MEMFOLD_MODE_PROTECTION: u32 = 3;

/// LZ4.
pub const MEMFOLD_ALGORITHM_LZ4: u32 = 0;
/// Zstandard: smaller, slower.
pub const MEMFOLD_ALGORITHM_ZSTD: u32 = 1;

/// Bring the range in before it is touched, as far as there is room.
pub const MEMFOLD_WILL_NEED: c_int = 0;
/// The range goes first when room is needed.
pub const MEMFOLD_COLD: c_int = 1;
/// Move the range out now.
pub const MEMFOLD_PAGE_OUT: c_int = 2;
/// Drop the contents of the range: it reads as zeros. Nobody else may use it meanwhile.
pub const MEMFOLD_DONT_NEED: c_int = 3;

/// A limit on memory.
#[allow(non_camel_case_types, reason = "the name in C")]
pub struct memfold(Memfold);

/// How a limit is to be. All zeros, but for `size`, are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
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
}

/// Figures; see the fields of the same names in the Rust documentation of `Stats`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "the name in C")]
#[allow(missing_docs, reason = "the names are those of Stats")]
pub struct memfold_stats {
    /// `sizeof(memfold_stats)`, to be set before the call.
    pub size: usize,
    pub mode: u32,
    pub limit_bytes: u64,
    pub resident_limit_bytes: u64,
    pub resident_bytes: u64,
    pub peak_resident_bytes: u64,
    pub pool_bytes: u64,
    pub metadata_bytes: u64,
    pub mapped_bytes: u64,
    pub stored_pages: u64,
    pub stored_bytes: u64,
    pub faults_swap_in: u64,
    pub faults_zero_fill: u64,
    pub pages_out: u64,
    pub pages_in: u64,
    pub pages_read_ahead: u64,
    pub over_limit_pages: u64,
}

thread_local!(static MESSAGE: RefCell<CString> = RefCell::default());

/// The regions of C programs, by address, and their pins.
struct Regions {
    regions: BTreeMap<usize, Arc<Region>>,
    pins: BTreeMap<(usize, usize), Vec<DetachedPin>>,
}

impl Regions {
    /// Adds a region. The first of a forked child takes the place of what it inherited, which its
    /// own regions may lie over.
    fn insert(&mut self, start: usize, region: Region) {
        if self.regions.values().any(|region| region.is_inherited()) {
            self.regions.clear();
            self.pins.clear();
        }
        self.regions.insert(start, Arc::new(region));
    }
}

static REGIONS: Mutex<Regions> = Mutex::new(Regions {
    regions: BTreeMap::new(),
    pins: BTreeMap::new(),
});

fn regions() -> MutexGuard<'static, Regions> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(code: c_int, message: &str) -> c_int {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    MESSAGE.with(|place| *place.borrow_mut() = message);
    code
}

fn fail_with(error: &Error) -> c_int {
    let code = match error {
        Error::LimitTooSmall { .. } | Error::Length(_) | Error::OutOfRange { .. } => {
            MEMFOLD_ERROR_ARGUMENT
        }
        Error::ModeUnavailable { .. } => MEMFOLD_ERROR_UNAVAILABLE,
        Error::TooMuchPinned { .. } => MEMFOLD_ERROR_LIMIT,
        Error::Forked => MEMFOLD_ERROR_FORKED,
        _ => MEMFOLD_ERROR_SYSTEM,
    };
    fail(code, &error.to_string())
}

/// Whether a structure that begins with this size may be of the type: a program that was built with
/// an older header has fewer fields.
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

fn build(options: &memfold_options) -> Result<Memfold, c_int> {
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
        _ => return Err(fail(MEMFOLD_ERROR_ARGUMENT, "there is no such mode")),
    };
    builder = match options.algorithm {
        MEMFOLD_ALGORITHM_LZ4 => builder.algorithm(Algorithm::Lz4),
        MEMFOLD_ALGORITHM_ZSTD => builder.algorithm(Algorithm::Zstd),
        _ => return Err(fail(MEMFOLD_ERROR_ARGUMENT, "there is no such algorithm")),
    };
    builder.build().map_err(|error| fail_with(&error))
}

/// Makes a limit, and puts it into `*made`. `options` may be null for the defaults.
///
/// # Safety
/// `options` is null or points to options of the size that they say; `made` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_new(
    options: *const memfold_options,
    made: *mut *mut memfold,
) -> c_int {
    if made.is_null() {
        return fail(MEMFOLD_ERROR_ARGUMENT, "no place for the result");
    }
    let mut given = memfold_options {
        size: size_of::<memfold_options>(),
        limit_bytes: 0,
        resident_limit_bytes: 0,
        mode: MEMFOLD_MODE_AUTO,
        algorithm: MEMFOLD_ALGORITHM_LZ4,
        no_checksum: 0,
        no_readahead: 0,
    };
    if !options.is_null() {
        // SAFETY: the caller's promise; the size is the first field.
        unsafe {
            let size = (*options).size;
            if !is_size_of::<memfold_options>(size) {
                return fail(MEMFOLD_ERROR_ARGUMENT, "options.size is not set");
            }
            ptr::copy_nonoverlapping(options.cast::<u8>(), (&raw mut given).cast::<u8>(), size);
        }
    }
    match build(&given) {
        Ok(one) => {
            // SAFETY: the caller's promise.
            unsafe { *made = Box::into_raw(Box::new(memfold(one))) };
            0
        }
        Err(code) => code,
    }
}

/// Gives a limit up. Its regions stay until they are unmapped. Null is ignored.
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

/// Maps `length` bytes of zeros under a limit, and puts their address into `*start`.
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
            let address = region.as_ptr();
            regions().insert(address as usize, region);
            // SAFETY: the caller's promise.
            unsafe { *start = address.cast() };
            0
        }
        Err(error) => fail_with(&error),
    }
}

/// Unmaps what [`memfold_map`] gave, with all pins. What it has in the pool is released in the
/// background.
///
/// # Safety
/// Nobody uses the memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_unmap(start: *mut c_void) -> c_int {
    let region = {
        let mut all = regions();
        let Some(region) = all.regions.remove(&(start as usize)) else {
            return fail(MEMFOLD_ERROR_ARGUMENT, "no region starts at this address");
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
    let (start, region) = all.regions.range(..=address).next_back()?;
    let offset = address - start;
    (offset < region.len()).then(|| (region.clone(), offset))
}

fn at<R>(
    start: *mut c_void,
    length: usize,
    run: impl FnOnce(&Region, std::ops::Range<usize>) -> Result<R, Error>,
) -> Result<R, c_int> {
    let Some((region, offset)) = region_at(start as usize) else {
        return Err(fail(MEMFOLD_ERROR_ARGUMENT, "the address is in no region"));
    };
    let range = offset..offset.saturating_add(length);
    run(&region, range).map_err(|error| fail_with(&error))
}

/// Advises on a range of a region: one of `MEMFOLD_WILL_NEED`, `MEMFOLD_COLD`, `MEMFOLD_PAGE_OUT`
/// and `MEMFOLD_DONT_NEED`.
///
/// # Safety
/// For `MEMFOLD_DONT_NEED`, nobody else uses the range meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_advise(start: *mut c_void, length: usize, advice: c_int) -> c_int {
    let done = at(start, length, |region, range| match advice {
        MEMFOLD_WILL_NEED => region.will_need(range),
        MEMFOLD_COLD => region.cold(range),
        MEMFOLD_PAGE_OUT => region.page_out(range).map(drop),
        // SAFETY: the caller's promise.
        MEMFOLD_DONT_NEED => unsafe { region.discard_shared(range) },
        _ => Ok(()),
    });
    match done {
        Err(code) => code,
        Ok(()) if (MEMFOLD_WILL_NEED..=MEMFOLD_DONT_NEED).contains(&advice) => 0,
        Ok(()) => fail(MEMFOLD_ERROR_ARGUMENT, "there is no such advice"),
    }
}

/// Brings a range in and keeps it in memory until [`memfold_unpin`] is called for it as often as
/// this was: needed before it is given to a system call in signal and protection mode.
///
/// # Safety
/// None beyond the address being one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_pin(start: *mut c_void, length: usize) -> c_int {
    match at(start, length, |region, range| region.pin_detached(range)) {
        Ok(pin) => {
            let key = (start as usize, length);
            regions().pins.entry(key).or_default().push(pin);
            0
        }
        Err(code) => code,
    }
}

/// Takes back a pin of exactly this range.
///
/// # Safety
/// No system call uses the range any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_unpin(start: *mut c_void, length: usize) -> c_int {
    let key = (start as usize, length);
    let mut all = regions();
    let Some(pins) = all.pins.get_mut(&key) else {
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

/// The figures of a limit. `stats->size` must be set.
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
        return fail(MEMFOLD_ERROR_ARGUMENT, "stats.size is not set");
    }
    let figures = memfold_stats {
        size,
        mode: mode_number(now.mode),
        limit_bytes: now.limit_bytes,
        resident_limit_bytes: now.resident_limit_bytes,
        resident_bytes: now.resident_bytes,
        peak_resident_bytes: now.peak_resident_bytes,
        pool_bytes: now.pool_bytes,
        metadata_bytes: now.metadata_bytes,
        mapped_bytes: now.mapped_bytes,
        stored_pages: now.stored_pages,
        stored_bytes: now.stored_bytes,
        faults_swap_in: now.faults_swap_in,
        faults_zero_fill: now.faults_zero_fill,
        pages_out: now.pages_out,
        pages_in: now.pages_in,
        pages_read_ahead: now.pages_read_ahead,
        over_limit_pages: now.over_limit_pages,
    };
    // SAFETY: the caller's promise; the size is not more than there is.
    unsafe {
        ptr::copy_nonoverlapping((&raw const figures).cast::<u8>(), stats.cast::<u8>(), size);
    }
    0
}

/// Serves the fault that a handler of SIGBUS or SIGSEGV was called for, if it is on a region: 1
/// then, and the handler must return. 0 if it is not. For programs that install such a handler after
/// the first limit was made. Keeps `errno`, and all signals wait meanwhile.
///
/// # Safety
/// `info` is what the kernel gave the handler.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memfold_handle_signal(info: *const libc::siginfo_t) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(unsafe { handle_signal(info) })
}

/// What the last call of this thread that failed had to say. Valid until the next one.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_error_message() -> *const c_char {
    MESSAGE.with(|message| message.borrow().as_ptr())
}
