//! Sizes that several parts of the engine rely on.

/// Threads that may serve faults or reclaim at a time; further ones wait. More takes more memory: each
/// has a stack, buffers, and a part of every engine's stage.
pub(super) const WORKERS: usize = 64;
/// Pages that are swapped in at once, at most. More saves system calls, and takes a larger buffer for
/// each worker.
pub(super) const WINDOW: usize = 32;
/// Pages that are moved out at once, at most. More saves system calls, and keeps faulting threads that
/// reclaim busy for longer.
pub(super) const BATCH: usize = 64;
/// Slots of swapped-in pages whose release is deferred, at most. More makes larger batches, and keeps
/// the pool's memory for longer.
pub(super) const DEFERRED_FREES: usize = 512;
/// Pages that may be resident whatever the limit: with fewer the engine could not make progress.
pub(super) const LEAST_PAGES: u64 = 256;
/// Bytes: a region starts at a multiple of this, and no two regions share one.
pub(super) const GRANULE: usize = 2 << 20;
