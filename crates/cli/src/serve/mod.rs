//! `memfold serve`: a disk of compressed memory.

#[cfg_attr(feature = "ublk", path = "ublk.rs")]
#[cfg_attr(not(feature = "ublk"), path = "no_ublk.rs")]
mod block_device;
mod instance_folder;
mod listener;
mod packing_host;
mod service;
mod signals;

use crate::address::Address;
use crate::arguments::ServeArguments;
use crate::disk_report::DiskReport;
use crate::failure::Failure;
use crate::format::bytes;
use crate::messages;
use crate::own_process;
use crate::remote;
use crate::run::limits::{DEFAULT_LIMIT, in_bytes, swap_file, warn_of};
use crate::run::stats_file::StatsFile;
use block_device::BlockDevice;
use instance_folder::InstanceFolder;
use listener::Listener;
use memfold_disk::nbd::Server;
use memfold_disk::{BLOCK, Disk, MAX_SIZE, NewDiskError};
use memfold_pager::{Limit, MappedSource, open_swap_file};
use memfold_remote::RemoteStore;
use memfold_swap::{BlockShape, NewSwapSpaceError, SwapConfig, SwapSpace};
use memfold_sys::memory::check_page_size;
use packing_host::PackingHost;
use rustix::process::Resource;
use service::Service;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Less holds next to nothing.
const LEAST_LIMIT: u64 = 4 << 20;

/// How neighbours on the disk are compressed together by idle CPUs: in as many bytes as below, of which half is
/// decompressed for a read, for four times the CPU time.
const BLOCKS: BlockShape = BlockShape {
    pages: 4,
    level: 12,
};
/// How neighbours are compressed together while a write waits for room.
const BLOCKS_FOR_ROOM: BlockShape = BlockShape { pages: 8, level: 8 };
/// A block must save one in `BLOCK_SAVING` bytes of what its pages take.
const BLOCK_SAVING: u64 = 32;

