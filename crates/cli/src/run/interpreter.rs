//! Why a program that is there cannot be found: its interpreter is not.

use super::executable::Head;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The interpreter that a program asks for, if that is what does not exist.
pub fn missing(program: &OsStr) -> Option<PathBuf> {
    let head = Head::read(File::open(place(program)?).ok()?)?;
    let interpreter = of_script(head.bytes()).or_else(|| head.executable()?.interpreter)?;
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
}
