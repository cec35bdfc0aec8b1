//! The lines of `/proc/PID/maps`.

use super::Process;
use super::lines::{MOST_OF_MAPS, each_line};
use std::io;
use std::ops::{ControlFlow, Range};

/// A mapping, as a line of `/proc/PID/maps` has it. The program chooses what it maps and the names of its files; the kernel
/// writes each mapping into a line of its own, with line breaks in names as `\012`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapsLine<'a> {
    /// Its addresses.
    pub range: Range<u64>,
    /// What it may be used for: `rwxp`, or `s` for the last if it is shared, and `-` for what it may not.
    pub access: &'a str,
    /// Where in the file it begins, in bytes.
    pub offset: u64,
    /// Whether it is of no file. (A file's inode may have any number, as a FUSE server chooses it; its device is never this
    /// one.)
    pub is_of_no_file: bool,
    /// The path, or the name that the kernel or the program gave it; empty if it has none.
    pub name: &'a str,
}

impl Process {
    /// The first mapping of which `look` makes something. However many there are, few lines at a time are kept.
    ///
    /// # Errors
    /// If `maps` may not be read, has more than 32 MiB, or the process is gone.
    pub fn find_mapping<T>(
        &self,
        mut look: impl FnMut(MapsLine<'_>) -> Option<T>,
    ) -> io::Result<Option<T>> {
        each_line(
            &self.open_living("maps")?,
            MOST_OF_MAPS,
            |line| match MapsLine::parse(line).and_then(&mut look) {
                Some(found) => ControlFlow::Break(found),
                None => ControlFlow::Continue(()),
            },
        )
    }
}

impl<'a> MapsLine<'a> {
    /// Reads a line without its end; `None` if it is not one of `maps`.
    ///
    /// ```
    /// use memfold_sys::process::MapsLine;
    /// let line = "7ffd0000-7ffd2000 r-xp 00000000 00:00 0                          [vdso]";
    /// let vdso = MapsLine::parse(line).unwrap();
    /// assert_eq!((vdso.range, vdso.access), (0x7ffd_0000..0x7ffd_2000, "r-xp"));
    /// assert!(vdso.is_of_no_file && vdso.name == "[vdso]");
    /// ```
    pub fn parse(line: &'a str) -> Option<MapsLine<'a>> {
        let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
        let mut rest = line;
        let mut field = || {
            let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = after;
            (!field.is_empty()).then_some(field)
        };
        let (start, end) = field()?.split_once('-')?;
        let range = hexadecimal(start)?..hexadecimal(end)?;
        let (access, offset) = (field()?, hexadecimal(field()?)?);
        let (device, inode) = (field()?, field()?);
        Some(MapsLine {
            range,
            access,
            offset,
            is_of_no_file: device == "00:00" && inode == "0",
            name: rest.trim_start_matches(' '),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_have_spaces() {
        let line = "00401000-004a2000 r-xp 00001000 fe:00 1234   /usr/bin/a  program ";
        let code = MapsLine {
            range: 0x40_1000..0x4a_2000,
            access: "r-xp",
            offset: 0x1000,
            is_of_no_file: false,
            name: "/usr/bin/a  program ",
        };
        assert_eq!(MapsLine::parse(line), Some(code));
    }

    #[test]
    fn memory_without_a_name_has_none() {
        for line in [
            "7f0000000000-7f0000001000 rw-p 00000000 00:00 0",
            "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ",
        ] {
            let memory = MapsLine::parse(line).unwrap();
            assert!(memory.is_of_no_file && memory.name.is_empty(), "{line}");
        }
    }

    #[test]
    fn files_of_any_inode_are_files() {
        let fuse = "7f0000000000-7f0000001000 rw-p 00000000 00:27 0 ";
        assert!(!MapsLine::parse(fuse).unwrap().is_of_no_file);
    }

    #[test]
    fn what_is_no_line_is_none() {
        for text in ["", "no line", "00401000-004a2000 r-xp 0000 fe:00"] {
            assert_eq!(MapsLine::parse(text), None, "{text}");
        }
    }
}
