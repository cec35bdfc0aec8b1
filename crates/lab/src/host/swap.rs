//! Swap areas: mkswap, swapon and swapoff.

use std::{
    ffi::CString,
    fs::OpenOptions,
    io,
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use zsmalloc::PAGE_SIZE;

use super::{Change, Guardian, Undo, read, require_root, retry};

/// `SWAP_FLAG_PREFER` of swapon(2): the low bits are a priority.
const PRIORITY_GIVEN: libc::c_int = 0x8000;
/// Priority of the lab's swap area. No other is in use ([`require_none`]).
const PRIORITY: libc::c_int = 100;

/// Fails if other swap is in use: the run would measure that as well.
pub fn require_none() -> Result<()> {
    let table = read("/proc/swaps")?;
    // Below a header, names as the kernel prints them.
    let names = table.lines().skip(1);
    let names: Vec<&str> = names
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    ensure!(
        names.is_empty(),
        "other swap is in use ({}), which would distort the comparison: disable it with swapoff",
        names.join(", ")
    );
    Ok(())
}

/// Writes a swap header to a device or file of `bytes` bytes and enables it; dropping the result
/// disables it.
pub fn start(guardian: &Guardian, area: &Path, bytes: u64) -> Result<Change> {
    require_root("swap")?;
    let file = OpenOptions::new()
        .write(true)
        .open(area)
        .with_context(|| format!("cannot open {}", area.display()))?;
    file.write_all_at(&header(bytes)?, 0)?;
    file.sync_all()?;
    drop(file);
    let name = CString::new(area.as_os_str().as_bytes())?;
    let (change, ()) = guardian.change(&Undo::StopSwapping(area.to_owned()), || {
        // SAFETY: the name is a C string; the call reads no other memory.
        let failed = unsafe { libc::swapon(name.as_ptr(), PRIORITY_GIVEN | PRIORITY) } != 0;
        let error = io::Error::last_os_error();
        ensure!(!failed, "swapon {}: {error}", area.display());
        Ok(())
    })?;
    Ok(change)
}

/// Disables an area if it is in use. Only swapoff(2) knows that: /proc/swaps may call it by another
/// name.
pub fn stop(area: &Path) -> Result<()> {
    let name = CString::new(area.as_os_str().as_bytes())?;
    retry(|| {
        // SAFETY: the name is a C string; the call reads no other memory.
        let failed = unsafe { libc::swapoff(name.as_ptr()) } != 0;
        let error = io::Error::last_os_error();
        // Not in use; does not exist; and without the privilege it was never enabled.
        let off = [libc::EINVAL, libc::ENOENT, libc::EPERM].map(Some);
        ensure!(
            !failed || off.contains(&error.raw_os_error()),
            "swapoff {}: {error}",
            area.display()
        );
        Ok(())
    })
}

/// The first page of a swap area as mkswap(8) writes it: version 1, no bad pages, no label.
fn header(bytes: u64) -> Result<[u8; PAGE_SIZE]> {
    let pages = u32::try_from(bytes / PAGE_SIZE as u64)?;
    ensure!(pages > 10, "a swap area of {bytes} bytes is too small");
    let mut page = [0; PAGE_SIZE];
    page[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    page[1028..1032].copy_from_slice(&(pages - 1).to_le_bytes());
    page[PAGE_SIZE - 10..].copy_from_slice(b"SWAPSPACE2");
    Ok(page)
}
