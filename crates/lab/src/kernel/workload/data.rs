//! Page contents: a function of the page number, and compressible like the published tests' or like
//! real programs' pages.

use anyhow::{Result, bail};
use zsmalloc::PAGE_SIZE;

use crate::{random::Random, trace};

/// Each page repeats one of these, as in the published test of April 2026.
const PHRASES: [&[u8]; 4] = [b"1024 one ", b"1024 two ", b"1024 three ", b"1024 four "];
/// Bytes of incompressible data to take parts of.
const NOISE: usize = 64 << 10;
/// Approximate compressed size of a page's stamp and repeated rest under lz4, in bytes.
const LZ4_OVERHEAD: usize = 56;

/// Generates and verifies page contents.
#[derive(Debug)]
pub struct Data {
    phrases: [Box<[u8; PAGE_SIZE]>; 4],
    /// Compressed sizes of recorded pages; empty for phrases.
    sizes: Vec<u16>,
    noise: Vec<u8>,
    scratch: Box<[u8; PAGE_SIZE]>,
}

impl Data {
    /// `phrases`: a repeated phrase per page, four in turn. `recorded`: pages that lz4 compresses
    /// to the sizes recorded of CPython, node, redis and a compiler.
    pub fn new(name: &str) -> Result<Self> {
        let sizes = match name {
            "phrases" => Vec::new(),
            "recorded" => trace::mixed_lz4()
                .into_iter()
                .map(|size| size as u16)
                .collect(),
            other => bail!("--data is phrases or recorded, not {other:?}"),
        };
        let mut random = Random::new(7);
        let noise = (0..NOISE).map(|_| (random.next() >> 24) as u8).collect();
        let repeated = |phrase: &[u8]| {
            let mut page = Box::new([0; PAGE_SIZE]);
            for (to, from) in page.iter_mut().zip(phrase.iter().cycle()) {
                *to = *from;
            }
            page
        };
        Ok(Self {
            phrases: PHRASES.map(repeated),
            sizes,
            noise,
            scratch: Box::new([0; PAGE_SIZE]),
        })
    }

    /// Writes page `number`.
    pub fn write(&self, page: &mut [u8], number: usize) {
        page.copy_from_slice(&self.phrases[number % 4][..]);
        if let Some(&size) = self.sizes.get(number % self.sizes.len().max(1)) {
            let noisy = usize::from(size).saturating_sub(LZ4_OVERHEAD);
            let start = number.wrapping_mul(0x9e37_79b9) % (NOISE - PAGE_SIZE);
            page[..noisy].copy_from_slice(&self.noise[start..start + noisy]);
        }
        page[..8].copy_from_slice(&stamp(number));
    }

    /// Whether a page starts with the stamp of `number`; the check of timed passes.
    pub fn has_stamp(page: &[u8], number: usize) -> bool {
        page[..8] == stamp(number)
    }

    /// Whether a page equals page `number` in full.
    pub fn is(&mut self, page: &[u8], number: usize) -> bool {
        let mut expected = std::mem::replace(&mut self.scratch, Box::new([0; PAGE_SIZE]));
        self.write(&mut expected[..], number);
        let same = page == &expected[..];
        self.scratch = expected;
        same
    }
}

fn stamp(number: usize) -> [u8; 8] {
    (number as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_anywhere_is_detected() {
        for name in ["phrases", "recorded"] {
            let mut data = Data::new(name).unwrap();
            let mut page = [0; PAGE_SIZE];
            data.write(&mut page, 1234);
            assert!(data.is(&page, 1234) && Data::has_stamp(&page, 1234));
            assert!(!data.is(&page, 1235) && !Data::has_stamp(&page, 1235));
            for place in [0, 8, 2000, PAGE_SIZE - 1] {
                page[place] ^= 1;
                assert!(!data.is(&page, 1234), "{name}, byte {place}");
                page[place] ^= 1;
            }
        }
    }

    #[test]
    fn recorded_pages_compress_as_recorded() {
        let data = Data::new("recorded").unwrap();
        let (mut ours, mut recorded) = (0.0, 0.0);
        let mut page = [0; PAGE_SIZE];
        for (number, size) in trace::mixed_lz4().into_iter().enumerate().step_by(7) {
            data.write(&mut page, number);
            ours += trace::compressed_size(memfold_swap::Algorithm::Lz4, &page) as f64;
            recorded += size as f64;
        }
        let ratio: f64 = ours / recorded;
        assert!((0.95..1.05).contains(&ratio), "{ratio}");
    }
}
