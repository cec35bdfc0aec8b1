//! The native part of the Python package: limits, and memory under them. What users see is in
//! `python/memfold/__init__.py`.

mod allocator;
mod detached;
mod mapped;

use detached::Detached;
use mapped::Mapped;
use memfold::{
    Algorithm, Error, Mode, Password, PinnedDetached, RemoteOptions, Size, SizeError, Stats,
    StoreAddressError,
};
use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;
use std::time::Duration;

create_exception!(
    memfold._memfold,
    ModeUnavailableError,
    PyOSError,
    "The host does not allow the mode."
);

/// The package's version is the library's: maturin takes it from this crate's manifest, which cannot
/// inherit it.
const _: () = {
    let (package, library) = (env!("CARGO_PKG_VERSION"), memfold::VERSION);
    let (package, library) = (package.as_bytes(), library.as_bytes());
    assert!(
        package.len() == library.len(),
        "another version than memfold's"
    );
    let mut index = 0;
    while index < package.len() {
        assert!(
            package[index] == library[index],
            "another version than memfold's"
        );
        index += 1;
    }
};

fn exception(error: Error) -> PyErr {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        message.push_str(&format!(": {error}"));
        cause = error.source();
    }
    match error {
        Error::LimitTooSmall { .. }
        | Error::Length(_)
        | Error::OutOfRange { .. }
        | Error::RemoteOptions(_) => PyValueError::new_err(message),
        Error::TooMuchPinned { .. } => PyMemoryError::new_err(message),
        Error::ModeUnavailable { .. } => ModeUnavailableError::new_err(message),
        Error::System { source, .. } => match source.raw_os_error() {
            Some(libc::ENOMEM) => PyMemoryError::new_err(message),
            // Python makes a subclass of it where it has one, such as PermissionError.
            Some(errno) => PyOSError::new_err((errno, message)),
            None => PyOSError::new_err(message),
        },
        _ => PyOSError::new_err(message),
    }
}

fn mode_of(name: &str) -> PyResult<Mode> {
    [Mode::Signal, Mode::Thread, Mode::Protection]
        .into_iter()
        .find(|mode| mode.name() == name)
        .ok_or_else(|| {
            let message = format!("mode is 'signal', 'thread' or 'protection', not {name:?}");
            PyValueError::new_err(message)
        })
}

/// A store on other machines.
#[pyclass(frozen, module = "memfold._memfold")]
struct Store(RemoteOptions);

#[pymethods]
impl Store {
    #[new]
    fn new(
        address: &str,
        credentials: (Option<String>, Option<String>),
        ca_certificates: Option<String>,
        replicas: u32,
        times: (Duration, Duration),
    ) -> PyResult<Self> {
        let address = address.parse().map_err(|error: StoreAddressError| {
            PyValueError::new_err(format!("address {address:?}: {error}"))
        })?;
        let mut options = RemoteOptions::new(address);
        let (user, password) = credentials;
        options.user = user;
        options.password = password.map(Password::new);
        options.ca_certificates = ca_certificates.map(String::into_bytes);
        options.replicas = replicas;
        (options.patience, options.time_to_live) = times;
        memfold::show_remote_warnings();
        Ok(Self(options))
    }
}

/// A limit on memory.
#[pyclass(frozen, module = "memfold._memfold")]
struct Memfold(Detached<memfold::Memfold>);

#[pymethods]
impl Memfold {
    #[new]
    fn new(
        py: Python<'_>,
        limit: Option<u64>,
        resident_limit: Option<u64>,
        mode: Option<&str>,
        algorithm: &str,
        store: Option<&Bound<'_, Store>>,
    ) -> PyResult<Self> {
        let algorithm: Algorithm = algorithm.parse().map_err(|_| {
            let message = format!("algorithm is 'lz4' or 'zstd', not {algorithm:?}");
            PyValueError::new_err(message)
        })?;
        let mut builder = memfold::Memfold::builder().algorithm(algorithm);
        if let Some(bytes) = limit {
            builder = builder.limit(bytes);
        }
        if let Some(bytes) = resident_limit {
            builder = builder.resident_limit(bytes);
        }
        if let Some(name) = mode {
            builder = builder.mode(mode_of(name)?);
        }
        if let Some(store) = store {
            builder = builder.remote(store.get().0.clone());
        }
        // A store may take a while to answer.
        let built = py.detach(|| builder.build());
        let memfold = built.map_err(exception)?;
        Ok(Memfold(Detached::new(memfold)))
    }

