//! The model held to the real kernel: random histories, each on Linux and on the model, must look alike
//! after every operation.
//!
//! | module | holds |
//! |---|---|
//! | `operation` | what programs and memfold do: made from a seed, printed |
//! | `facts` | what is compared, and what may differ |
//! | `ask` | memfold's requests, by the traits that the core uses |
//! | `modelled` | a history on the model |
//! | `linux`, `program` | the same on Linux: our side, and the program's |
//!
//! Linux's side uses the pager's own implementations (`supervised::kernel::linux`), so that what is held
//! to the model is what runs under `memfold run`.

pub(crate) mod ask;
pub mod facts;
pub mod linux;
pub(crate) mod modelled;
pub mod operation;
pub(crate) mod program;

use facts::Step;
use linux::Linux;
use operation::{Operation, reports_forks};
use std::fmt;
use std::io;

/// A history after whose last operation the kernels differ.
#[derive(Debug)]
pub struct Difference {
    /// What was done.
    pub operations: Vec<Operation>,
    /// What each kernel shows.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for operation in &self.operations {
            writeln!(out, "  {operation:?}")?;
        }
        write!(out, "    {}", self.what)
    }
}

/// Does the same on both kernels. Returns what was possible and seen, or the first difference.
///
/// # Errors
/// If the program cannot be started.
pub fn compare(history: &[Operation]) -> io::Result<Result<Vec<Step>, Difference>> {
    let steps = match modelled::steps(history) {
        Ok(steps) => steps,
        Err(panic) => {
            return Ok(Err(Difference {
                operations: history.to_vec(),
                what: format!("the model panics: {panic}"),
            }));
        }
    };
    let mut linux = Linux::start_with(reports_forks(history))?;
    for (done, step) in steps.iter().enumerate() {
        let facts = linux.perform(step.operation);
        if let Some(what) = step.facts.differs(&facts) {
            let operations = steps[..=done].iter().map(|step| step.operation).collect();
            return Ok(Err(Difference { operations, what }));
        }
    }
    Ok(Ok(steps))
}

/// The shortest history found that still differs, by leaving operations out.
///
/// # Errors
/// As [`compare`].
pub fn shorten(difference: Difference) -> io::Result<Difference> {
    let mut shortest = difference;
    'again: loop {
        let length = shortest.operations.len();
        let parts = [length / 2, length / 4, 2, 1];
        for part in parts.into_iter().filter(|part| (1..length).contains(part)) {
            for start in 0..=length - part {
                let mut operations = shortest.operations.clone();
                operations.drain(start..start + part);
                if let Err(shorter) = compare(&operations)? {
                    shortest = shorter;
                    continue 'again;
                }
            }
        }
        return Ok(shortest);
    }
}
