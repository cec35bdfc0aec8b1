//! A swap space in user space.
//!
//! [`SwapSpace::store`] takes a page and returns a [`Slot`]; [`SwapSpace::load`] copies the page
//! back. A slot is virtual: it is independent of where the data lies, which may move between tiers.
//! A slot has a reference count, so that processes that share a page after a fork share its slot.
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
//! - A **swap table** holds the 512 entries of a cluster, 8 bytes each: state, tier, location and
//!   count. It is the page at the cluster's place in one reserved range, committed when the cluster
//!   is allocated and discarded when its last slot is freed. Look-ups take no lock; every change is
//!   a compare-and-swap from a checked entry, and panics on an invalid one.
//! - **Tiers** ([`Tier`]) store the data: same-filled pages in their entry; compressed,
//!   incompressible and recompressed pages in a [`zsmalloc::Pool`], recompressed ones together with
//!   neighbours as blocks; cold pages, encrypted, in an
//!   optional file ([`FileTier`]) and in a store on other machines ([`RemoteTier`]). Pages [move](SwapSpace::scan) between tiers without their owners
//!   noticing, and [back](SwapSpace::evacuate).
//! - A page is stored with a **checksum** of its contents and its slot, which is verified on load.
//! - A [`Gather`] releases the slots of an unmap or an exit in the background.
//! - A [`Group`] and its ancestors are charged for the pages it stores.
//!
//! [Loom](https://docs.rs/loom) models check all pairs of changes of a slot.
//!
//! The crate makes no system call: its memory comes from a [`zsmalloc::PageSource`].

// The models use a part of the crate only.
#![cfg_attr(loom, allow(dead_code))]

mod backlog;
mod block_record;
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
mod config;
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
mod store;
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
    config::{BlockShape, SwapConfig},
    counters::Usage,
    error::{Corruption, LoadError, NewSwapSpaceError, StoreError},
    gather::{Gather, GatherConfig, GatherUsage},
    group::{Charge, Group, GroupUsage},
    migrate::{MigrateReport, ScanPolicy},
    page::{Page, fill, fill_word},
    scratch::Scratch,
    space::SwapSpace,
    tier::{
        Batch, BatchId, FileBackend, FileTier, FileUsage, Place, Placed, RemoteBackend,
        RemoteConfig, RemoteError, RemoteTier, RemoteUsage, Removal, Stored, Tier, TierKey,
    },
};

#[cfg(all(feature = "testing", not(loom)))]
pub use tier::{Fault, Faults, FaultyTier, ModelFault, ModelStore, NoopTier};
