//! Backends: ways to run a program in less memory than it needs.

use std::{
    ffi::OsStr,
    fmt,
    fs::File,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{measure, workload::Figures};
use crate::host::{Guardian, MemoryGroup, Scratch, Zram, Zswap};

/// Bytes.
const MEBIBYTE: f64 = (1_u64 << 20) as f64;
/// Interval between samples of the kernel's pool. A larger value may miss its peak.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A way to run a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// No limit, no swap of the lab.
    Native,
    /// A memory cgroup over zram with this compressor.
    Zram(String),
    /// A memory cgroup over zswap and a swap file.
    Zswap,
    /// `memfold run`, with as many resident bytes as the kernel's.
    Memfold,
    /// `memfold run`, with as many bytes in total, all of its own memory included, as zram and the program
    /// took together in the same round.
    MemfoldTotal,
    /// Memory of the library `memfold`, without a limit.
    MemfoldEmbedded,
}

impl Backend {
    /// The backend of that name.
    pub fn parse(name: &str) -> Result<Self> {
        Ok(match name.split_once(':').unwrap_or((name, "")) {
            ("native", "") => Self::Native,
            ("zram", "") => Self::Zram("lz4".to_owned()),
            ("zram", algorithm) => Self::Zram(algorithm.to_owned()),
            ("zswap", "") => Self::Zswap,
            ("memfold", "") => Self::Memfold,
            ("memfold-total", "") => Self::MemfoldTotal,
            ("memfold-embedded", "") => Self::MemfoldEmbedded,
            _ => bail!(
                "unknown backend {name:?}; use native, zram:lz4, zram:lzo-rle, zswap, \
                 memfold, memfold-total, memfold-embedded"
            ),
        })
    }

    /// Whether the kernel swaps, so that the host must be set up.
    pub fn is_kernel(&self) -> bool {
        matches!(self, Self::Zram(_) | Self::Zswap)
    }

    /// Whether it is `memfold run`.
    pub fn is_memfold(&self) -> bool {
        matches!(self, Self::Memfold | Self::MemfoldTotal)
    }

    /// Whether the others are compared with it.
    pub fn is_reference(&self) -> bool {
        matches!(self, Self::Zram(algorithm) if algorithm == "lz4")
    }

    /// How workloads evict memory under it: the value of `--evict` (see [`super::workload`]).
    pub fn eviction(&self) -> &'static str {
        match self {
            Self::Native | Self::MemfoldEmbedded => "none",
            Self::Zram(_) | Self::Zswap => "advise",
            Self::Memfold | Self::MemfoldTotal => "ballast",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => write!(formatter, "native"),
            Self::Zram(algorithm) => write!(formatter, "zram:{algorithm}"),
            Self::Zswap => write!(formatter, "zswap"),
            Self::Memfold => write!(formatter, "memfold"),
            Self::MemfoldTotal => write!(formatter, "memfold-total"),
            Self::MemfoldEmbedded => write!(formatter, "memfold-embedded"),
        }
    }
}

/// Parameters shared by all runs.
#[derive(Debug)]
pub struct Environment {
    /// Present if a backend changes the host.
    pub guardian: Option<Guardian>,
    /// The `memfold` binary.
    pub memfold: PathBuf,
    /// Folder for zswap's swap file.
    pub swap_folder: PathBuf,
    /// Memory of an idle `memfold`, in bytes, once measured.
    pub at_rest: OnceLock<f64>,
}

/// The limit of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Allowance {
    /// Megabytes that may be resident, under every backend but `native`.
    Resident(usize),
    /// MiB for the program and all that memfold takes itself.
    Total(f64),
    /// No limit; memfold has nothing to reclaim.
    Ample,
}

/// The host set up for one run under one backend; restored on drop.
#[derive(Debug)]
pub struct Session {
    backend: Backend,
    allowance: Allowance,
    memfold: PathBuf,
    // Drops first: its processes must exit before swapoff of the swap that holds their memory.
    group: Option<MemoryGroup>,
    zram: Option<Zram>,
    zswap: Option<Zswap>,
    /// Kernel memory per slot while nothing is swapped out, in bytes.
    slot_at_rest: Option<f64>,
    /// Memory taken while nothing is swapped out, in bytes.
    at_rest: Option<f64>,
    fullest: Mutex<Peaks>,
    /// Number of commands made; each has a statistics file of its own.
    commands: AtomicUsize,
    folder: Scratch,
}

