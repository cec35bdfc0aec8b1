#![doc = include_str!("../README.md")]

#[cfg(feature = "allocator-api2")]
mod allocator;
mod builder;
mod region;

#[cfg(feature = "allocator-api2")]
pub use allocator::RegionAllocator;
pub use builder::{Memfold, MemfoldBuilder};
pub use memfold_pager::embedded::{
    Error, Mode, Stats, guard_inherited, handle_fault as handle_signal, is_inherited_region,
    is_region, memory_allowance, reinstall as reinstall_handlers,
};
pub use memfold_pager::{Algorithm, ParseAlgorithmError, Size, SizeError, StatsField};
#[cfg(feature = "remote")]
pub use memfold_remote::{
    OpenError as RemoteOpenError, Options as RemoteOptions, Password, StoreAddress,
    StoreAddressError, show_warnings as show_remote_warnings,
};
#[cfg(feature = "remote")]
pub use memfold_swap::RemoteUsage;
pub use region::{Pinned, PinnedDetached, PinnedMut, Region};

/// The version of this crate.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
