//! What grows: the same work in more bytes, processes, mappings or threads.

use anyhow::{Context, Result, ensure};

use crate::kernel::Scale;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Pages that the programs visit in order; a mapping is a multiple of it.
const BLOCK: u64 = 16;
/// Pages of the small case at scale 1: as many mappings as are wanted, of the least size that is managed.
const SMALL_PAGES: usize = 160_000;
const PROCESSES: usize = 200;
const MAPPINGS: usize = 10_000;
const THREADS: usize = 64;
/// The largest case in MiB at scale 1.
const LARGEST_MEBIBYTES: usize = 16 << 10;
/// Resident pages are this part of all.
const RESIDENT_DIVISOR: u64 = 4;
/// memfold takes no smaller limit.
const LEAST_RESIDENT_BYTES: u64 = 16 << 20;
/// The smallest scale, as of that.
pub const LEAST_SCALE: f64 = 0.11;
/// What a page that is out takes at most, in hundredths of its size, for the check that there is room.
const STORED_PERCENT: u64 = 60;
/// What a run takes beside the pages.
const SPARE: u64 = 256 << 20;

/// What is larger than in the small case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dimension {
    /// The bytes of one program.
    Bytes,
    /// The processes that have them.
    Processes,
    /// The mappings that they are in.
    Mappings,
    /// The threads that use them.
    Threads,
}

impl Dimension {
    /// The names of all, as a list.
    pub const NAMES: &str = "bytes,processes,mappings,threads";

    /// The dimension of that name.
    pub fn parse(name: &str) -> Result<Self> {
        let all = [Self::Bytes, Self::Processes, Self::Mappings, Self::Threads];
        let mut all = all.into_iter();
        all.find(|dimension| dimension.name() == name)
            .with_context(|| format!("unknown dimension {name:?}; there are {}", Self::NAMES))
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Processes => "processes",
            Self::Mappings => "mappings",
            Self::Threads => "threads",
        }
    }
}

/// Programs of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// Number of processes.
    pub processes: u64,
    /// Pages of each.
    pub pages: u64,
    /// Mappings of each.
    pub mappings: u64,
    /// Threads of each.
    pub threads: u64,
}

impl Case {
    /// The small case.
    pub fn small(scale: Scale) -> Result<Self> {
        let small = Self {
            processes: 1,
            pages: blocks(scale.count(SMALL_PAGES, 1) as u64),
            mappings: 1,
            threads: 1,
        };
        ensure!(
            small.resident_bytes() >= LEAST_RESIDENT_BYTES,
            "--scale must be at least {LEAST_SCALE}"
        );
        Ok(small)
    }

    /// The small case, larger in one dimension. `largest` is the size in MiB to which bytes grow, if given.
    pub fn grown(dimension: Dimension, scale: Scale, largest: Option<usize>) -> Result<Self> {
        let small = Self::small(scale)?;
        let case = match dimension {
            Dimension::Bytes => {
                let mebibytes = largest.unwrap_or_else(|| scale.count(LARGEST_MEBIBYTES, 1));
                let pages = blocks(mebibytes as u64 * ((1 << 20) / PAGE));
                ensure!(
                    pages > small.pages,
                    "--megabytes must be above the {} of the small case",
                    small.bytes() >> 20
                );
                Self { pages, ..small }
            }
            Dimension::Processes => {
                let processes = scale.count(PROCESSES, 2) as u64;
                let pages = blocks(small.pages / processes);
                Self {
                    processes,
                    pages,
                    ..small
                }
            }
            Dimension::Mappings => {
                let mappings = scale.count(MAPPINGS, 2) as u64;
                let pages = blocks(small.pages / mappings) * mappings;
                Self {
                    pages,
                    mappings,
                    ..small
                }
            }
            Dimension::Threads => Self {
                threads: scale.count(THREADS, 2) as u64,
                ..small
            },
        };
        Ok(case)
    }

    /// All of its pages.
    pub fn all_pages(self) -> u64 {
        self.processes * self.pages
    }

    /// Their bytes.
    pub fn bytes(self) -> u64 {
        self.all_pages() * PAGE
    }

    /// The resident limit under which it runs.
    pub fn resident_bytes(self) -> u64 {
        self.bytes() / RESIDENT_DIVISOR
    }

    /// Memory that must be available for it.
    pub fn needed_bytes(self) -> u64 {
        let out = self.bytes() - self.resident_bytes();
        self.resident_bytes() + out / 100 * STORED_PERCENT + SPARE
    }

    /// How much of a dimension it has.
    pub fn size(self, dimension: Dimension) -> String {
        match dimension {
            Dimension::Bytes => format!("{} MiB", self.bytes() >> 20),
            Dimension::Processes => self.processes.to_string(),
            Dimension::Mappings => self.mappings.to_string(),
            Dimension::Threads => self.threads.to_string(),
        }
    }
}

/// `pages` pages as whole blocks; at least one.
fn blocks(pages: u64) -> u64 {
    (pages / BLOCK).max(1) * BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_is_larger_in_one_dimension() {
        let small = Case::small(Scale(1.0)).unwrap();
        assert_eq!(small.bytes(), 625 << 20);
        let grown = |dimension| Case::grown(dimension, Scale(1.0), None).unwrap();
        let bytes = grown(Dimension::Bytes);
        assert_eq!((bytes.bytes(), bytes.resident_bytes()), (16 << 30, 4 << 30));
        let processes = grown(Dimension::Processes);
        assert_eq!((processes.processes, processes.pages), (200, 800));
        let mappings = grown(Dimension::Mappings);
        assert_eq!(mappings.mappings, 10_000);
        let threads = grown(Dimension::Threads);
        assert_eq!(threads.threads, 64);
        for case in [processes, mappings, threads] {
            assert_eq!(case.all_pages(), small.all_pages());
        }
    }

    #[test]
    fn a_mapping_is_whole_blocks_at_any_scale() {
        for scale in [LEAST_SCALE, 0.13, 0.37, 2.0] {
            for name in Dimension::NAMES.split(',') {
                let dimension = Dimension::parse(name).unwrap();
                let case = Case::grown(dimension, Scale(scale), Some(4096)).unwrap();
                assert_eq!(case.pages % (case.mappings * BLOCK), 0, "{case:?}");
                assert!(case.pages / BLOCK >= case.mappings, "{case:?}");
            }
        }
        assert!(Case::small(Scale(LEAST_SCALE * 0.9)).is_err());
        let error = Case::grown(Dimension::Bytes, Scale(1.0), Some(100)).unwrap_err();
        assert!(error.to_string().contains("above the 625"), "{error}");
    }
}
