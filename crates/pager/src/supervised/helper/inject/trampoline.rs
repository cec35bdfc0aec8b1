//! What a program's forks are led through: two pages near its code, one with a word and one with code of ours. (In this
//! order: the kernel would merge the first with what is mapped above it.)
//!
//! ```text
//! fork site ── jmp ──► stub ── call *target ──► the library ── ret ── jmp ──► after the call
//!                        │ clone with another stack or for a thread
//!                        └──► the call as it was
//! ```
//! They stay mapped as long as the program runs: a thread's instruction pointer may be in these pages, also one that is saved
//! in a signal frame, and those cannot be found.

use super::fork_sites::{ForkCall, ForkSite, JUMP, LOAD};
use memfold_sys::PAGE_SIZE;

const PAGE: u64 = PAGE_SIZE as u64;

/// Both pages.
pub(super) const LENGTH: u64 = 2 * PAGE;

/// Bytes of a stub, with room; the first ones of the page are the call as it was.
const STUB: u64 = 128;

/// Most sites that one page has stubs for.
pub(super) const MOST_SITES: usize = (PAGE / STUB - 1) as usize;

/// The trampolines of some code, by the address of both pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trampolines(pub u64);

impl Trampolines {
    /// Address of the word that says where stubs call.
    pub(super) fn target(self) -> u64 {
        self.0
    }

    /// The page of code. What stubs call where there is no library comes first.
    pub(super) fn plain(self) -> u64 {
        self.0.wrapping_add(PAGE)
    }

    /// Where the stub with a number begins.
    fn stub(self, number: usize) -> u64 {
        self.plain() + STUB * (number as u64 + 1)
    }

    /// The page of code for these sites, [`MOST_SITES`] at most. `None` where one is too far away.
    pub(super) fn code(self, sites: &[ForkSite]) -> Option<Vec<u8>> {
        let mut code = Code {
            start: self.plain(),
            bytes: PLAIN.to_vec(),
        };
        for (number, site) in sites.iter().enumerate() {
            code.fill_to(self.stub(number));
            code.add_stub(self, site)?;
        }
        Some(code.bytes)
    }

    /// The jump that takes the place of a site's first instruction, to the stub with this number.
    pub(super) fn jump(self, number: usize, site: &ForkSite) -> Option<[u8; LOAD]> {
        let distance = distance(site.address + LOAD as u64, self.stub(number))?;
        let [a, b, c, d] = distance.to_le_bytes();
        Some([JUMP, a, b, c, d])
    }
}

/// The call as it was; the number is on the stack, behind where to return to.
const PLAIN: [u8; 9] = [
    0x8b, 0x44, 0x24, 0x08, // mov eax, [rsp + 8]
    0x0f, 0x05, // syscall
    0xc2, 0x08, 0x00, // ret 8
];

/// What lies below the stack pointer is the program's own for this many bytes.
const LEAVE_RED_ZONE: [u8; 5] = [0x48, 0x8d, 0x64, 0x24, 0x80]; // lea rsp, [rsp - 128]
const BACK_TO_RED_ZONE: [u8; 8] = [0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0]; // lea rsp, [rsp + 128]
const PUSH_FLAGS: u8 = 0x9c;
const POP_FLAGS: u8 = 0x9d;

/// From a distance in bytes to the operand of a jump or of an address.
fn distance(from: u64, to: u64) -> Option<i32> {
    i32::try_from(to.wrapping_sub(from).cast_signed()).ok()
}

/// Instructions at an address.
struct Code {
    start: u64,
    bytes: Vec<u8>,
}

impl Code {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// An instruction that ends with the distance from its end to an address.
    fn add_relative(&mut self, instruction: &[u8], to: u64) -> Option<()> {
        self.add(instruction);
        let end = self.start + self.bytes.len() as u64 + 4;
        self.add(&distance(end, to)?.to_le_bytes());
        Some(())
    }

    fn fill_to(&mut self, address: u64) {
        const INT3: u8 = 0xcc;
        self.bytes.resize((address - self.start) as usize, INT3);
    }

