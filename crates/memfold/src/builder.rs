//! Making a [`Memfold`].

use crate::{Error, Mode, Region, RegionAllocator, Stats};
use memfold_pager::embedded::{Config, Engine};
use memfold_pager::{Algorithm, Limit};
use std::fmt;
use std::sync::Arc;

/// A limit on memory, and the regions under it. Clones are the same one.
///
/// All methods may be called from any thread. The threads that work for it end when the last clone
/// and the last region are gone.
#[derive(Clone)]
pub struct Memfold(Arc<Engine>);

/// How a [`Memfold`] is to be; see [`Memfold::builder`].
#[derive(Debug, Clone)]
pub struct Builder(Config);

impl Default for Builder {
    fn default() -> Self {
        Builder(Config {
            limit: Limit::default(),
            algorithm: Algorithm::default(),
            checksum: true,
            mode: None,
            readahead: true,
        })
    }
}

impl Builder {
    /// The most bytes of memory to use for everything: resident pages of regions, the compressed
    /// pool and records. Nothing is lost when it cannot be held (data that does not compress); the
    /// excess is in [`Stats::over_limit_pages`].
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Self {
        self.0.limit.total_bytes = Some(bytes);
        self
    }

    /// The most bytes of regions that may be resident, whatever the pool takes besides: what the
    /// limit of a memory cgroup means with zram.
    #[must_use]
    pub fn resident_limit(mut self, bytes: u64) -> Self {
        self.0.limit.resident_bytes = Some(bytes);
        self
    }

    /// How pages are compressed. LZ4 if not said.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.0.algorithm = algorithm;
        self
    }

    /// Whether each stored page has a checksum that is verified when it is read: yes, if not said.
    /// It costs about 0.08 µs a page each way.
    #[must_use]
    pub fn checksum(mut self, checksum: bool) -> Self {
        self.0.checksum = checksum;
        self
    }

    /// How faults are served. If not said: [`Mode::Signal`] where the host allows userfaultfd, and
    /// else [`Mode::Protection`]. A mode that is asked for is never replaced by another.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.0.mode = Some(mode);
        self
    }

    /// Whether a thread reads ahead of sequential and strided accesses, and, where nothing has to
    /// leave memory for it, brings in what lies around scattered accesses once an eighth of their
    /// neighbourhood (64 pages) was touched: yes, if not said. Protection mode has none.
    #[must_use]
    pub fn readahead(mut self, readahead: bool) -> Self {
        self.0.readahead = readahead;
        self
    }

    /// Makes it. Where no limit was given, half of the memory that the host, or the cgroup of this
    /// process, allows.
    ///
    /// # Errors
    /// If the limit is too small, or the host does not allow the mode.
    pub fn build(mut self) -> Result<Memfold, Error> {
        let limit = &mut self.0.limit;
        if limit.total_bytes.is_none() && limit.resident_bytes.is_none() {
            limit.total_bytes = Some(memfold_pager::embedded::default_limit()?);
        }
        Ok(Memfold(Arc::new(Engine::new(&self.0)?)))
    }
}

impl Memfold {
    /// A builder with the defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Maps a region of `length` bytes, which starts as zeros.
    ///
    /// # Errors
    /// If the length is zero or the system has no such range.
    pub fn map(&self, length: usize) -> Result<Region, Error> {
        Ok(Region::new(self.0.map(length)?))
    }

    /// An allocator whose memory is regions of this.
    pub fn allocator(&self) -> RegionAllocator {
        RegionAllocator::new(self.clone())
    }

    /// The figures now.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// How faults are served.
    pub fn mode(&self) -> Mode {
        self.0.mode()
    }

    /// Whether this process inherited it by a fork, and so cannot use it.
    pub fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// Whether the signal handler is the one that the kernel calls now. If not, a handler that was
    /// installed later must pass faults on by [`handle_signal`](crate::handle_signal).
    pub fn is_handler_installed(&self) -> bool {
        self.0.is_handler_installed()
    }

    /// Returns when what dropped regions had in the pool has been released, which is otherwise done
    /// in the background.
    pub fn settle(&self) {
        self.0.settle();
    }
}

impl fmt::Debug for Memfold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memfold").field(&self.stats()).finish()
    }
}
