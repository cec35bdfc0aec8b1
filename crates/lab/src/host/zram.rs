//! A zram device used as swap.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use super::{Change, Guardian, Undo, read, require_root, retry, swap, write};

const HOT_ADD: &str = "/sys/class/zram-control/hot_add";

/// A new zram device, enabled as the host's only swap until it is dropped.
#[derive(Debug)]
pub struct Zram {
    folder: PathBuf,
    // Fields drop in this order: swapoff, then the device.
    _swapping: Change,
    _device: Change,
}

/// Memory statistics of a zram device (`mm_stat`), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZramUse {
    /// Stored pages before compression, same-filled ones included.
    pub original: u64,
    /// Compressed size of the stored pages.
    pub compressed: u64,
    /// Memory allocated for them.
    pub used: u64,
    /// Peak of `used`.
    pub most_used: u64,
}

impl Zram {
    /// Creates a device of `bytes` bytes that compresses with `algorithm`, and enables it as swap.
    ///
    /// # Errors
    /// Without root, if the kernel lacks zram or the algorithm, and if other swap is in use.
    pub fn start(guardian: &Guardian, algorithm: &str, bytes: u64) -> Result<Self> {
        require_root("zram")?;
        swap::require_none()?;
        if !Path::new(HOT_ADD).exists() {
            // zram may be a module. A failure is reported by the next check.
            let _ = Command::new("modprobe")
                .arg("zram")
                .stderr(Stdio::null())
                .status();
        }
        ensure!(
            Path::new(HOT_ADD).exists(),
            "this kernel has no zram: build it with CONFIG_ZRAM, or load the module zram"
        );
        // Reading hot_add creates a device and returns its number, so undo is registered only after
        // that. A device leaked by a crash in between is empty and takes no memory.
        let add = || Ok(read(HOT_ADD)?.parse()?);
        let (device, number) = guardian.make(add, |number| Undo::RemoveZram(*number))?;
        let folder = PathBuf::from(format!("/sys/block/zram{number}"));
        let known = read(folder.join("comp_algorithm"))?;
        let mut names = known
            .split_whitespace()
            .map(|name| name.trim_matches(['[', ']']));
        if !names.any(|name| name == algorithm) {
            bail!("this kernel's zram has no compressor {algorithm}; it has: {known}");
        }
        write(folder.join("comp_algorithm"), algorithm)?;
        write(folder.join("disksize"), &bytes.to_string())?;
        let node = PathBuf::from(format!("/dev/zram{number}"));
        retry(|| {
            ensure!(node.exists(), "{} did not appear", node.display());
            Ok(())
        })?;
        let swapping = swap::start(guardian, &node, bytes).context("zram")?;
        Ok(Self {
            folder,
            _swapping: swapping,
            _device: device,
        })
    }

    /// Current statistics.
    pub fn usage(&self) -> Result<ZramUse> {
        let text = read(self.folder.join("mm_stat"))?;
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        let mut next = || {
            numbers
                .next()
                .context("mm_stat is short")?
                .context("mm_stat")
        };
        let (original, compressed, used, _limit) = (next()?, next()?, next()?, next()?);
        Ok(ZramUse {
            original,
            compressed,
            used,
            most_used: next()?,
        })
    }
}
