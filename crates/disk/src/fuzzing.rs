//! What the fuzz target of the protocol runs on its input. A test runs the same on the corpus.

use crate::disk::Disk;
use crate::nbd::{Agreed, negotiate, transmit};
use memfold_swap::{SwapConfig, SwapSpace};
use std::io::{self, Read, Write};
use zsmalloc::HeapSource;

const SIZE: u64 = 1 << 20;
const LIMIT: u64 = 1 << 19;

/// A client that says what the input holds, and takes whatever comes.
struct Client<'a>(&'a [u8]);

impl Read for Client<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The first byte says whether the input begins with the negotiation, else what was agreed on.
///
/// # Panics
/// If the disk takes more memory than its limit, or cannot be read afterwards.
pub fn nbd(input: &[u8]) {
    let Some((mode, input)) = input.split_first() else {
        return;
    };
    let config = SwapConfig {
        pool_capacity_pages: 256,
        max_slots: 512,
        ..SwapConfig::default()
    };
    let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
    let disk = Disk::new(space, SIZE, LIMIT).expect("a disk");
    let mut client = Client(input);
    let agreed = if mode & 1 == 0 {
        negotiate(&mut client, SIZE).ok()
    } else {
        Some(Agreed {
            structured: mode & 2 != 0,
            allocation: mode & 4 != 0,
        })
    };
    if let Some(agreed) = agreed {
        // It ends wherever the input does.
        let _ = transmit(&disk, agreed, client, io::sink());
    }
    let usage = disk.usage();
    assert!(usage.peak_bytes <= LIMIT, "{usage:?}");
    let mut all = vec![0; SIZE as usize];
    disk.read(0, &mut all, &mut memfold_swap::Scratch::new())
        .expect("every block can be read");
}

#[cfg(test)]
mod tests {
    use memfold_testing::replay;

    #[test]
    fn a_client_may_say_anything() {
        replay("nbd", super::nbd);
    }
}
