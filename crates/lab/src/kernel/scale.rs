//! How large the workloads are.

/// Sizes for this machine, relative to those of the published tables.
#[derive(Debug, Clone, Copy)]
pub struct Scale(pub f64);

impl Scale {
    /// So many megabytes at scale 1; at least 8.
    pub fn megabytes(self, at_one: usize) -> usize {
        ((at_one as f64 * self.0) as usize).max(8)
    }

    /// So many of something at scale 1; at least `least`.
    pub fn count(self, at_one: usize, least: usize) -> usize {
        ((at_one as f64 * self.0) as usize).max(least)
    }
}