    /// Maps memory of `length` bytes.
    fn map(&self, length: usize) -> PyResult<Memory> {
        let mapped = Mapped::new(&self.0, length).map_err(exception)?;
        Ok(Memory(Detached::new(Arc::new(mapped))))
    }

    /// A handler for NumPy's allocations of at least `smallest` bytes, for `set_handler`.
    fn handler(&self, py: Python<'_>, smallest: usize) -> PyResult<Py<PyAny>> {
        allocator::new(py, &self.0, smallest)
    }

    /// Whether this process was forked from the one that made the limit.
    fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// The statistics that `STATS` describes, and the mode.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats();
        let named = PyDict::new(py);
        named.set_item("mode", stats.mode.name())?;
        for (field, value) in Stats::FIELDS.iter().zip(stats.values()) {
            named.set_item(field.name, value)?;
        }
        Ok(named)
    }
}

/// Memory of an array, unmapped when the last array over it is gone.
#[pyclass(frozen, module = "memfold._memfold")]
struct Memory(Detached<Arc<Mapped>>);

#[pymethods]
impl Memory {
    #[getter]
    fn address(&self) -> usize {
        self.0.base().as_ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn prefetch(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<()> {
        py.detach(|| self.0.prefetch(start..end)).map_err(exception)
    }

    fn mark_cold(&self, start: usize, end: usize) -> PyResult<()> {
        self.0.mark_cold(start..end).map_err(exception)
    }

    fn page_out(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<u64> {
        py.detach(|| self.0.page_out(start..end)).map_err(exception)
    }

    fn pin(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<Pinned> {
        let pin = py.detach(|| self.0.pin_detached(start..end));
        let _pin = Detached::new(pin.map_err(exception)?);
        Ok(Pinned { _pin })
    }
}

/// A range that stays resident as long as this lives.
#[pyclass(frozen, module = "memfold._memfold")]
struct Pinned {
    _pin: Detached<PinnedDetached>,
}

/// Makes a handler NumPy's, in the current context; without one, NumPy's own. Returns the one that was.
#[pyfunction]
#[pyo3(signature = (handler))]
fn set_handler(py: Python<'_>, handler: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
    allocator::set(py, handler)
}

/// The memory of the array that NumPy allocated at an address under a limit.
#[pyfunction]
fn memory_at(address: usize) -> Option<Memory> {
    let region = allocator::region_at(address);
    region.map(|region| Memory(Detached::new(region)))
}

/// In a forked child: has an access to the parent's arrays end the process with a message.
#[pyfunction]
fn guard_inherited() -> PyResult<()> {
    mapped::forget_inherited();
    Ok(memfold::guard_inherited()?)
}

/// Whether this process has arrays, not counting those of the one that it was forked from.
#[pyfunction]
fn has_arrays() -> bool {
    mapped::any()
}

/// Puts the handlers of limits above those that were installed since.
#[pyfunction]
fn reinstall_handlers() -> PyResult<()> {
    Ok(memfold::reinstall_handlers()?)
}

/// A size as the command line takes it, in bytes.
#[pyfunction]
fn parse_size(text: &str) -> PyResult<u64> {
    let size: Size = text.parse().map_err(|error: SizeError| {
        PyValueError::new_err(format!("not a size: {text:?}; {error}"))
    })?;
    Ok(size.bytes()?)
}

#[pymodule]
fn _memfold(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let descriptions = PyDict::new(module.py());
    for field in Stats::FIELDS {
        let lines: Vec<&str> = field.description.lines().map(str::trim).collect();
        descriptions.set_item(field.name, lines.join(" "))?;
    }
    module.add("STATS", descriptions)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add(
        "ModeUnavailableError",
        module.py().get_type::<ModeUnavailableError>(),
    )?;
    module.add_function(wrap_pyfunction!(set_handler, module)?)?;
    module.add_function(wrap_pyfunction!(memory_at, module)?)?;
    module.add_function(wrap_pyfunction!(guard_inherited, module)?)?;
    module.add_function(wrap_pyfunction!(has_arrays, module)?)?;
    module.add_function(wrap_pyfunction!(reinstall_handlers, module)?)?;
    module.add_function(wrap_pyfunction!(parse_size, module)?)?;
    module.add_class::<Store>()?;
    module.add_class::<Memfold>()?;
    module.add_class::<Memory>()?;
    module.add_class::<Pinned>()
}
