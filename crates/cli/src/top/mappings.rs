//! The mappings of a program, with their names.

use crate::format::printable;
use memfold_pager::MappingUsage;
use memfold_sys::process::MapsLine;

/// Rows that are shown at most, whatever a run answers.
const MOST: usize = 64;
/// Characters of a name.
const LONGEST_NAME: usize = 60;

/// One mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// What it has in memory and outside.
    pub usage: MappingUsage,
    /// What the kernel calls it.
    pub name: String,
}

/// The mappings of a program, named where its `/proc/PID/maps` can be read.
pub fn named(pid: i32, found: Vec<MappingUsage>) -> Vec<Mapping> {
    let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    with_names(&String::from_utf8_lossy(&maps), found)
}

fn with_names(maps: &str, found: Vec<MappingUsage>) -> Vec<Mapping> {
    let named = found.into_iter().take(MOST).map(|usage| Mapping {
        name: name_in(maps, usage.start),
        usage,
    });
    named.collect()
}

fn name_in(maps: &str, start: u64) -> String {
    let mut lines = maps.lines().filter_map(MapsLine::parse);
    match lines.find(|line| line.range.start == start) {
        None => "-".to_owned(),
        Some(line) if line.name.is_empty() => "anonymous".to_owned(),
        Some(line) => printable(line.name).chars().take(LONGEST_NAME).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00e2b000-0104c000 rw-p 00000000 00:00 0                                  [heap]
7f2c40000000-7f2c4a000000 rw-p 00000000 00:00 0 
7f2c4b000000-7f2c4c000000 rw-p 00000000 00:00 0                          [anon:a\u{1b}b]
";

    #[test]
    fn names_are_the_kernels_and_steer_no_terminal() {
        assert_eq!(name_in(MAPS, 0xe2_b000), "[heap]");
        assert_eq!(name_in(MAPS, 0x7f2c_4000_0000), "anonymous");
        assert_eq!(name_in(MAPS, 0x7f2c_4b00_0000), "[anon:a?b]");
        assert_eq!(name_in(MAPS, 0x1000), "-");
        let usage = MappingUsage {
            start: 0,
            end: 0,
            resident_bytes: 0,
            out_bytes: 0,
            stored_bytes: 0,
        };
        assert_eq!(with_names(MAPS, vec![usage; 1000]).len(), MOST);
    }
}