/// What [`Session::watch`] saw.
#[derive(Debug, Clone, Copy, Default)]
struct Peaks {
    pool: Pool,
    /// Anonymous memory and the pool together, in bytes.
    counted: u64,
}

/// Fill level of the kernel's pool, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Pool {
    /// Stored pages before compression.
    original: u64,
    /// Memory allocated for them.
    used: u64,
}

impl Session {
    /// Sets up the host, with a swap device of `swap_bytes` bytes.
    pub fn start(
        backend: &Backend,
        allowance: Allowance,
        swap_bytes: u64,
        environment: &Environment,
    ) -> Result<Self> {
        let mut session = Self {
            backend: backend.clone(),
            allowance,
            memfold: environment.memfold.clone(),
            group: None,
            zram: None,
            zswap: None,
            slot_at_rest: None,
            at_rest: None,
            fullest: Mutex::default(),
            commands: AtomicUsize::new(0),
            folder: Scratch::new()?,
        };
        if backend.is_kernel() {
            let guardian = environment
                .guardian
                .as_ref()
                .context("the guardian was not started")?;
            let before = kernel_mappings()?;
            match backend {
                Backend::Zram(algorithm) => {
                    session.zram = Some(Zram::start(guardian, algorithm, swap_bytes)?);
                }
                _ => {
                    let folder = &environment.swap_folder;
                    session.zswap = Some(Zswap::start(guardian, folder, swap_bytes)?);
                }
            }
            let slots = swap_bytes / zsmalloc::PAGE_SIZE as u64;
            let taken = kernel_mappings()? - before;
            session.at_rest = Some(taken);
            session.slot_at_rest = Some(taken / slots as f64);
            let limit = match allowance {
                Allowance::Resident(megabytes) => Some((megabytes as u64) << 20),
                Allowance::Total(_) | Allowance::Ample => None,
            };
            let group = MemoryGroup::start(guardian, limit)?;
            // Fails here rather than in every sample.
            group.anonymous()?;
            session.group = Some(group);
        }
        if backend.is_memfold() {
            session.at_rest = Some(environment.memfold_at_rest()?);
        }
        Ok(session)
    }

    /// The command that runs a program under the backend.
    pub fn command(&self, program: &OsStr, arguments: &[String]) -> Result<Command> {
        if self.backend.is_memfold() {
            let mut command = Command::new(&self.memfold);
            command
                .args(["run", "--quiet", "--stats"])
                .arg(self.stats_file(self.commands.fetch_add(1, Ordering::Relaxed)));
            match self.allowance {
                Allowance::Resident(megabytes) => {
                    command.args(["--resident", &format!("{megabytes}M")]);
                }
                // The limit counts pages, pool and tables. What the supervisor itself takes does not
                // count there, and does here.
                Allowance::Total(mebibytes) => {
                    let own = self.at_rest.unwrap_or(0.0) / MEBIBYTE;
                    let limit = ((mebibytes - own) * 1024.0) as u64;
                    command.args(["--limit", &format!("{limit}K")]);
                }
                // High enough that memfold never reclaims.
                Allowance::Ample => {
                    command.args(["--limit", "90%"]);
                }
            }
            command.arg("--").arg(program).args(arguments);
            return Ok(command);
        }
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some(group) = &self.group {
            group.run_here(&mut command)?;
        }
        Ok(command)
    }

