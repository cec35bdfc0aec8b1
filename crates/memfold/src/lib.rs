#![doc = include_str!("../README.md")]

mod allocator;
mod builder;
mod region;

pub use allocator::RegionAllocator;
pub use builder::{Builder, Memfold};
pub use memfold_pager::Algorithm;
pub use memfold_pager::embedded::{
    EmbeddedError as Error, EmbeddedStats as Stats, Mode, handle_fault as handle_signal,
};
pub use region::{DetachedPin, Pin, PinMut, Region};
