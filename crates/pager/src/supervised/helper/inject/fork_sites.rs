//! Where a program's code forks.
//!
//! C libraries make the system call by two instructions side by side: one that loads the number (five bytes), and the
//! call. The first is what a jump fits in.

/// A system call that forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForkCall {
    /// Without arguments, as musl does.
    Fork,
    /// The one that also starts threads, as glibc does.
    Clone,
}

impl ForkCall {
    /// Its number.
    pub(super) const fn number(self) -> u8 {
        match self {
            ForkCall::Clone => 56,
            ForkCall::Fork => 57,
        }
    }
}

/// Where the number of such a call is loaded, right before the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ForkSite {
    pub address: u64,
    pub call: ForkCall,
}

/// Bytes of the instruction that loads the number.
pub(super) const LOAD: usize = 5;

/// What is found in code.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ForkSites {
    pub sites: Vec<ForkSite>,
    /// Something seems to fork in a way in which no jump fits.
    pub has_unknown: bool,
}

const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov eax, number`.
const MOV: u8 = 0xb8;
/// What widens the registers of the instruction behind it; the lower half are flags.
const REX: u8 = 0x40;
/// `jmp` to a distance of four bytes.
pub(super) const JUMP: u8 = 0xe9;

/// How far before a system call its number is looked for.
const REACH: usize = 32;

/// Bytes that are given again with the next part of the code.
pub(super) const OVERLAP: usize = REACH;

impl ForkSites {
    /// Looks through code that is at an address. `known` of its first bytes were the last ones before ([`OVERLAP`]).
    pub(super) fn look(&mut self, code: &[u8], address: u64, known: usize) {
        let first = known.saturating_sub(1);
        let calls = code.windows(SYSCALL.len()).enumerate().skip(first);
        let calls = calls.filter(|(_, bytes)| *bytes == SYSCALL);
        for (at, _) in calls {
            self.look_before(&code[at.saturating_sub(REACH)..at], address + at as u64);
        }
    }

    /// Whether a thread that goes on at an address has loaded the number, or makes the call again.
    pub(super) fn is_about_to_fork(&self, place: u64) -> bool {
        let is_at = |site: &ForkSite| {
            (1..=(LOAD + SYSCALL.len()) as u64).contains(&place.wrapping_sub(site.address))
        };
        self.sites.iter().any(is_at)
    }

    /// Looks at what comes before a system call that is at an address.
    fn look_before(&mut self, before: &[u8], call: u64) {
        let Some((rest, load)) = before.split_last_chunk::<LOAD>() else {
            return;
        };
        let [opcode, operand @ ..] = *load;
        let site = call - LOAD as u64;
        match opcode {
            MOV => {
                let number = u32::from_le_bytes(operand);
                let calls = [ForkCall::Fork, ForkCall::Clone].into_iter();
                let mut calls = calls.filter(|call| u32::from(call.number()) == number);
                let found = calls.next().map(|call| ForkSite {
                    address: site,
                    call,
                });
                // With a prefix it is another register's.
                let is_prefixed = rest.last().is_some_and(|byte| byte & 0xf0 == REX);
                self.has_unknown |= found.is_some() && is_prefixed;
                self.sites.extend(found);
            }
            _ => self.has_unknown |= loads_fork(before),
        }
    }
}

/// Whether the number of a fork is loaded somewhere, by what compilers use for that. (Threads are started by `xor` and
/// `mov al, 56` in musl.)
fn loads_fork(code: &[u8]) -> bool {
    const WAYS: [&[u8]; 7] = [
        &[MOV, 57, 0, 0, 0],
        &[0x48, 0xc7, 0xc0, 57, 0, 0, 0],
        &[0x6a, 57, 0x58],
        &[0x31, 0xc0, 0xb0, 57],
        &[MOV, 56, 0, 0, 0],
        &[0x48, 0xc7, 0xc0, 56, 0, 0, 0],
        &[0x6a, 56, 0x58],
    ];
    // Not that of a call before this one.
    let ended = code.windows(SYSCALL.len()).rposition(|two| two == SYSCALL);
    let code = &code[ended.map_or(0, |at| at + SYSCALL.len())..];
    let has = |way: &&[u8]| code.windows(way.len()).any(|bytes| bytes == *way);
    WAYS.iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::Random;

    fn found(code: &[u8]) -> ForkSites {
        let mut found = ForkSites::default();
        found.look(code, 0x40_0000, 0);
        found
    }

    const NOPS: [u8; 40] = [0x90; 40];
    const FORK: [u8; 7] = [MOV, 57, 0, 0, 0, 0x0f, 0x05];
    const CLONE: [u8; 7] = [MOV, 56, 0, 0, 0, 0x0f, 0x05];
    const READ: [u8; 7] = [MOV, 0, 0, 0, 0, 0x0f, 0x05];

    #[test]
    fn the_ways_of_c_libraries_are_found() {
        let code = [&NOPS[..], &FORK, &READ, &CLONE].concat();
        let site = |address, call| ForkSite { address, call };
        let wanted = ForkSites {
            sites: vec![
                site(0x40_0028, ForkCall::Fork),
                site(0x40_0036, ForkCall::Clone),
            ],
            ..ForkSites::default()
        };
        assert_eq!(found(&code), wanted);
    }

    #[test]
    fn a_site_on_the_border_of_two_parts_is_found_once() {
        let code = [&NOPS[..], &FORK, &NOPS[..]].concat();
        for border in NOPS.len() - 1..=NOPS.len() + FORK.len() {
            let mut parts = ForkSites::default();
            parts.look(&code[..border], 0x40_0000, 0);
            let again = border.min(OVERLAP);
            let from = border - again;
            parts.look(&code[from..], 0x40_0000 + from as u64, again);
            assert_eq!(parts, found(&code), "{border}");
        }
    }

    #[test]
    fn other_ways_are_not_taken_for_none() {
        let ways: [&[u8]; 4] = [
            &[0x6a, 57, 0x58],
            &[0x31, 0xc0, 0xb0, 57],
            &[0x48, 0xc7, 0xc0, 56, 0, 0, 0],
            // Something is done in between.
            &[MOV, 57, 0, 0, 0, 0x31, 0xff],
        ];
        for way in ways {
            let code = [&NOPS[..], way, &SYSCALL].concat();
            assert!(found(&code).has_unknown, "{way:x?}");
            let of_another = [&NOPS[..], way, &READ, &NOPS[..8], &SYSCALL].concat();
            assert!(!found(&of_another).has_unknown, "{way:x?}");
        }
        let thread = [&NOPS[..], &[0x31, 0xc0, 0xb0, 56], &NOPS[..9], &SYSCALL].concat();
        assert_eq!(found(&thread), ForkSites::default());
    }

    #[test]
    fn another_register_is_no_number() {
        let code = [&NOPS[..], &[0x41], &CLONE].concat();
        assert!(found(&code).has_unknown);
    }

    #[test]
    fn any_bytes_are_looked_through() {
        let mut random = Random::new(3);
        for length in 0..300 {
            let byte = |_| [0x0f, 0x05, MOV, JUMP, 57, 56, 0][random.below(7)];
            let code: Vec<u8> = (0..length).map(byte).collect();
            let _ = found(&code);
        }
    }
}