    /// A temporary folder for the run.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn stats_file(&self, command: usize) -> PathBuf {
        self.folder.path().join(format!("stats-{command}.json"))
    }

    /// Whether the OOM killer killed a process of the run.
    pub fn was_killed(&self) -> Result<bool> {
        Ok(match &self.group {
            Some(group) => group.kills()? > 0,
            None => false,
        })
    }

    /// A note for the report.
    pub fn remark(&self) -> Option<String> {
        let zswap = self.zswap.as_ref()?;
        let compressor = zswap.compressor();
        let charged = match &self.group {
            Some(group) if group.charges_zswap() => ", and its pool counts against the limit",
            _ => "",
        };
        Some(format!("zswap compresses with {compressor} here{charged}"))
    }

    /// Samples the kernel's pool and the program's anonymous memory until `stop` is set, to find their
    /// peaks.
    pub fn watch(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let now = self.pool();
            let anonymous = self.group.as_ref().map(MemoryGroup::anonymous);
            let counted = anonymous.map_or(0, Result::unwrap_or_default) + now.used;
            let mut fullest = self.fullest.lock().unwrap_or_else(PoisonError::into_inner);
            if now.original > fullest.pool.original {
                fullest.pool = now;
            }
            fullest.counted = fullest.counted.max(counted);
            drop(fullest);
            std::thread::park_timeout(POLL_INTERVAL);
        }
    }

    fn pool(&self) -> Pool {
        let zram = self.zram.as_ref().and_then(|zram| zram.usage().ok());
        let zram = zram.map(|usage| Pool {
            original: usage.original,
            used: usage.used,
        });
        let zswap = self.zswap.as_ref().and_then(|_| Zswap::usage().ok());
        let zswap = zswap.map(|usage| Pool {
            original: usage.original,
            used: usage.used,
        });
        zram.or(zswap).unwrap_or_default()
    }

    /// The memory cost of the run, as far as the backend reports it.
    pub fn costs(&self) -> Result<Figures> {
        let figures = Figures::default();
        if self.backend.is_memfold() {
            return self.memfold_costs();
        }
        let Some(group) = &self.group else {
            return Ok(figures);
        };
        let peaks = *self.fullest.lock().unwrap_or_else(PoisonError::into_inner);
        let fullest = peaks.pool;
        let pool = match &self.zram {
            Some(zram) => zram.usage()?.most_used,
            None => fullest.used,
        };
        let resident = group.peak()?;
        let mut figures = figures
            .with("peak_resident_mib", resident as f64 / MEBIBYTE)
            .with("peak_pool_mib", pool as f64 / MEBIBYTE)
            .with("peak_total_mib", (resident + pool) as f64 / MEBIBYTE)
            .with("peak_counted_mib", peaks.counted as f64 / MEBIBYTE)
            .with("faults", group.major_faults()? as f64);
        if fullest.original > 0 {
            let share = fullest.used as f64 / fullest.original as f64;
            figures = figures.with("stored_bytes_per_page", share * zsmalloc::PAGE_SIZE as f64);
        }
        if let Some(bytes) = self.slot_at_rest {
            figures = figures.with("bytes_per_slot_at_rest", bytes);
        }
        if let Some(bytes) = self.at_rest {
            figures = figures.with("at_rest_mib", bytes / MEBIBYTE);
        }
        Ok(figures)
    }

    /// Of all commands together: sums, and maxima of the peaks.
    fn memfold_costs(&self) -> Result<Figures> {
        let read = |command| -> Result<Value> {
            let file = File::open(self.stats_file(command));
            let file = file.context("memfold wrote no statistics file (--stats)")?;
            Ok(serde_json::from_reader(file)?)
        };
        let commands = 0..self.commands.load(Ordering::Relaxed);
        let all = commands.map(read).collect::<Result<Vec<_>>>()?;
        let numbers = |name: &str| -> Result<Vec<f64>> {
            let each = all.iter().map(|stats| stats[name].as_f64());
            each.collect::<Option<_>>()
                .with_context(|| format!("memfold's statistics have no {name}"))
        };
        let sum = |name: &str| -> Result<f64> { Ok(numbers(name)?.iter().sum()) };
        let peak = |name: &str| -> Result<f64> {
            let all = numbers(name)?;
            Ok(all.into_iter().fold(0.0, f64::max))
        };
        let mut figures = Figures::default()
            .with("cpu_supervisor_s", sum("cpu_seconds")?)
            .with("peak_resident_mib", peak("peak_resident_bytes")? / MEBIBYTE)
            .with("peak_pool_mib", peak("peak_pool_bytes")? / MEBIBYTE)
            .with("peak_total_mib", peak("peak_total_bytes")? / MEBIBYTE)
            .with("peak_counted_mib", peak("peak_total_bytes")? / MEBIBYTE)
            .with("faults", sum("faults_swap_in")? + sum("faults_cache")?)
            .with("pages_in", sum("pages_in")?);
        for (name, quantile) in [
            ("fault_p50_us", "p50"),
            ("fault_p90_us", "p90"),
            ("fault_p99_us", "p99"),
        ] {
            // The percentiles of several commands together are not known.
            if let [stats] = &all[..]
                && let Some(nanoseconds) = stats["fault_ns"][quantile].as_f64()
            {
                figures = figures.with(name, nanoseconds / 1000.0);
            }
        }
        let original = sum("bytes_original")?;
        if original > 0.0 {
            let share = sum("bytes_stored")? / original;
            figures = figures.with("stored_bytes_per_page", share * zsmalloc::PAGE_SIZE as f64);
        }
        let slots = numbers("peak_table_slots")?;
        let tables = slots.into_iter().zip(numbers("peak_table_bytes")?);
        if let Some((slots, bytes)) = tables.max_by(|one, other| one.0.total_cmp(&other.0))
            && slots > 0.0
        {
            figures = figures.with("bytes_per_slot", bytes / slots);
        }
        if let Some(bytes) = self.at_rest {
            figures = figures.with("at_rest_mib", bytes / MEBIBYTE);
        }
        Ok(figures)
    }
}

