//! Why a program that is there cannot be found: its interpreter is not.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// As much of a file as the kernel reads for the first line of a script; ELF headers are in it, too.
const HEAD: u64 = 4096;

/// The interpreter that a program asks for, if that is what does not exist.
pub fn missing(program: &OsStr) -> Option<PathBuf> {
    let mut head = Vec::new();
    File::open(place(program)?)
        .ok()?
        .take(HEAD)
        .read_to_end(&mut head)
        .ok()?;
    let interpreter = of_script(&head).or_else(|| of_elf(&head))?;
    (!interpreter.exists()).then_some(interpreter)
}

/// Where the C library finds a program.
fn place(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(program));
    places.find(|place| place.is_file())
}

fn of_script(head: &[u8]) -> Option<PathBuf> {
    let line = head
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let word = line
        .split(|byte| matches!(byte, b' ' | b'\t' | b'\r'))
        .find(|word| !word.is_empty())?;
    Some(Path::new(OsStr::from_bytes(word)).to_owned())
}

/// The loader that a 64-bit program names.
fn of_elf(head: &[u8]) -> Option<PathBuf> {
    const PT_INTERP: u64 = 3;
    if !head.starts_with(b"\x7fELF\x02") {
        return None;
    }
    let number = |at: usize, length: usize| {
        let bytes = head.get(at..at.checked_add(length)?)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0_u64, |all, byte| all << 8 | u64::from(*byte)),
        )
    };
    let (first, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let headers =
        (0..count).filter_map(|index| usize::try_from(first.checked_add(index * size)?).ok());
    let header = headers
        .into_iter()
        .find(|at| number(*at, 4) == Some(PT_INTERP))?;
    let start = usize::try_from(number(header.checked_add(8)?, 8)?).ok()?;
    let path = head.get(start..)?.split(|byte| *byte == 0).next()?;
    Some(OsString::from_vec(path.to_vec()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_interpreter_is_named_if_it_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#! /no/such/sh -e\necho\n").unwrap();
        assert_eq!(missing(script.as_os_str()), Some("/no/such/sh".into()));
        fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_eq!(missing(script.as_os_str()), None);
        assert_eq!(missing(OsStr::new("/no/such/program")), None);
        assert_eq!(missing(OsStr::new("sh")), None);
    }

    #[test]
    fn a_loader_is_an_interpreter() {
        let mut own = fs::read("/proc/self/exe").unwrap();
        own.truncate(HEAD as usize);
        let loader = of_elf(&own).unwrap();
        assert!(loader.exists(), "{}", loader.display());
        for length in 0..200 {
            let _ = of_elf(&own[..length]);
        }
    }
}
