//! Values whose end may take long: the last array or limit over a store waits for the store.

use pyo3::Python;
use std::ops::Deref;

/// A value that is dropped without the interpreter's lock, so that other threads go on meanwhile.
pub struct Detached<T: Send>(Option<T>);

impl<T: Send> Detached<T> {
    pub fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        // Where the interpreter is ending, the closure drops it with itself.
        let _ = Python::try_attach(|py| py.detach(|| drop(value)));
    }
}