impl Environment {
    /// Memory of an idle memfold process (PSS) in bytes; measured once.
    fn memfold_at_rest(&self) -> Result<f64> {
        if let Some(bytes) = self.at_rest.get() {
            return Ok(*bytes);
        }
        let mut command = Command::new(&self.memfold);
        command.args(["run", "--quiet", "--resident", "64M", "--", "sleep", "1"]);
        let child = measure::start(&mut command)?;
        // Startup takes much less, and the program runs for a second.
        std::thread::sleep(Duration::from_millis(500));
        let bytes = proportional_bytes(child.id());
        measure::check(measure::end(child)?.status)?;
        let bytes = bytes?;
        Ok(*self.at_rest.get_or_init(|| bytes))
    }
}

/// PSS of a process, in bytes.
fn proportional_bytes(process: u32) -> Result<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let line = line.context("smaps_rollup has no Pss")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}

/// `VmallocUsed` in bytes, which includes a swap area's tables.
fn kernel_mappings() -> Result<f64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("VmallocUsed:"));
    let line = line.context("/proc/meminfo has no VmallocUsed")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}

/// The `memfold` binary: the given path, or the one beside `memfold-lab`.
pub fn find_memfold(given: Option<&str>) -> Result<PathBuf> {
    let path = match given {
        Some(path) => PathBuf::from(path),
        None => std::env::current_exe()?.with_file_name("memfold"),
    };
    ensure!(
        path.is_file(),
        "{} is missing: build it with `cargo build --release -p memfold-cli`, or name it with \
         --memfold PATH",
        path.display()
    );
    Ok(std::path::absolute(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_names_round_trip() {
        for name in [
            "native",
            "zram:lz4",
            "zram:lzo-rle",
            "zswap",
            "memfold",
            "memfold-total",
            "memfold-embedded",
        ] {
            assert_eq!(Backend::parse(name).unwrap().to_string(), name);
        }
        assert_eq!(Backend::parse("zram").unwrap().to_string(), "zram:lz4");
        assert!(Backend::parse("native:lz4").is_err());
        assert!(Backend::parse("swap").is_err());
    }

    #[test]
    fn the_costs_are_of_all_commands_of_a_session() {
        let environment = Environment {
            guardian: None,
            memfold: PathBuf::from("memfold"),
            swap_folder: PathBuf::new(),
            at_rest: OnceLock::from(MEBIBYTE),
        };
        let allowance = Allowance::Resident(64);
        let session = Session::start(&Backend::Memfold, allowance, 0, &environment).unwrap();
        // The second command swaps less than the first.
        for (factor, p99) in [(3.0, 9000), (1.0, 5000)] {
            let command = session.command(OsStr::new("true"), &[]).unwrap();
            let stats = serde_json::json!({
                "cpu_seconds": factor,
                "peak_resident_bytes": factor * MEBIBYTE,
                "peak_pool_bytes": factor * MEBIBYTE,
                "peak_total_bytes": factor * MEBIBYTE,
                "faults_swap_in": factor,
                "faults_cache": factor,
                "pages_in": factor,
                "fault_ns": { "p50": p99, "p90": p99, "p99": p99 },
                "bytes_original": factor * 4096.0,
                "bytes_stored": factor * 1024.0,
                "peak_table_slots": factor,
                "peak_table_bytes": factor * factor,
            });
            let mut words = command.get_args().skip_while(|word| *word != "--stats");
            let file = words.nth(1);
            std::fs::write(file.unwrap(), stats.to_string()).unwrap();
        }
        let costs = session.costs().unwrap();
        assert_eq!(costs.get("cpu_supervisor_s"), Some(4.0));
        assert_eq!(costs.get("faults"), Some(8.0));
        assert_eq!(costs.get("peak_total_mib"), Some(3.0));
        assert_eq!(costs.get("stored_bytes_per_page"), Some(1024.0));
        assert_eq!(costs.get("bytes_per_slot"), Some(3.0));
        assert_eq!(costs.get("fault_p99_us"), None);
    }

    #[test]
    fn the_error_for_a_missing_memfold_says_how_to_build_it() {
        let error = find_memfold(Some("/nowhere/memfold"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nowhere/memfold") && error.contains("cargo build"),
            "{error}"
        );
    }
}
