//! Which handlers listen to an address space.

/// Which handlers listen to an address space.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Handler numbers, each with the number of samples in a row that came from other CPUs.
    pub listening: Vec<(usize, u32)>,
    /// Faults until the next look at the CPU that a faulting thread runs on.
    pub until_sample: u32,
    /// Faults from one look to the next.
    pub distance: u32,
}

impl Listeners {
    /// The numbers of the handlers, which are in the order of the allowed CPUs.
    pub fn listeners(&self) -> impl Iterator<Item = usize> + '_ {
        self.listening.iter().map(|(number, _)| *number)
    }
}
