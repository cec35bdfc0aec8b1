//! The native part of the Python package: limits, and memory under them. What users see is in
//! `python/memfold/__init__.py`.

use memfold::{Algorithm, DetachedPin, Error, Memfold, Mode, Region};
use pyo3::exceptions::{PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

fn exception(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::LimitTooSmall { .. } | Error::Length(_) | Error::OutOfRange { .. } => {
            PyValueError::new_err(message)
        }
        Error::TooMuchPinned { .. } => PyMemoryError::new_err(message),
        _ => PyOSError::new_err(message),
    }
}

fn mode_of(name: &str) -> PyResult<Mode> {
    [Mode::Signal, Mode::Thread, Mode::Protection]
        .into_iter()
        .find(|mode| mode.name() == name)
        .ok_or_else(|| PyValueError::new_err(format!("there is no mode {name:?}")))
}

/// A limit on memory.
#[pyclass(frozen, module = "memfold._memfold")]
struct Engine(Memfold);

#[pymethods]
impl Engine {
    #[new]
    fn new(
        limit: Option<u64>,
        resident_limit: Option<u64>,
        mode: Option<&str>,
        algorithm: &str,
    ) -> PyResult<Self> {
        let mut builder = Memfold::builder().algorithm(match algorithm {
            "lz4" => Algorithm::Lz4,
            "zstd" => Algorithm::Zstd,
            other => {
                let message = format!("there is no algorithm {other:?}");
                return Err(PyValueError::new_err(message));
            }
        });
        if let Some(bytes) = limit {
            builder = builder.limit(bytes);
        }
        if let Some(bytes) = resident_limit {
            builder = builder.resident_limit(bytes);
        }
        if let Some(name) = mode {
            builder = builder.mode(mode_of(name)?);
        }
        builder.build().map(Engine).map_err(exception)
    }

    /// Maps memory.
    fn map(&self, length: usize) -> PyResult<Memory> {
        self.0.map(length).map(Memory).map_err(exception)
    }

    /// The figures, by the names that the Rust documentation of `Stats` explains.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let now = self.0.stats();
        let figures = PyDict::new(py);
        figures.set_item("mode", now.mode.name())?;
        for (name, value) in [
            ("limit_bytes", now.limit_bytes),
            ("resident_limit_bytes", now.resident_limit_bytes),
            ("resident_bytes", now.resident_bytes),
            ("peak_resident_bytes", now.peak_resident_bytes),
            ("pool_bytes", now.pool_bytes),
            ("metadata_bytes", now.metadata_bytes),
            ("mapped_bytes", now.mapped_bytes),
            ("pinned_bytes", now.pinned_bytes),
            ("stored_pages", now.stored_pages),
            ("same_filled_pages", now.same_filled_pages),
            ("stored_bytes", now.stored_bytes),
            ("faults_swap_in", now.faults_swap_in),
            ("faults_zero_fill", now.faults_zero_fill),
            ("pages_out", now.pages_out),
            ("pages_in", now.pages_in),
            ("pages_read_ahead", now.pages_read_ahead),
            ("over_limit_pages", now.over_limit_pages),
        ] {
            figures.set_item(name, value)?;
        }
        Ok(figures)
    }
}

/// Memory of an array, unmapped when the last array over it is gone.
#[pyclass(frozen, module = "memfold._memfold")]
struct Memory(Region);

#[pymethods]
impl Memory {
    #[getter]
    fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn will_need(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<()> {
        py.detach(|| self.0.will_need(start..end))
            .map_err(exception)
    }

    fn cold(&self, start: usize, end: usize) -> PyResult<()> {
        self.0.cold(start..end).map_err(exception)
    }

    fn page_out(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<u64> {
        py.detach(|| self.0.page_out(start..end)).map_err(exception)
    }

    fn pin(&self, py: Python<'_>, start: usize, end: usize) -> PyResult<Pinned> {
        let pin = py.detach(|| self.0.pin_detached(start..end));
        pin.map(|pin| Pinned { _pin: pin }).map_err(exception)
    }
}

/// A range that stays in memory as long as this does.
#[pyclass(frozen, module = "memfold._memfold")]
struct Pinned {
    _pin: DetachedPin,
}

#[pymodule]
fn _memfold(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_class::<Memory>()?;
    module.add_class::<Pinned>()
}
