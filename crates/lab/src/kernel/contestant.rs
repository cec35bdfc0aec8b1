//! The ways to run a program in less memory than it needs.

use std::{
    ffi::OsStr,
    fmt,
    fs::File,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{measure, workload::Figures};
use crate::host::{Guardian, MemoryGroup, Scratch, Zram, Zswap};

const MEBIBYTE: f64 = (1_u64 << 20) as f64;
/// How often a pool's fill level is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// A way to run a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Contestant {
    /// As it is, without a limit.
    Native,
    /// In a memory cgroup, over zram with this compressor.
    Zram(String),
    /// In a memory cgroup, over zswap and a swap file.
    Zswap,
    /// Under `memfold run`.
    Memfold,
    /// With memory of the library `memfold`.
    MemfoldEmbedded,
}

impl Contestant {
    pub fn parse(name: &str) -> Result<Self> {
        Ok(match name.split_once(':').unwrap_or((name, "")) {
            ("native", "") => Self::Native,
            ("zram", "") => Self::Zram("lz4".to_owned()),
            ("zram", algorithm) => Self::Zram(algorithm.to_owned()),
            ("zswap", "") => Self::Zswap,
            ("memfold", "") => Self::Memfold,
            ("memfold-embedded", "") => Self::MemfoldEmbedded,
            _ => bail!(
                "there is no contestant {name:?}; use native, zram:lz4, zram:lzo-rle, zswap, \
                 memfold, memfold-embedded"
            ),
        })
    }

    /// Whether the kernel does the swapping, and the host must be set up for it.
    pub fn is_kernel(&self) -> bool {
        matches!(self, Self::Zram(_) | Self::Zswap)
    }

    /// What others are compared with.
    pub fn is_reference(&self) -> bool {
        matches!(self, Self::Zram(algorithm) if algorithm == "lz4")
    }

    /// How memory gets out under it (see [`super::workload`]).
    pub fn eviction(&self) -> &'static str {
        match self {
            Self::Native | Self::MemfoldEmbedded => "none",
            Self::Zram(_) | Self::Zswap => "advise",
            Self::Memfold => "ballast",
        }
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => write!(formatter, "native"),
            Self::Zram(algorithm) => write!(formatter, "zram:{algorithm}"),
            Self::Zswap => write!(formatter, "zswap"),
            Self::Memfold => write!(formatter, "memfold"),
            Self::MemfoldEmbedded => write!(formatter, "memfold-embedded"),
        }
    }
}

/// What all runs share.
#[derive(Debug)]
pub struct Setting {
    /// There where a contestant changes the host.
    pub guardian: Option<Guardian>,
    /// The `memfold` program.
    pub memfold: PathBuf,
    /// Where a swap file may be.
    pub swap_folder: PathBuf,
    /// Bytes that `memfold` takes at rest, once measured.
    pub at_rest: OnceLock<f64>,
}

/// How much memory a run may have resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowance {
    /// So many megabytes, for every contestant but `native`.
    Resident(usize),
    /// As much as it wants; memfold only watches.
    Ample,
}

/// The host, ready for one run by one contestant, and as before when this is dropped.
#[derive(Debug)]
pub struct Session {
    contestant: Contestant,
    allowance: Allowance,
    memfold: PathBuf,
    // The processes go before the swap that holds their memory.
    group: Option<MemoryGroup>,
    zram: Option<Zram>,
    zswap: Option<Zswap>,
    /// Kernel memory taken for each slot while nothing is swapped out.
    slot_at_rest: Option<f64>,
    /// Memory taken while nothing is swapped out. Bytes.
    at_rest: Option<f64>,
    fullest: Mutex<Pool>,
    folder: Scratch,
}

/// What a pool of the kernel's holds. Bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Pool {
    original: u64,
    used: u64,
}

impl Session {
    /// Sets the host up. `swap_bytes` is the size of a swap device.
    pub fn start(
        contestant: &Contestant,
        allowance: Allowance,
        swap_bytes: u64,
        setting: &Setting,
    ) -> Result<Self> {
        let mut session = Self {
            contestant: contestant.clone(),
            allowance,
            memfold: setting.memfold.clone(),
            group: None,
            zram: None,
            zswap: None,
            slot_at_rest: None,
            at_rest: None,
            fullest: Mutex::default(),
            folder: Scratch::new()?,
        };
        if contestant.is_kernel() {
            let guardian = setting.guardian.as_ref().context("there is no guardian")?;
            let before = kernel_mappings()?;
            match contestant {
                Contestant::Zram(algorithm) => {
                    session.zram = Some(Zram::start(guardian, algorithm, swap_bytes)?);
                }
                _ => {
                    let folder = &setting.swap_folder;
                    session.zswap = Some(Zswap::start(guardian, folder, swap_bytes)?);
                }
            }
            let slots = swap_bytes / zsmalloc::PAGE_SIZE as u64;
            let taken = kernel_mappings()? - before;
            session.at_rest = Some(taken);
            session.slot_at_rest = Some(taken / slots as f64);
            let limit = match allowance {
                Allowance::Resident(megabytes) => Some((megabytes as u64) << 20),
                Allowance::Ample => None,
            };
            session.group = Some(MemoryGroup::start(guardian, limit)?);
        }
        if *contestant == Contestant::Memfold {
            session.at_rest = Some(setting.memfold_at_rest()?);
        }
        Ok(session)
    }

