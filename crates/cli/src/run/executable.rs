//! What the headers of an executable say.

use object::elf::{ELFCLASS64, FileHeader64, PT_INTERP};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, read};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// As much of a file as the kernel reads for the first line of a script; programs have their ELF headers in it, too.
const HEAD: u64 = 4096;

/// The first bytes of a program.
#[derive(Debug)]
pub struct Head(Vec<u8>);

/// Headers of an ELF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executable {
    pub sixty_four_bit: bool,
    /// A loader brings in libraries: whether it names one.
    pub interpreted: bool,
    /// That loader, if it is named in the head.
    pub interpreter: Option<PathBuf>,
}

impl Head {
    /// None if it cannot be read.
    pub fn read(file: impl Read) -> Option<Head> {
        let mut head = Vec::new();
        file.take(HEAD).read_to_end(&mut head).ok()?;
        Some(Head(head))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// None for what is no ELF file, or has no header of one.
    pub fn executable(&self) -> Option<Executable> {
        let class = self.0.strip_prefix(b"\x7fELF")?.first()?;
        if *class != ELFCLASS64 {
            return Some(Executable {
                sixty_four_bit: false,
                interpreted: false,
                interpreter: None,
            });
        }
        self.sixty_four_bit().ok()
    }

    fn sixty_four_bit(&self) -> read::Result<Executable> {
        let head = self.bytes();
        let header = FileHeader64::<Endianness>::parse(head)?;
        let endian = header.endian()?;
        let mut programs = header.program_headers(endian, head)?.iter();
        let named = programs.find(|program| program.p_type(endian) == PT_INTERP);
        let path = named.and_then(|program| program.interpreter(endian, head).ok()?);
        Ok(Executable {
            sixty_four_bit: true,
            interpreted: named.is_some(),
            interpreter: path.map(|path| OsString::from_vec(path.to_vec()).into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn own() -> Vec<u8> {
        let head = Head::read(File::open("/proc/self/exe").unwrap());
        head.unwrap().0
    }

    fn parsed(head: &[u8]) -> Option<Executable> {
        Head(head.to_vec()).executable()
    }

    #[test]
    fn a_loader_is_named() {
        let own = parsed(&own()).unwrap();
        assert!(own.sixty_four_bit && own.interpreted);
        let loader = own.interpreter.unwrap();
        assert!(loader.exists(), "{}", loader.display());
    }

    #[test]
    fn programs_that_cannot_load_a_library_are_told_apart() {
        let mut head = own();
        // No program headers: nothing names a loader.
        head[56..58].copy_from_slice(&[0, 0]);
        assert!(!parsed(&head).unwrap().interpreted);
        head[4] = 1;
        assert!(!parsed(&head).unwrap().sixty_four_bit);
        assert_eq!(parsed(b"#!/bin/sh\n"), None);
        assert_eq!(parsed(b"\x7fELF\x02"), None);
    }

    #[test]
    fn a_head_that_is_cut_off_or_wrong_is_read_without_harm() {
        let own = own();
        for length in 0..200 {
            let _ = parsed(&own[..length]);
        }
        for at in 0..128 {
            let mut broken = own.clone();
            broken[at] ^= 0xff;
            let _ = parsed(&broken);
        }
    }
}