/// `memfold serve`.
pub fn serve(arguments: &ServeArguments) -> Result<ExitCode, Failure> {
    check_page_size()
        .map_err(|error| Failure::own(format!("cannot keep a disk in memory: {error}")))?;
    // Before a key is made or a password read. Each client takes a descriptor.
    own_process::prepare([Resource::Nofile])?;
    // Before any thread starts, which would die of them.
    let signals = signals::block()
        .map_err(|error| Failure::own(format!("cannot take signals from a descriptor: {error}")))?;
    messages::show(messages::level(arguments.quiet, arguments.verbose))
        .map_err(|error| Failure::own(format!("cannot start the message thread: {error}")))?;
    let stats_file = arguments
        .stats
        .as_deref()
        .map(StatsFile::open)
        .transpose()?;
    // While there is one thread that makes files.
    let folder = InstanceFolder::make();
    // Dropped after the disk.
    let store = remote::open(&arguments.remote)?;
    let disk = Arc::new(disk(arguments, store.as_ref())?);
    let started = Instant::now();
    let clients = {
        let listener = arguments.nbd.as_ref().map(|address| {
            Listener::bind(address, arguments.allow_everybody)
                .map_err(|error| cannot_listen(address, &error))
        });
        let listener = listener.transpose()?;
        let device = BlockDevice::of(arguments, &disk)?;
        let places: Vec<String> = { listener.iter().map(Listener::to_string) }
            .chain(device.iter().map(BlockDevice::path))
            .collect();
        let place = places.join(" and ");
        say_what_is_served(arguments, &disk, &place);
        let folder = folder.inspect_err(|reasons| {
            log::warn!("memfold stat, top and swapoff will not find this disk: {reasons}");
        });
        let server = Server::new(disk.clone());
        let service = Service {
            listener,
            place,
            signals,
            folder: folder.ok(),
            server,
            disk: disk.clone(),
            started,
        };
        service
            .until_signal()
            .map_err(|error| Failure::own(format!("cannot wait for clients: {error}")))?
    };
    let report = DiskReport {
        wall_seconds: started.elapsed().as_secs_f64(),
        statistics: clients.statistics(disk.usage()),
    };
    log::info!("{}", report.statistics.line());
    messages::flush();
    if let Some(file) = stats_file {
        file.write(&report)
            .map_err(|error| Failure::own(format!("cannot write --stats: {error}")))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn say_what_is_served(arguments: &ServeArguments, disk: &Disk<MappedSource>, place: &str) {
    log::info!(
        "a disk of {} is at {place}, in at most {} of memory; its contents end with memfold",
        bytes(disk.size()),
        bytes(disk.limit())
    );
    if matches!(arguments.nbd, Some(Address::Tcp(_))) {
        log::warn!(
            "all who can connect to this port, other users of this machine among them, can read and \
             write the disk; use unix:PATH to keep them out"
        );
    }
}

/// The disk that the options describe.
fn disk(
    arguments: &ServeArguments,
    store: Option<&RemoteStore>,
) -> Result<Disk<MappedSource>, Failure> {
    let size = in_bytes("--size", arguments.size, BLOCK)?;
    if size > MAX_SIZE {
        return Err(Failure::own("--size: a disk has 1024 TiB at most"));
    }
    let size = size.next_multiple_of(BLOCK);
    let limit = in_bytes(
        "--limit",
        arguments.limit.unwrap_or(DEFAULT_LIMIT),
        LEAST_LIMIT,
    )?;
    warn_of(Limit {
        total_bytes: Some(limit),
        resident_bytes: None,
    });
    let file = swap_file(arguments.swap_file.as_deref(), arguments.swap_size)?;
    let blocks = size / BLOCK;
    let config = SwapConfig {
        algorithm: arguments.algo,
        checksum: !arguments.no_checksum,
        blocks: BLOCKS,
        blocks_for_room: BLOCKS_FOR_ROOM,
        block_saving: BLOCK_SAVING,
        // Until they are freed, discarded blocks have slots, too.
        max_slots: blocks.saturating_mul(2).clamp(1 << 16, (1 << 32) - 1024) as usize,
        shards: std::thread::available_parallelism().map_or(0, usize::from),
        ..SwapConfig::default()
    };
    let configs = config.for_pool_of((limit / BLOCK) as usize);
    let mut space = SwapSpace::new_that_fits(MappedSource::default, configs).map_err(|error| {
        Failure::own(format!(
            "cannot reserve addresses for the pool: {error}; raise `ulimit -v`, or give a smaller --limit"
        ))
    })?;
    let failed = |error: NewSwapSpaceError| Failure::own(error.to_string());
    let file = file.as_ref().map(open_swap_file).transpose();
    let file = file.map_err(|error| Failure::own(error.to_string()))?;
    let file = file.map(Arc::new);
    if let Some(store) = store {
        space.add_tier(Box::new(store.tier())).map_err(failed)?;
        if arguments.remote.remote_keep_copy {
            let file = file.clone();
            let file = file.ok_or_else(|| Failure::own("--remote-keep-copy needs --swap-file"))?;
            store.tier().keep_copies_in(file);
            space.prefer_remote();
        }
    }
    let failed = |error: NewDiskError| Failure::own(error.to_string());
    let disk = match file {
        Some(file) => Disk::with_file(space, file, size, limit),
        None => Disk::new(space, size, limit),
    };
    let mut disk = disk.map_err(failed)?;
    if let Some(store) = store {
        disk.wait_for(store.tier());
    }
    if let Some(after) = arguments.recompress_after.0 {
        disk.pack(after, PackingHost::default()).map_err(failed)?;
    }
    Ok(disk)
}

fn cannot_listen(address: &Address, error: &std::io::Error) -> Failure {
    let (name, remedy) = match address {
        Address::Unix(path) if error.kind() == std::io::ErrorKind::AddrInUse => (
            format!("unix:{}", path.display()),
            "; another server listens there: give another path",
        ),
        Address::Unix(path) if error.kind() == std::io::ErrorKind::AlreadyExists => (
            format!("unix:{}", path.display()),
            "; the file is no socket of this user's: remove it, or give another path",
        ),
        Address::Unix(path) => (
            format!("unix:{}", path.display()),
            "; give a path in a folder that exists and that you may write to",
        ),
        Address::Tcp(text) if error.kind() == std::io::ErrorKind::AddrInUse => (
            text.clone(),
            "; another program listens there: give another port",
        ),
        Address::Tcp(text) => (text.clone(), ""),
    };
    Failure::own(format!("cannot listen at {name}: {error}{remedy}"))
}