    fn add_stub(&mut self, of: Trampolines, site: &ForkSite) -> Option<()> {
        let number = site.call.number();
        let back = site.address + LOAD as u64 + 2;
        self.add(&LEAVE_RED_ZONE);
        self.add(&[PUSH_FLAGS]);
        let mut branches = Vec::new();
        if site.call == ForkCall::Clone {
            self.add(&[0xf7, 0xc7, 0x00, 0x01, 0x00, 0x00]); // test edi, CLONE_VM
            branches.push(self.add_branch());
            self.add(&[0x48, 0x85, 0xf6]); // test rsi, rsi (another stack)
            branches.push(self.add_branch());
        }
        self.add(&[0x6a, number]); // push
        self.add_relative(&[0xff, 0x15], of.target())?; // call
        self.add(&[POP_FLAGS]);
        self.add(&BACK_TO_RED_ZONE);
        self.add_relative(&[JUMP], back)?;
        if branches.is_empty() {
            return Some(());
        }
        for branch in branches {
            self.bytes[branch] = (self.bytes.len() - branch - 1) as u8;
        }
        // On another stack in the child, so there is nothing on this one.
        self.add(&[POP_FLAGS]);
        self.add(&BACK_TO_RED_ZONE);
        self.add(&[0xb8, number, 0, 0, 0, 0x0f, 0x05]); // mov eax, number; syscall
        self.add_relative(&[JUMP], back)
    }

    /// `jnz` to what is set later. Returns where its distance is.
    fn add_branch(&mut self) -> usize {
        self.add(&[0x75, 0]);
        self.bytes.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(address: u64, call: ForkCall) -> ForkSite {
        ForkSite { address, call }
    }

    #[test]
    fn a_jump_leads_to_its_stub() {
        let trampolines = Trampolines(0x3f_e000);
        let sites = [
            site(0x40_2345, ForkCall::Fork),
            site(0x40_6789, ForkCall::Clone),
        ];
        let code = trampolines.code(&sites).unwrap();
        for (number, site) in sites.iter().enumerate() {
            let jump = trampolines.jump(number, site).unwrap();
            let distance = i32::from_le_bytes([jump[1], jump[2], jump[3], jump[4]]);
            let target = (site.address + 5).wrapping_add_signed(distance.into());
            let stub = (target - trampolines.plain()) as usize;
            assert!(code[stub..].starts_with(&LEAVE_RED_ZONE));
            // The last one of the stub is the jump back, behind the system call.
            let end = stub
                + code[stub..]
                    .iter()
                    .take_while(|byte| **byte != 0xcc)
                    .count();
            let back = i32::from_le_bytes(code[end - 4..end].try_into().unwrap());
            let back = (trampolines.plain() + end as u64).wrapping_add_signed(back.into());
            assert_eq!((code[end - 5], back), (JUMP, site.address + 7));
        }
    }

    #[test]
    fn as_many_as_there_may_be_fit() {
        let trampolines = Trampolines(0x3f_e000);
        let sites: Vec<_> = (0..MOST_SITES as u64)
            .map(|number| site(0x40_0000 + number * 16, ForkCall::Clone))
            .collect();
        let code = trampolines.code(&sites).unwrap();
        assert!(code.len() <= PAGE_SIZE);
        let last = trampolines.stub(MOST_SITES - 2) - trampolines.plain();
        let last = &code[last as usize..];
        assert!(
            last.iter()
                .take(STUB as usize)
                .rposition(|byte| *byte != 0xcc)
                < Some(STUB as usize - 1),
            "a stub is shorter than its room"
        );
    }

    #[test]
    fn what_no_jump_reaches_has_no_trampoline() {
        let far = [site(0x7f00_0000_0000, ForkCall::Fork)];
        assert_eq!(Trampolines(0x3f_e000).code(&far), None);
        assert_eq!(Trampolines(0x3f_e000).jump(0, &far[0]), None);
    }
}
