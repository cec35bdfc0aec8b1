//! The handlers that listen to an address space.

/// The handlers that listen to an address space, and the sampling that chooses them. Guarded by a mutex
/// of the address space.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    /// Handler numbers, each with the number of consecutive samples from other CPUs.
    pub listening: Vec<(usize, u32)>,
    /// Faults until the next sample of a faulting thread's CPU.
    pub until_sample: u32,
    /// Faults from one sample to the next.
    pub distance: u32,
}

impl Listeners {
    /// The numbers of the listening handlers. Handlers are numbered in the order of the allowed CPUs.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = usize> + '_ {
        self.listening.iter().map(|(number, _)| *number)
    }
}
