//! The preload library as an image: what is mapped where, and what depends on the address.

use memfold_sys::PAGE_SIZE;
use object::elf::{FileHeader64, PF_W, PF_X, PT_LOAD, SHT_RELA};
use object::read::elf::{FileHeader, ProgramHeader, Rela, SectionHeader};
use object::{Endianness, read};
use std::ops::Range;

/// The kinds of relocations that the library has.
mod relocation {
    #[cfg(target_arch = "aarch64")]
    pub(super) use object::elf::{R_AARCH64_ABS64 as ABSOLUTE, R_AARCH64_RELATIVE as RELATIVE};
    #[cfg(target_arch = "x86_64")]
    pub(super) use object::elf::{R_X86_64_64 as ABSOLUTE, R_X86_64_RELATIVE as RELATIVE};
}

type Header = FileHeader64<Endianness>;

/// Access that a segment is mapped with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Execute,
    Write,
}

/// A part of the file that is mapped as a whole. Addresses are relative to the image's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    /// Pages, of which those beyond the file are empty.
    pub pages: Range<u64>,
    /// Where in the file the first page is.
    pub offset: u64,
    /// Addresses of what comes from the file.
    pub file: Range<u64>,
    pub access: Access,
}

/// A word that is written once the address is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fixup {
    /// The image's address and a number.
    Relative { place: u64, addend: u64 },
    /// A function of the program's, which is not looked up: null.
    Absent { place: u64 },
}

/// The library's layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Image {
    pub segments: Vec<Segment>,
    pub fixups: Vec<Fixup>,
    /// Where a thread enters it.
    pub entry: u64,
    /// Length in bytes, a multiple of pages.
    pub length: u64,
}

impl Image {
    /// Reads the layout. `None` where the file is not as this project's build makes it.
    pub(super) fn parse(file: &[u8]) -> Option<Image> {
        parse(file).ok().flatten()
    }
}

fn parse(file: &[u8]) -> read::Result<Option<Image>> {
    let header = Header::parse(file)?;
    let endian = header.endian()?;
    let mut image = Image {
        segments: Vec::new(),
        fixups: Vec::new(),
        entry: header.e_entry(endian),
        length: 0,
    };
    for program in header.program_headers(endian, file)? {
        let start: u64 = program.p_vaddr(endian);
        let memory = start..start.saturating_add(program.p_memsz(endian));
        if program.p_type(endian) != PT_LOAD {
            continue;
        }
        let length: u64 = program.p_filesz(endian);
        let offset: u64 = program.p_offset(endian);
        image.segments.push(Segment {
            pages: pages(&memory),
            offset: offset.saturating_sub(start % PAGE_SIZE as u64),
            file: start..start.saturating_add(length),
            access: match program.p_flags(endian) {
                flags if flags & PF_W != 0 => Access::Write,
                flags if flags & PF_X != 0 => Access::Execute,
                _ => Access::Read,
            },
        });
    }
    for section in header.section_headers(endian, file)? {
        if section.sh_type(endian) != SHT_RELA {
            continue;
        }
        let Some((entries, _)) = section.rela(endian, file)? else {
            continue;
        };
        for entry in entries {
            let place = entry.r_offset(endian);
            let addend = entry.r_addend(endian) as u64;
            image.fixups.push(match entry.r_type(endian, false) {
                relocation::RELATIVE => Fixup::Relative { place, addend },
                relocation::ABSOLUTE if addend == 0 => Fixup::Absent { place },
                _ => return Ok(None),
            });
        }
    }
    image.length = image
        .segments
        .iter()
        .map(|one| one.pages.end)
        .max()
        .unwrap_or(0);
    Ok(image.is_sound(file.len() as u64).then_some(image))
}

impl Image {
    /// Whether the parts lie where they can be mapped, one after the other.
    fn is_sound(&self, file: u64) -> bool {
        let executes =
            |one: &Segment| one.access == Access::Execute && one.file.contains(&self.entry);
        let is_in_order = |pair: &[Segment]| pair[0].pages.end <= pair[1].pages.start;
        let is_in_file = |one: &Segment| {
            let read = one.file.end - one.file.start;
            let begins = one.offset + one.file.start % PAGE_SIZE as u64;
            begins.checked_add(read).is_some_and(|end| end <= file)
        };
        let is_writable = |place: u64| {
            let holds =
                |one: &Segment| one.pages.contains(&place) && one.pages.contains(&(place + 7));
            let mut segments = self.segments.iter();
            segments.any(|one| one.access == Access::Write && holds(one))
        };
        let place_of = |fixup: &Fixup| match *fixup {
            Fixup::Relative { place, .. } | Fixup::Absent { place } => place,
        };
        self.length < 1 << 24
            && self.segments.iter().any(executes)
            && self.segments.windows(2).all(is_in_order)
            && self.segments.iter().all(is_in_file)
            && self.fixups.iter().map(place_of).all(is_writable)
    }
}

/// Whether a program was made by Go's own linker. Such a program forks only to execute another, in one step
/// that shares its memory.
pub(super) fn is_go(head: &[u8]) -> bool {
    const NAME: &[u8] = b"Go";
    let has_note = || -> read::Result<bool> {
        let header = Header::parse(head)?;
        let endian = header.endian()?;
        for program in header.program_headers(endian, head)? {
            let Some(mut notes) = program.notes(endian, head)? else {
                continue;
            };
            while let Some(note) = notes.next()? {
                if note.name() == NAME {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    };
    // What cannot be read is none.
    has_note().unwrap_or(false)
}

/// The pages that addresses lie in, as addresses.
fn pages(addresses: &Range<u64>) -> Range<u64> {
    let page = PAGE_SIZE as u64;
    addresses.start / page * page..addresses.end.div_ceil(page) * page
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::Random;

    fn own_program() -> Vec<u8> {
        std::fs::read("/proc/self/exe").unwrap()
    }

    #[test]
    fn a_program_is_no_library_of_ours() {
        // It has relocations of other kinds, or a segment larger than any of the library's.
        assert_eq!(Image::parse(&own_program()), None);
        assert_eq!(Image::parse(b""), None);
        assert_eq!(Image::parse(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn a_program_that_go_did_not_make_has_no_note_of_it() {
        assert!(!is_go(&own_program()));
        assert!(!is_go(b"\x7fELF\x02\x01\x01"));
    }

    #[test]
    fn what_a_user_made_of_a_program_is_read_to_the_end() {
        let mut program = own_program();
        program.truncate(1 << 12);
        let mut random = Random::new(7);
        for _ in 0..2000 {
            let mut broken = program.clone();
            for _ in 0..4 {
                let at = random.below(400);
                broken[at] = random.below(256) as u8;
            }
            let _ = (is_go(&broken), Image::parse(&broken));
        }
    }
}