    /// The command that runs a program as this contestant does.
    pub fn command(&self, program: &OsStr, arguments: &[String]) -> Result<Command> {
        if self.contestant == Contestant::Memfold {
            let mut command = Command::new(&self.memfold);
            command
                .args(["run", "--quiet", "--stats"])
                .arg(self.stats_file());
            match self.allowance {
                Allowance::Resident(megabytes) => {
                    command.args(["--resident", &format!("{megabytes}M")]);
                }
                // So far away that memfold never needs to do anything.
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

    /// A folder for this run's files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn stats_file(&self) -> PathBuf {
        self.folder.path().join("stats.json")
    }

    /// Whether the kernel killed the program for want of memory, as it does now and then in a cgroup
    /// that is small against it, although swap is free.
    pub fn was_killed(&self) -> Result<bool> {
        Ok(match &self.group {
            Some(group) => group.kills()? > 0,
            None => false,
        })
    }

    /// A remark for the report.
    pub fn remark(&self) -> Option<String> {
        let zswap = self.zswap.as_ref()?;
        let compressor = zswap.compressor();
        let charged = match &self.group {
            Some(group) if group.charges_zswap() => ", and its pool counts against the limit",
            _ => "",
        };
        Some(format!("zswap compresses with {compressor} here{charged}"))
    }

    /// Looks at the kernel's pool again and again until `stop`, to know it at its fullest.
    pub fn watch(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let now = self.pool();
            let mut fullest = self.fullest.lock().unwrap_or_else(PoisonError::into_inner);
            if now.original > fullest.original {
                *fullest = now;
            }
            drop(fullest);
            std::thread::park_timeout(LOOK);
        }
    }

    fn pool(&self) -> Pool {
        let zram = self.zram.as_ref().and_then(|zram| zram.usage().ok());
        let zram = zram.map(|usage| Pool {
            original: usage.original,
            used: usage.used,
        });
        let zswap = self.zswap.as_ref().and_then(|zswap| zswap.usage().ok());
        let zswap = zswap.map(|usage| Pool {
            original: usage.original,
            used: usage.used,
        });
        zram.or(zswap).unwrap_or_default()
    }

    /// What the run cost in memory, as far as this contestant can say.
    pub fn costs(&self) -> Result<Figures> {
        let figures = Figures::default();
        if self.contestant == Contestant::Memfold {
            return self.memfold_costs();
        }
        let Some(group) = &self.group else {
            return Ok(figures);
        };
        let fullest = *self.fullest.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = match &self.zram {
            Some(zram) => zram.usage()?.most_used,
            None => fullest.used,
        };
        let resident = group.peak()?;
        let mut figures = figures
            .with("peak_resident_mib", resident as f64 / MEBIBYTE)
            .with("peak_pool_mib", pool as f64 / MEBIBYTE)
            .with("peak_total_mib", (resident + pool) as f64 / MEBIBYTE);
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

    fn memfold_costs(&self) -> Result<Figures> {
        let file = File::open(self.stats_file()).context("memfold wrote no statistics")?;
        let stats: Value = serde_json::from_reader(file)?;
        let number = |name: &str| {
            let value = stats[name].as_f64();
            value.with_context(|| format!("memfold's statistics have no {name}"))
        };
        let mut figures = Figures::default()
            .with("cpu_supervisor_s", number("cpu_seconds")?)
            .with(
                "peak_resident_mib",
                number("peak_resident_bytes")? / MEBIBYTE,
            )
            .with("peak_pool_mib", number("peak_pool_bytes")? / MEBIBYTE)
            .with("peak_total_mib", number("peak_total_bytes")? / MEBIBYTE);
        let original = number("bytes_original")?;
        if original > 0.0 {
            let share = number("bytes_stored")? / original;
            figures = figures.with("stored_bytes_per_page", share * zsmalloc::PAGE_SIZE as f64);
        }
        let slots = number("peak_table_slots")?;
        if slots > 0.0 {
            figures = figures.with("bytes_per_slot", number("peak_table_bytes")? / slots);
        }
        if let Some(bytes) = self.at_rest {
            figures = figures.with("at_rest_mib", bytes / MEBIBYTE);
        }
        Ok(figures)
    }
}

impl Setting {
    /// What memfold's own process takes while nothing is swapped out, in bytes; measured once.
    fn memfold_at_rest(&self) -> Result<f64> {
        if let Some(bytes) = self.at_rest.get() {
            return Ok(*bytes);
        }
        let mut command = Command::new(&self.memfold);
        command.args(["run", "--quiet", "--resident", "64M", "--", "sleep", "1"]);
        let child = measure::start(&mut command)?;
        // It is at rest long before its program ends.
        std::thread::sleep(Duration::from_millis(500));
        let bytes = proportional_bytes(child.id());
        measure::check(measure::end(child)?.status)?;
        let bytes = bytes?;
        Ok(*self.at_rest.get_or_init(|| bytes))
    }
}

/// What a process takes of the memory, its share of what it has with others included.
fn proportional_bytes(process: u32) -> Result<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let line = line.context("smaps_rollup has no Pss")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}

/// Bytes of the kernel's own large allocations: a swap area's tables are among them.
fn kernel_mappings() -> Result<f64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("VmallocUsed:"));
    let line = line.context("/proc/meminfo has no VmallocUsed")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}

/// The `memfold` program: the one given, or the one beside this program.
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
    fn contestants_are_called_what_they_print() {
        for name in [
            "native",
            "zram:lz4",
            "zram:lzo-rle",
            "zswap",
            "memfold",
            "memfold-embedded",
        ] {
            assert_eq!(Contestant::parse(name).unwrap().to_string(), name);
        }
        assert_eq!(Contestant::parse("zram").unwrap().to_string(), "zram:lz4");
        assert!(Contestant::parse("native:lz4").is_err());
        assert!(Contestant::parse("swap").is_err());
    }

    #[test]
    fn a_missing_memfold_is_named_with_what_builds_it() {
        let error = find_memfold(Some("/nowhere/memfold"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nowhere/memfold") && error.contains("cargo build"),
            "{error}"
        );
    }
}
