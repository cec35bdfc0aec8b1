//! NumPy's allocations under a limit: the handler of NEP 49.
//!
//! NumPy keeps a reference to the handler in each array that it made by it, so that arrays are freed by
//! the handler that allocated them, however long they live and on whichever thread. It passes a size to
//! `free`, and none to `realloc`, so the handler keeps its own records. Small allocations are the C
//! library's; whether an address is a region's is asked without a lock.

use crate::detached::Detached;
use crate::mapped::Mapped;
use memfold::{Memfold, is_region};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The name of the capsule that holds a handler, by which NumPy knows it.
const CAPSULE: &CStr = c"mem_handler";
/// Where NumPy's table of functions has `PyDataMem_SetHandler`, from version 1.22 on.
const SET_HANDLER: usize = 304;

/// Regions that are arrays' memory, by address.
static REGIONS: LazyLock<Mutex<HashMap<usize, Arc<Mapped>>>> = LazyLock::new(Mutex::default);

fn regions() -> MutexGuard<'static, HashMap<usize, Arc<Mapped>>> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory of the array that NumPy allocated at an address, if it is a region.
pub fn region_at(address: usize) -> Option<Arc<Mapped>> {
    is_region(address)
        .then(|| regions().get(&address).cloned())
        .flatten()
}

/// `PyDataMemAllocator`.
#[repr(C)]
struct Functions {
    context: *mut c_void,
    malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void, usize),
}

/// `PyDataMem_Handler`, with what its functions need behind it.
#[repr(C)]
struct Handler {
    name: [c_char; 127],
    version: u8,
    functions: Functions,
    limit: Limit,
}

/// What the functions of a handler are given.
struct Limit {
    memfold: Detached<Memfold>,
    /// Bytes: smaller allocations are the C library's.
    smallest: usize,
}

impl Limit {
    /// A region of at least `length` bytes, which reads as zeros. Null if the kernel refuses.
    fn map(&self, length: usize) -> *mut c_void {
        let Ok(region) = Mapped::new(&self.memfold, length) else {
            return ptr::null_mut();
        };
        let start = region.base().as_ptr();
        regions().insert(start as usize, Arc::new(region));
        start.cast()
    }

    /// Whether an allocation is the C library's. In a forked child all are: the limit stays behind.
    fn leaves_to_c(&self, length: usize) -> bool {
        length < self.smallest || self.memfold.is_inherited()
    }

    /// Moves an allocation of the C library into a region.
    ///
    /// # Safety
    /// As `realloc` of the C library; `length` bytes do not overflow.
    unsafe fn move_in(&self, old: *mut c_void, length: usize) -> *mut c_void {
        let new = self.map(length);
        if !new.is_null() {
            // SAFETY: the old allocation has at least `malloc_usable_size` bytes (the caller's promise),
            // the new one `length`, and they are distinct.
            unsafe {
                let used = libc::malloc_usable_size(old).min(length);
                ptr::copy_nonoverlapping(old.cast::<u8>(), new.cast(), used);
                libc::free(old);
            }
        }
        new
    }

    /// Resizes an allocation that is a region.
    ///
    /// # Safety
    /// As `realloc`.
    unsafe fn resize(&self, old: *mut c_void, length: usize) -> *mut c_void {
        if self.memfold.is_inherited() {
            // Its contents are the parent's.
            return ptr::null_mut();
        }
        let Some(region) = region_at(old as usize) else {
            return ptr::null_mut();
        };
        if length <= region.len() {
            // SAFETY: the caller of a resize gives up what is behind the new end.
            let _ = unsafe { region.discard_shared(length..region.len()) };
            return old;
        }
        let new = self.map(length);
        if !new.is_null() {
            // SAFETY: both are mapped, of at least `region.len()` bytes, and distinct; the caller
            // does not access the allocation meanwhile.
            unsafe { ptr::copy_nonoverlapping(old.cast::<u8>(), new.cast(), region.len()) };
            // The region is unmapped as this returns, outside the lock, and not `Detached`: until NumPy has stored the
            // new address, other threads would write to the old memory.
            regions().remove(&(old as usize));
        }
        new
    }
}

/// # Safety
/// `context` is a handler's own, which lives as long as NumPy may call its functions.
unsafe fn limit<'a>(context: *mut c_void) -> &'a Limit {
    // SAFETY: the caller's promise; NumPy holds the capsule, and the capsule the handler.
    unsafe { &*context.cast::<Limit>() }
}

unsafe extern "C" fn malloc(context: *mut c_void, length: usize) -> *mut c_void {
    // SAFETY: NumPy passes the handler's context.
    let limit = unsafe { limit(context) };
    if limit.leaves_to_c(length) {
        // SAFETY: takes any number.
        return unsafe { libc::malloc(length.max(1)) };
    }
    limit.map(length)
}

