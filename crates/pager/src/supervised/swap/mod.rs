//! Tiers of the supervised engine's swap space: background migration and the swap file.

pub mod swap_file;
pub mod tiers;
