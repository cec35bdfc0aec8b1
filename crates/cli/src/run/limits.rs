//! The limits of a run, and notes on those that cannot be meant.

use crate::arguments::HoldOptions;
use crate::control::LEAST_LIMIT;
use crate::failure::Failure;
use crate::format::bytes;
use memfold_pager::{Limit, Size, SwapFileOptions};
use memfold_sys::probe;
use rustix::fs::statfs;
use std::path::Path;

pub const DEFAULT_LIMIT: Size = Size::Percent(50.0);
/// A smaller swap file is not worth its name.
const LEAST_SWAP: u64 = 1 << 20;

/// The limits that the options give.
pub fn limit(options: &HoldOptions) -> Result<Limit, Failure> {
    let total = match (options.limit, options.resident) {
        (None, None) => Some(DEFAULT_LIMIT),
        (total, _) => total,
    };
    let bytes = |name: &str, size: Option<Size>| {
        size.map(|size| in_bytes(name, size, LEAST_LIMIT))
            .transpose()
    };
    Ok(Limit {
        total_bytes: bytes("--limit", total)?,
        resident_bytes: bytes("--resident", options.resident)?,
    })
}

/// A size in bytes, or why it is refused.
pub fn in_bytes(name: &str, size: Size, least: u64) -> Result<u64, Failure> {
    let found = size.bytes().map_err(|error| {
        Failure::own(format!(
            "cannot read how much memory the host allows: {error}; give {name} without %"
        ))
    })?;
    if found < least {
        return Err(Failure::own(format!(
            "{name}: {} is too little; give at least {}",
            bytes(found),
            bytes(least)
        )));
    }
    Ok(found)
}

/// The swap file that the options give.
pub fn swap_file(
    directory: Option<&Path>,
    size: Option<Size>,
) -> Result<Option<SwapFileOptions>, Failure> {
    let (Some(directory), Some(size)) = (directory, size) else {
        return Ok(None);
    };
    if statfs(directory).is_ok_and(|system| is_memory(system.f_type as u64)) {
        log::warn!(
            "--swap-file {}: files there are memory themselves (tmpfs); give a directory on a disk, such as /var/tmp",
            directory.display()
        );
    }
    Ok(Some(SwapFileOptions {
        directory: directory.to_owned(),
        bytes: in_bytes("--swap-size", size, LEAST_SWAP)?,
    }))
}

/// Whether files of a file system of this kind take memory, not a disk.
fn is_memory(kind: u64) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    matches!(kind, TMPFS | RAMFS)
}

/// Notes what is most likely a mistake, and with `-v` which limit is in force.
pub fn note(options: &HoldOptions, limit: Limit) {
    let allowed = warn_of(limit);
    if options.verbose {
        let name = |bytes_of: Option<u64>| bytes_of.map_or("none".to_owned(), bytes);
        log::info!(
            "limit {}, resident limit {}; this host or control group allows {}",
            name(limit.total_bytes),
            name(limit.resident_bytes),
            bytes(allowed)
        );
    }
}

/// Warns of limits that cannot be meant; returns how much memory this host or control group allows.
pub fn warn_of(limit: Limit) -> u64 {
    let allowed = probe::memory_allowance().map_or(u64::MAX, |allowance| allowance.bytes);
    for line in notes(limit, allowed) {
        log::warn!("{line}");
    }
    allowed
}

fn notes(limit: Limit, allowed: u64) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, given) in [
        ("--limit", limit.total_bytes),
        ("--resident", limit.resident_bytes),
    ] {
        if let Some(given) = given.filter(|given| *given > allowed) {
            lines.push(format!(
                "{name} {} is more than this host or control group allows ({}): memory may run out \
                 before memfold does anything; give less, such as {name} 80%",
                bytes(given),
                bytes(allowed)
            ));
        }
    }
    if let (Some(total), Some(resident)) = (limit.total_bytes, limit.resident_bytes)
        && resident >= total
    {
        lines.push(format!(
            "--resident {} has no effect beside the limit of {} (--limit or MEMFOLD_LIMIT), which counts resident memory, too",
            bytes(resident),
            bytes(total)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::{Arguments, Command};
    use clap::Parser;

    fn limit_of(line: &[&str]) -> Result<Limit, String> {
        let all = ["memfold", "run"].iter().chain(line).chain(&["true"]);
        match Arguments::parse_from(all).command {
            Command::Run(run) => limit(&run.options).map_err(|failure| failure.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn half_is_the_default_only_where_nothing_is_said() {
        let allowed = probe::memory_allowance().unwrap().bytes;
        let none = limit_of(&[]).unwrap();
        assert_eq!(
            (none.total_bytes, none.resident_bytes),
            (Some(allowed / 2), None)
        );
        let resident = limit_of(&["--resident", "16M"]).unwrap();
        assert_eq!(
            (resident.total_bytes, resident.resident_bytes),
            (None, Some(LEAST_LIMIT))
        );
    }

    #[test]
    fn too_little_is_refused_in_one_line() {
        for line in [&["--limit", "1M"], &["--resident", "0"]] {
            let failure = limit_of(line).unwrap_err();
            assert!(
                failure.contains("at least 16.0 MiB") && !failure.contains('\n'),
                "{failure}"
            );
        }
    }

    #[test]
    fn what_cannot_be_meant_is_noted() {
        let limit = |total_bytes, resident_bytes| Limit {
            total_bytes,
            resident_bytes,
        };
        const MIB: u64 = 1 << 20;
        assert_eq!(
            notes(limit(Some(100 * MIB), Some(50 * MIB)), 200 * MIB),
            [""; 0]
        );
        let lines = notes(limit(Some(300 * MIB), None), 200 * MIB);
        assert!(
            lines[0].contains("--limit 300 MiB is more than"),
            "{lines:?}"
        );
        let lines = notes(limit(Some(50 * MIB), Some(100 * MIB)), 200 * MIB);
        assert!(
            lines[0].starts_with("--resident 100 MiB has no effect"),
            "{lines:?}"
        );
        assert_eq!(lines.len(), 1);
    }
}
