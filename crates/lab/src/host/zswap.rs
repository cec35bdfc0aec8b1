//! zswap in front of a swap file.

use std::{fs::File, io::Write, os::unix::fs::OpenOptionsExt, path::Path};

use anyhow::{Context, Result, ensure};

use super::{Change, Guardian, Undo, read, require_root, swap, undo::PREFIX, write};

const PARAMETERS: &str = "/sys/module/zswap/parameters";

/// zswap over a swap file, the host's only swap, until it is dropped.
#[derive(Debug)]
pub struct Zswap {
    compressor: String,
    // Fields drop in this order: swapoff, then the file, then the module parameters.
    _swapping: Change,
    _file: Change,
    _parameters: Vec<Change>,
}

/// Memory statistics of zswap, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZswapUse {
    /// Stored pages before compression.
    pub original: u64,
    /// Memory allocated for them.
    pub used: u64,
}

impl Zswap {
    /// Creates a swap file of `bytes` bytes in `folder`, whose file system must support swap files,
    /// and enables zswap: with lz4 if the kernel's crypto API has it, else with the compressor
    /// already set ([`Zswap::compressor`]).
    ///
    /// # Errors
    /// Without root, if the kernel lacks zswap, and if other swap is in use.
    pub fn start(guardian: &Guardian, folder: &Path, bytes: u64) -> Result<Self> {
        require_root("zswap")?;
        swap::require_none()?;
        // The guardian that undoes this may have another working directory.
        let folder = folder
            .canonicalize()
            .with_context(|| format!("the folder {} (--swap-dir)", folder.display()))?;
        let enabled = Path::new(PARAMETERS).join("enabled");
        ensure!(
            enabled.exists(),
            "this kernel has no zswap: build it with CONFIG_ZSWAP"
        );
        let mut parameters = Vec::new();
        let compressor = Path::new(PARAMETERS).join("compressor");
        // Fails if the kernel has no lz4; the compressor in use is read below.
        let lz4 = || {
            let _ = std::fs::write(&compressor, "lz4");
            Ok(())
        };
        parameters.push(guardian.change(&write_back(&compressor)?, lz4)?.0);
        let enable = || write(&enabled, "Y");
        parameters.push(guardian.change(&write_back(&enabled)?, enable)?.0);
        let path = folder.join(format!("{PREFIX}{}.swap", std::process::id()));
        let (file, empty) = guardian.change(&Undo::Delete(path.clone()), || create(&path))?;
        fill(empty, bytes).with_context(|| format!("swap file {}", path.display()))?;
        let swapping = swap::start(guardian, &path, bytes).context(
            "zswap: choose a folder on a file system that supports swap files with --swap-dir",
        )?;
        Ok(Self {
            compressor: read(&compressor)?,
            _swapping: swapping,
            _file: file,
            _parameters: parameters,
        })
    }

    /// The compressor in use.
    pub fn compressor(&self) -> &str {
        &self.compressor
    }

    /// Current statistics, which are the whole kernel's.
    pub fn usage() -> Result<ZswapUse> {
        let meminfo = read("/proc/meminfo")?;
        let bytes = |name: &str| -> Result<u64> {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
            let line = line.with_context(|| format!("/proc/meminfo has no {name}"))?;
            Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
        };
        Ok(ZswapUse {
            original: bytes("Zswapped:")?,
            used: bytes("Zswap:")?,
        })
    }
}

fn write_back(parameter: &Path) -> Result<Undo> {
    Ok(Undo::WriteBack(parameter.to_owned(), read(parameter)?))
}

fn create(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    options
        .open(path)
        .with_context(|| format!("swap file {}", path.display()))
}

/// Writes the file in full: swapon(2) rejects files with holes.
fn fill(mut file: File, bytes: u64) -> Result<()> {
    const CHUNK: usize = 1 << 20;
    let zeros = vec![0; CHUNK];
    for _ in 0..bytes.div_ceil(CHUNK as u64) {
        file.write_all(&zeros)?;
    }
    file.sync_all()?;
    Ok(())
}
