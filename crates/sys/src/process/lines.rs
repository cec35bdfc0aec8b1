//! The lines of files that a program makes as long as it likes.
//!
//! A program may have as many mappings as `vm.max_map_count` says, each of a file whose path takes a megabyte: nothing in
//! the kernel bounds the length of `maps` and `smaps`. So they are read line by line, and given up beyond a bound, which
//! bounds the time as well.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;

/// The most bytes of `maps` that are read: four times what the default of `vm.max_map_count` allows with usual paths. More
/// lets a program keep a thread busy for longer.
pub(super) const MOST_OF_MAPS: u64 = 32 << 20;
/// The same for `smaps`, which has up to some fifteen times as much of each mapping.
pub(super) const MOST_OF_SMAPS: u64 = 16 * MOST_OF_MAPS;

/// Hands the lines of a file of `/proc` to `look`, from its beginning, without their ends, until that breaks. Such files
/// make up each part when it is read, so others may read the same one meanwhile. Bytes that are not UTF-8 become `�`.
///
/// # Errors
/// [`io::ErrorKind::FileTooLarge`] if it has more than `most` bytes before that, and if it cannot be read.
pub(super) fn each_line<B>(
    file: &File,
    most: u64,
    mut look: impl FnMut(&str) -> ControlFlow<B>,
) -> io::Result<Option<B>> {
    const PART: usize = 1 << 15;
    let mut part = vec![0; PART];
    // The beginning of a line that the last part did not end.
    let mut begun: Vec<u8> = Vec::new();
    let mut at = 0;
    loop {
        let read = file.read_at(&mut part, at)?;
        at += read as u64;
        if at > most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let rest = &part[..read];
        let whole = match rest.iter().rposition(|byte| *byte == b'\n') {
            _ if read == 0 => 0,
            Some(last) => last + 1,
            None => {
                begun.extend_from_slice(rest);
                continue;
            }
        };
        begun.extend_from_slice(&rest[..whole]);
        for line in String::from_utf8_lossy(&begun).split_terminator('\n') {
            if let ControlFlow::Break(found) = look(line) {
                return Ok(Some(found));
            }
        }
        if read == 0 {
            return Ok(None);
        }
        begun.clear();
        begun.extend_from_slice(&rest[whole..]);
    }
}

/// A file in memory with this text.
#[cfg(test)]
pub(super) fn file(text: &[u8]) -> File {
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::io::Write;
    let mut file = File::from(memfd_create("lines", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(text).unwrap();
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(file: &File, most: u64) -> io::Result<Vec<String>> {
        let mut all = Vec::new();
        let ended = each_line(file, most, |line| {
            all.push(line.to_owned());
            ControlFlow::<()>::Continue(())
        });
        ended.map(|_| all)
    }

    #[test]
    fn lines_are_whole_wherever_parts_end() {
        let expected: Vec<String> = (0..3000)
            .map(|number| "x".repeat(number % 97) + &number.to_string())
            .chain(["y".repeat(100_000), String::new(), "the last".to_owned()])
            .collect();
        let text = expected.join("\n");
        assert_eq!(lines(&file(text.as_bytes()), u64::MAX).unwrap(), expected);
        assert_eq!(lines(&file(b"one\n"), u64::MAX).unwrap(), ["one"]);
        assert!(lines(&file(b""), 0).unwrap().is_empty());
    }

    #[test]
    fn what_is_longer_is_given_up() {
        let text = file(&b"0123456789\n".repeat(1000));
        assert_eq!(lines(&text, 11_000).unwrap().len(), 1000);
        let error = lines(&text, 10_999).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let first = each_line(&text, 11_000, |line| ControlFlow::Break(line.to_owned()));
        assert_eq!(first.unwrap().as_deref(), Some("0123456789"));
    }
}
