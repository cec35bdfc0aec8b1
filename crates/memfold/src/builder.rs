//! Making a [`Memfold`].

use crate::{Error, Mode, Region, Stats};
use memfold_pager::embedded::{Config, Engine};
use memfold_pager::{Algorithm, Limit};
use std::fmt;
use std::sync::Arc;

/// A limit on memory, and the regions under it. Clones share the limit.
///
/// All methods may be called from any thread. The threads that reclaim memory and serve faults exit
/// when the last clone and the last region are dropped.
///
/// ```
/// use memfold::Memfold;
///
/// let memfold = Memfold::with_limit(32 << 20)?;
/// let mut cache = memfold.map(64 << 20)?;
/// cache[..5].copy_from_slice(b"hello");
/// assert!(memfold.stats().resident_bytes >= 4096);
/// # Ok::<(), memfold::Error>(())
/// ```
#[derive(Clone)]
pub struct Memfold(Arc<Engine>);

/// Options of a [`Memfold`], from [`Memfold::builder`].
///
/// ```
/// use memfold::{Algorithm, Memfold, Mode};
///
/// let memfold = Memfold::builder()
///     .limit(32 << 20)
///     .algorithm(Algorithm::Zstd)
///     .mode(Mode::Protection)
///     .build()?;
/// assert_eq!(memfold.mode(), Mode::Protection);
/// # Ok::<(), memfold::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a builder makes nothing until `build` is called"]
pub struct MemfoldBuilder(
    Config,
    #[cfg(feature = "remote")] Option<memfold_remote::Options>,
);

impl Default for MemfoldBuilder {
    fn default() -> Self {
        let config = Config {
            limit: Limit::default(),
            algorithm: Algorithm::default(),
            checksum: true,
            mode: None,
            readahead: true,
            remote: None,
        };
        #[cfg(feature = "remote")]
        return MemfoldBuilder(config, None);
        #[cfg(not(feature = "remote"))]
        MemfoldBuilder(config)
    }
}

impl MemfoldBuilder {
    /// The most bytes of memory for everything: resident pages of regions, the compressed pool and
    /// its metadata. Pages that cannot be moved out (they do not compress, or are pinned) stay
    /// resident; [`Stats::over_limit_pages`] counts the excess.
    ///
    /// Without this and [`resident_limit`](Self::resident_limit): half of the memory that the host,
    /// or the cgroup of this process, allows.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.0.limit.total_bytes = Some(bytes);
        self
    }

    /// The most bytes of regions that may be resident, not counting the compressed pool: what the
    /// limit of a memory cgroup means with zram.
    pub fn resident_limit(mut self, bytes: u64) -> Self {
        self.0.limit.resident_bytes = Some(bytes);
        self
    }

    /// How pages are compressed. Default: LZ4.
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.0.algorithm = algorithm;
        self
    }

    /// Whether a checksum of each stored page is verified on swap-in. Default: yes.
    pub fn checksum(mut self, checksum: bool) -> Self {
        self.0.checksum = checksum;
        self
    }

    /// How faults are served. Default: [`Mode::Signal`] where the host allows userfaultfd, else
    /// [`Mode::Protection`]. [`build`](Self::build) fails if the host does not allow the mode given
    /// here.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.0.mode = Some(mode);
        self
    }

    /// Whether a thread reads ahead of sequential and strided streams, and, while there is ample
    /// room, swaps in whole blocks of 64 pages once more than an eighth of the block is resident.
    /// Default: yes. Protection mode has no readahead.
    pub fn readahead(mut self, readahead: bool) -> Self {
        self.0.readahead = readahead;
        self
    }

    /// Where pages go once the compressed ones take half of the [`limit`](Self::limit): to Valkey or
    /// Redis, one server or a cluster, encrypted. Default: nowhere. Such a page leaves this process only
    /// when the store has acknowledged it; a clean end removes all of them, and the store forgets those
    /// of a process that crashed. `docs/remote.md` says what is lost when.
    ///
    /// A thread that touches a page that is there waits for the store, up to
    /// [`RemoteOptions::patience`](crate::RemoteOptions::patience). **If the page is not returned by
    /// then, or another one is, the program is aborted**, before it reads wrong data. Where the store
    /// takes no pages, they stay in memory, and the limit may be exceeded.
    ///
    /// Needs a [`limit`](Self::limit), and userfaultfd: there is no protection mode with it.
    ///
    /// ```no_run
    /// use memfold::{Memfold, RemoteOptions};
    ///
    /// let store = RemoteOptions::new("valkey://10.0.0.7".parse()?);
    /// let memfold = Memfold::builder().limit(4 << 30).remote(store).build()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "remote")]
    pub fn remote(mut self, store: memfold_remote::Options) -> Self {
        self.1 = Some(store);
        self
    }

    /// Starts the threads of a new limit.
    ///
    /// # Errors
    /// If the limit is too small, the host does not allow the mode, the kernel refuses memory,
    /// descriptors or threads, or a store cannot be used.
    pub fn build(mut self) -> Result<Memfold, Error> {
        let limit = &mut self.0.limit;
        if limit.total_bytes.is_none() && limit.resident_bytes.is_none() {
            limit.total_bytes = Some(memfold_pager::embedded::memory_allowance()? / 2);
        }
        #[cfg(feature = "remote")]
        if let Some(options) = &self.1 {
            let store =
                memfold_remote::RemoteStore::open(options).map_err(|error| match error {
                    memfold_remote::OpenError::TimeToLive => Error::RemoteOptions(Box::new(error)),
                    error => Error::Remote(Box::new(error)),
                })?;
            self.0.remote = Some(memfold_pager::embedded::Remote {
                tier: store.tier(),
                owner: Arc::new(store),
            });
        }
        Ok(Memfold(Arc::new(Engine::new(&self.0)?)))
    }
}

