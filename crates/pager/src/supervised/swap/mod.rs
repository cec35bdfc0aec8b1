//! Tiers of the supervised engine's swap space: background migration and the swap file.

mod packing;
pub(crate) mod swap_file;
pub(crate) mod tiers;
