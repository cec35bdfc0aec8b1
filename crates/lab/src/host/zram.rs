//! A zram device used as swap.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use super::{Change, Guardian, Undo, read, require_root, retry, swap, write};

const HOT_ADD: &str = "/sys/class/zram-control/hot_add";

/// A zram device of its own, used as the host's only swap until it is dropped.
#[derive(Debug)]
pub struct Zram {
    folder: PathBuf,
    // Swapping stops before the device goes.
    _swapping: Change,
    _device: Change,
}

/// What a zram device holds. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZramUse {
    /// The pages stored, before compression. Same-filled pages count.
    pub original: u64,
    /// The same, compressed.
    pub compressed: u64,
    /// All memory taken for them now.
    pub used: u64,
    /// The most memory taken since the device was made.
    pub most_used: u64,
}

impl Zram {
    /// Makes a device of `bytes` that compresses with `algorithm`, and swaps to it.
    ///
    /// # Errors
    /// Without root, where the kernel has no zram or not this algorithm, and where other swap is
    /// in use.
    pub fn start(guardian: &Guardian, algorithm: &str, bytes: u64) -> Result<Self> {
        require_root("zram")?;
        swap::require_none()?;
        if !Path::new(HOT_ADD).exists() {
            // It may be a module. If this fails, the next line says so.
            let _ = Command::new("modprobe")
                .arg("zram")
                .stderr(Stdio::null())
                .status();
        }
        ensure!(
            Path::new(HOT_ADD).exists(),
            "this kernel has no zram (CONFIG_ZRAM; or: modprobe zram)"
        );
        // Reading the file makes a device, whose number is known only then. One that a crash leaves
        // just here is empty and takes no memory.
        let add = || Ok(read(HOT_ADD)?.parse()?);
        let (device, number) = guardian.make(add, |number| Undo::RemoveZram(*number))?;
        let folder = PathBuf::from(format!("/sys/block/zram{number}"));
        let known = read(folder.join("comp_algorithm"))?;
        let mut names = known
            .split_whitespace()
            .map(|name| name.trim_matches(['[', ']']));
        if !names.any(|name| name == algorithm) {
            bail!("zram of this kernel cannot compress with {algorithm}; it has: {known}");
        }
        write(folder.join("comp_algorithm"), algorithm)?;
        write(folder.join("disksize"), &bytes.to_string())?;
        let node = PathBuf::from(format!("/dev/zram{number}"));
        retry(|| {
            ensure!(node.exists(), "{} does not appear", node.display());
            Ok(())
        })?;
        let swapping = swap::start(guardian, &node, bytes).context("zram")?;
        Ok(Self {
            folder,
            _swapping: swapping,
            _device: device,
        })
    }

    /// What it holds now.
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
