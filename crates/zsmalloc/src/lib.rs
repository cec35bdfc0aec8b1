#![doc = include_str!("../README.md")]

mod allocate;
mod arena;
mod bin;
mod bulk;
mod class;
mod compact;
mod config;
mod deferred;
mod drainer;
mod epoch;
mod error;
mod extent;
mod geometry;
mod handle;
mod huge;
mod lock;
#[cfg(all(test, loom))]
mod loom_tests;
mod pages;
mod pool;
mod release;
mod released;
mod relocate;
mod ring;
mod runs;
mod signal;
mod source;
mod stats;
mod sync;
mod table;
mod word;
mod zspage;

pub use class::{CLASS_STEP, ClassTable, SizeClass};
pub use compact::CompactReport;
pub use config::Config;
pub use drainer::Drainer;
pub use error::{AllocError, MisuseError, NewPoolError};
pub use geometry::{MAX_CHAIN_PAGES, PAGE_SIZE};
pub use handle::{Handle, HandleError, HandleTable};
pub use pool::{Pool, ReadGuard};
pub use relocate::Relocate;
pub use source::{HeapSource, HugePageLimit, PageRun, PageSource, SourceError};
pub use stats::{ClassStats, PoolStats};
pub use word::ObjectWord;

/// A boxed slice of `count` values; `None` if the heap refuses memory.
fn boxed<T>(count: usize, value: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).ok()?;
    values.extend(std::iter::repeat_with(value).take(count));
    Some(values.into_boxed_slice())
}