unsafe extern "C" fn calloc(context: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: as above.
    let limit = unsafe { limit(context) };
    match count.checked_mul(size) {
        None => ptr::null_mut(),
        // SAFETY: takes any numbers.
        Some(length) if limit.leaves_to_c(length) => unsafe { libc::calloc(length.max(1), 1) },
        // Regions start as zeros.
        Some(length) => limit.map(length),
    }
}

unsafe extern "C" fn realloc(context: *mut c_void, old: *mut c_void, length: usize) -> *mut c_void {
    // SAFETY: as above; NumPy resizes what this handler allocated, and uses it no more.
    unsafe {
        let limit = limit(context);
        if old.is_null() {
            malloc(context, length)
        } else if is_region(old as usize) {
            limit.resize(old, length)
        } else if limit.leaves_to_c(length) {
            libc::realloc(old, length.max(1))
        } else {
            limit.move_in(old, length)
        }
    }
}

unsafe extern "C" fn free(context: *mut c_void, old: *mut c_void, _: usize) {
    if !is_region(old as usize) {
        // SAFETY: what this handler allocated and is no region is the C library's.
        unsafe { libc::free(old) };
        return;
    }
    // SAFETY: as above.
    if unsafe { limit(context) }.memfold.is_inherited() {
        // The memory is the parent's, and the lock as the fork found it.
        return;
    }
    // Unmapped outside the lock, with the last reference.
    let gone = regions().remove(&(old as usize));
    drop(Detached::new(gone));
}

/// Drops the handler of a capsule.
unsafe extern "C" fn drop_handler(capsule: *mut ffi::PyObject) {
    // SAFETY: called once, by Python, with the capsule that `new` made.
    unsafe {
        let handler = ffi::PyCapsule_GetPointer(capsule, CAPSULE.as_ptr());
        if !handler.is_null() {
            drop(Box::from_raw(handler.cast::<Handler>()));
        }
    }
}

/// A capsule with a handler whose allocations of at least `smallest` bytes are regions under a limit.
pub fn new(py: Python<'_>, memfold: &Memfold, smallest: usize) -> PyResult<Py<PyAny>> {
    let mut name = [0; 127];
    for (place, byte) in name.iter_mut().zip(b"memfold") {
        *place = *byte as c_char;
    }
    let handler = Box::into_raw(Box::new(Handler {
        name,
        version: 1,
        functions: Functions {
            context: ptr::null_mut(),
            malloc,
            calloc,
            realloc,
            free,
        },
        limit: Limit {
            memfold: Detached::new(memfold.clone()),
            smallest: smallest.max(1),
        },
    }));
    // SAFETY: made above. The context is part of the handler and lives as long; the capsule owns it and
    // frees it by `drop_handler`. On failure it is freed here.
    unsafe {
        (*handler).functions.context = (&raw mut (*handler).limit).cast();
        let capsule = ffi::PyCapsule_New(handler.cast(), CAPSULE.as_ptr(), Some(drop_handler));
        if capsule.is_null() {
            drop(Box::from_raw(handler));
        }
        Bound::from_owned_ptr_or_err(py, capsule).map(Bound::unbind)
    }
}

/// Makes a handler NumPy's, in the current context (`contextvars`). Returns the one that was.
pub fn set(py: Python<'_>, handler: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
    type SetHandler = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;
    let module = py
        .import("numpy._core._multiarray_umath")
        .or_else(|_| py.import("numpy.core._multiarray_umath"))?;
    let version: String = py.import("numpy")?.getattr("__version__")?.extract()?;
    if version.starts_with("1.21.") {
        let message = format!("NumPy {version} has no memory handlers: allocating() needs 1.22");
        return Err(PyRuntimeError::new_err(message));
    }
    let table = module.getattr("_ARRAY_API")?;
    let handler = handler.map_or(ptr::null_mut(), Bound::as_ptr);
    // SAFETY: the capsule has NumPy's table of functions (its ABI, which versions only extend), in which
    // this entry is that function. It takes null, for the default, or a capsule, and returns a new
    // reference. The interpreter is attached.
    unsafe {
        let table = ffi::PyCapsule_GetPointer(table.as_ptr(), ptr::null());
        if table.is_null() {
            return Err(PyErr::fetch(py));
        }
        let function = *table.cast::<*const c_void>().add(SET_HANDLER);
        let function = std::mem::transmute::<*const c_void, SetHandler>(function);
        Bound::from_owned_ptr_or_err(py, function(handler)).map(Bound::unbind)
    }
}
