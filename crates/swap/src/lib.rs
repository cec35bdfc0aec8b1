//! A swap space in user space.
//!
//! Pages go in and get a [`Slot`]; they come back by it. A slot is virtual: it says nothing about
//! where the data lies, and the data may move between tiers under it. A slot counts its owners, so
//! that processes that share a page after a fork share its slot.
//!
//! ```
//! use memfold_swap::{PAGE_SIZE, Scratch, SwapConfig, SwapSpace};
//! use zsmalloc::HeapSource;
//!
//! let config = SwapConfig { pool_capacity_pages: 4096, max_slots: 4096, ..Default::default() };
//! let space = SwapSpace::new(HeapSource::new(), config)?;
//! let mut scratch = Scratch::new();
//!
//! let page = [0x42; PAGE_SIZE];
//! let slot = space.store(&page, &mut scratch)?;
//! let mut back = [0; PAGE_SIZE];
//! space.load(slot, &mut back, &mut scratch)?;
//! assert_eq!(back, page);
//! space.release(slot);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it is built
//!
//! - A **swap table** is a cluster's 512 entries of 8 bytes: state, tier, location and count. It
//!   is a page at the cluster's place in one reserved range, taken when the cluster is and given
//!   back when its last slot is freed. Look-ups take no lock; every change is a compare-and-swap
//!   from an entry that was checked, and panics on one that cannot be.
//! - **Tiers** ([`Tier`]) keep the data: same-filled pages in their entry; compressed,
//!   incompressible and recompressed ones in a [`zsmalloc::Pool`]; cold ones, encrypted, in a file
//!   ([`FileTier`]), if there is one. Pages [move](SwapSpace::scan) between tiers under their
//!   owners, and [back](SwapSpace::evacuate).
//! - A page is stored with a **checksum** of its contents and its slot, and never handed out if
//!   either does not match.
//! - A [`Gather`] releases what an unmap or an exit leaves behind, off the caller's path.
//! - A [`Group`] is charged for what it stores, and so is every group above it.
//!
//! What holds when, and why, is checked by models ([loom](https://docs.rs/loom)) of the changes a
//! slot goes through: `RUSTFLAGS="--cfg loom" cargo test -p memfold-swap --lib --release`.
//!
//! The crate makes no system call and knows no address space: its memory comes from a
//! [`zsmalloc::PageSource`].

// The models use only a part of what they share with the space.
#![cfg_attr(loom, allow(dead_code))]

mod backlog;
mod counts;
mod entry;
mod grace;
mod slot;
mod sync;

#[cfg(all(loom, test))]
mod models;

#[cfg(not(loom))]
mod allocator;
#[cfg(not(loom))]
mod checksum;
#[cfg(not(loom))]
mod codec;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod gather;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
mod migrate;
#[cfg(not(loom))]
mod migrator;
#[cfg(not(loom))]
mod page;
#[cfg(not(loom))]
mod release;
#[cfg(not(loom))]
mod scratch;
#[cfg(not(loom))]
mod shards;
#[cfg(not(loom))]
mod source;
#[cfg(not(loom))]
mod space;
#[cfg(not(loom))]
mod stored_bytes;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod tier;
#[cfg(not(loom))]
mod zstd;

pub use counts::CountError;
pub use entry::{Location, MAX_AGE, TierKind};
pub use slot::{CLUSTER_SLOTS, Slot, SlotRange, SlotRanges};

#[cfg(not(loom))]
pub use zsmalloc::PAGE_SIZE;
#[cfg(not(loom))]
pub use {
    codec::{Algorithm, ParseAlgorithmError},
    counters::Usage,
    error::{Corruption, LoadError, NewSwapSpaceError, StoreError},
    gather::{Gather, GatherConfig, GatherUsage},
    group::{Charge, Group, GroupUsage},
    migrate::{MigrateReport, ScanPolicy},
    page::{Page, fill, fill_word},
    scratch::Scratch,
    space::{SwapConfig, SwapSpace},
    tier::{FileBackend, FileKey, FileTier, FileUsage, Placed, Stored, Tier},
};

#[cfg(all(feature = "testing", not(loom)))]
pub use tier::{Fault, Faults, FaultyTier, NoopTier};
