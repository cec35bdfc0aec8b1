//! The swap space of the supervised engine: background work and the swap file.

pub mod swap_file;
pub mod tiers;