impl Memfold {
    /// A builder with the defaults.
    pub fn builder() -> MemfoldBuilder {
        MemfoldBuilder::default()
    }

    /// A limit of `bytes` for everything, with the defaults of [`MemfoldBuilder`].
    ///
    /// # Errors
    /// As [`MemfoldBuilder::build`].
    pub fn with_limit(bytes: u64) -> Result<Memfold, Error> {
        Memfold::builder().limit(bytes).build()
    }

    /// Maps a region of `length` bytes, which reads as zeros.
    ///
    /// # Errors
    /// If the length is zero, or the kernel has no such range of addresses.
    pub fn map(&self, length: usize) -> Result<Region, Error> {
        Ok(Region::new(self.0.map(length)?))
    }

    /// An allocator whose memory is regions under this limit.
    #[cfg(feature = "allocator-api2")]
    pub fn allocator(&self) -> crate::RegionAllocator {
        crate::RegionAllocator::new(self.clone())
    }

    /// Statistics, since the limit was made.
    ///
    /// ```
    /// use memfold::{Memfold, Stats};
    ///
    /// let stats = Memfold::with_limit(32 << 20)?.stats();
    /// for (field, value) in Stats::FIELDS.iter().zip(stats.values()) {
    ///     println!("{}: {value}", field.name);
    /// }
    /// # Ok::<(), memfold::Error>(())
    /// ```
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Statistics of the [store](MemfoldBuilder::remote) on other machines, if there is one. All zeros in a
    /// forked child.
    #[cfg(feature = "remote")]
    pub fn remote_usage(&self) -> Option<crate::RemoteUsage> {
        self.0.remote_usage()
    }

    /// How faults are served.
    pub fn mode(&self) -> Mode {
        self.0.mode()
    }

    /// Whether this process is a forked child of the one that made the limit, and so cannot use it.
    pub fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// Whether the kernel calls the library's signal handler. If not, a handler was installed later,
    /// and must pass faults on by [`handle_signal`](crate::handle_signal).
    pub fn is_handler_installed(&self) -> bool {
        self.0.is_handler_installed()
    }

    /// Returns when the pool's pages of all dropped regions are released. That happens in the
    /// background otherwise.
    pub fn wait_for_release(&self) {
        self.0.wait_for_release();
    }
}

impl fmt::Debug for Memfold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memfold").field(&self.stats()).finish()
    }
}
