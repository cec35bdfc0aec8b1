//! Where something of memfold's is mapped in a program that runs.

use super::{AttachError, PROT_NONE, PROT_READ, PROT_WRITE, protect, unreadable};
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::{MapsLine, Process};
use memfold_sys::raw::nr;
use memfold_sys::tracee::Tracee;
use std::ops::Range;

/// The stack that a thread of the program runs on.
const STACK: u64 = 16 * PAGE_SIZE as u64;

/// Where the image and the stack are in a program.
pub(super) struct Place {
    pub start: u64,
    pub length: u64,
    pub stack: Range<u64>,
}

impl Place {
    /// Reserves addresses: image, guard, stack. They are far from what the program maps: it may map something again where it
    /// has unmapped, and take that for free.
    pub(super) fn reserve(
        process: &Process,
        tracee: &mut Tracee,
        image: u64,
    ) -> Result<Place, AttachError> {
        const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let length = image + PAGE_SIZE as u64 + STACK;
        let far = middle_of_gap(&Mapping::all(process)?, length);
        let arguments = [far, length, PROT_NONE, FLAGS as u64, u64::MAX, 0];
        let start = tracee.call(nr::MMAP, arguments)?;
        let place = Place {
            start,
            length,
            stack: start + length - STACK..start + length,
        };
        let opened = protect(tracee, &place.stack, PROT_READ | PROT_WRITE);
        opened.inspect_err(|_| place.free(tracee))?;
        Ok(place)
    }

    pub(super) fn free_stack(&self, tracee: &mut Tracee) {
        let start = self.stack.start - PAGE_SIZE as u64;
        // Fails only if the program is gone.
        let _ = tracee.call(nr::MUNMAP, [start, self.stack.end - start, 0, 0, 0, 0]);
    }

    pub(super) fn free(&self, tracee: &mut Tracee) {
        let _ = tracee.call(nr::MUNMAP, [self.start, self.length, 0, 0, 0, 0]);
    }
}

/// A mapping, as `maps` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub range: Range<u64>,
    pub is_executable: bool,
    /// Private, of a file, and not to be written.
    pub is_of_file: bool,
    /// The path, or what the kernel calls it.
    pub name: String,
}

impl Mapping {
    pub(super) fn of(line: MapsLine<'_>) -> Mapping {
        Mapping {
            range: line.range,
            is_executable: line.access.contains('x'),
            is_of_file: line.access == "r-xp" && line.name.starts_with('/'),
            name: line.name.to_owned(),
        }
    }

    /// One of no file.
    pub(super) fn at(range: Range<u64>) -> Mapping {
        Mapping {
            range,
            is_executable: false,
            is_of_file: false,
            name: String::new(),
        }
    }

    /// Whether the kernel has put it there.
    pub(super) fn is_kernels(&self) -> bool {
        ["[vdso]", "[vsyscall]"].contains(&self.name.as_str())
    }

    /// Those of a process, in order.
    pub(super) fn all(process: &Process) -> Result<Vec<Mapping>, AttachError> {
        let mut all = Vec::new();
        let listed = process.find_mapping(|line| {
            all.push(Mapping::of(line));
            None::<()>
        });
        listed.map_err(unreadable)?;
        Ok(all)
    }
}

/// Free addresses of this many bytes near code, from which a jump of four bytes reaches all of it and back: the next ones
/// below. (Above may be what grows: the heap.)
pub(super) fn free_below(mappings: &[Mapping], code: &Range<u64>, length: u64) -> Option<u64> {
    /// What no process may map (`vm.mmap_min_addr`, by default).
    const LOWEST: u64 = 1 << 16;
    const FARTHEST: u64 = 1 << 31;
    let mut end = code.start;
    let below = mappings
        .iter()
        .rev()
        .filter(|one| one.range.end <= code.start);
    for used in below
        .map(|one| one.range.clone())
        .chain(std::iter::once(0..LOWEST))
    {
        if end.saturating_sub(used.end) >= length {
            let start = end - length;
            return (code.end - start < FARTHEST).then_some(start);
        }
        end = used.start;
    }
    None
}

/// Where something of this length lies in the middle of the largest gap; 0 if there is none.
fn middle_of_gap(mappings: &[Mapping], length: u64) -> u64 {
    /// From here on addresses are the kernel's.
    const KERNEL: u64 = 1 << 63;
    let used = mappings.iter().map(|one| &one.range);
    let used = used.filter(|range| range.end < KERNEL);
    let gaps = used.clone().zip(used.skip(1)).map(|(below, above)| {
        let size = above.start.saturating_sub(below.end);
        (size, below.end)
    });
    let Some((size, start)) = gaps.max() else {
        return 0;
    };
    let page = PAGE_SIZE as u64;
    (start + size.saturating_sub(length) / 2) / page * page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_of_files_and_of_the_kernel_is_known() {
        let of = |line| MapsLine::parse(line).map(Mapping::of).unwrap();
        let code = of("00401000-004a2000 r-xp 00001000 fe:00 1234   /usr/bin/program");
        assert!(code.is_executable && code.is_of_file && !code.is_kernels());
        for (line, is_executable, is_kernels) in [
            (
                "00400000-00401000 r--p 00000000 fe:00 1234   /usr/bin/program",
                false,
                false,
            ),
            (
                "00400000-00401000 r-xs 00000000 fe:00 1234   /usr/bin/program",
                true,
                false,
            ),
            (
                "7fff00000000-7fff00002000 r-xp 00000000 00:00 0   [vdso]",
                true,
                true,
            ),
            (
                "7f0000000000-7f0000001000 rwxp 00000000 00:00 0",
                true,
                false,
            ),
        ] {
            let other = of(line);
            assert!(!other.is_of_file, "{line}");
            assert_eq!(other.is_executable, is_executable, "{line}");
            assert_eq!(other.is_kernels(), is_kernels, "{line}");
        }
    }

    #[test]
    fn the_largest_gap_is_found() {
        let mapping = Mapping::at;
        let vsyscall = 0xffff_ffff_ff60_0000..0xffff_ffff_ff60_1000;
        let others = [
            0x1_0000..0x2_0000,
            0x10_0000..0x11_0000,
            0x12_0000..0x13_0000,
        ];
        let all: Vec<_> = others.into_iter().chain([vsyscall]).map(mapping).collect();
        assert_eq!(middle_of_gap(&all, 0x2000), 0x8_f000);
        assert_eq!(middle_of_gap(&[], 0x2000), 0);
    }

    #[test]
    fn the_next_free_addresses_below_are_taken() {
        let mapping = Mapping::at;
        let code = 0x40_1000..0x4a_2000;
        let near = [mapping(0x40_0000..0x40_1000), mapping(code.clone())];
        assert_eq!(free_below(&near, &code, 0x2000), Some(0x3f_e000));
        let full = [mapping(0x1_1000..0x40_1000), mapping(code.clone())];
        assert_eq!(
            free_below(&full, &code, 0x2000),
            None,
            "the lowest are none"
        );
        let high = 0x7f00_0000_1000..0x7f00_1000_0000;
        let far = [mapping(0x7eff_0000_0000..high.start), mapping(high.clone())];
        assert_eq!(free_below(&far, &high, 0x2000), None, "no jump reaches it");
    }
}
