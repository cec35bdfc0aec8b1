//! The scale of the workloads.

/// A factor on the published sizes.
#[derive(Debug, Clone, Copy)]
pub struct Scale(pub f64);

impl Scale {
    /// A size of `at_one` MB at scale 1; at least 8 MB.
    pub fn megabytes(self, at_one: usize) -> usize {
        ((at_one as f64 * self.0) as usize).max(8)
    }

    /// A count of `at_one` at scale 1; at least `least`.
    pub fn count(self, at_one: usize, least: usize) -> usize {
        ((at_one as f64 * self.0) as usize).max(least)
    }
}
