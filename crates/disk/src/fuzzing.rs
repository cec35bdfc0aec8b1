//! What the fuzz target of the protocol runs on its input. A test runs the same on the corpus.

use crate::disk::Disk;
use crate::nbd::{Agreed, Team, negotiate, transmit_beside};
use memfold_swap::{PAGE_SIZE, ScanPolicy, Scratch, SwapConfig, SwapSpace};
use std::io::{self, Read, Write};
use std::sync::Arc;
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

/// Fills a quarter of the disk with blocks that are compressed together, so that reads of them are served by a team.
fn pack(disk: &Disk<HeapSource>) {
    let mut scratch = Scratch::new();
    for block in 0..SIZE / 4 / PAGE_SIZE as u64 {
        let mut page = [0; PAGE_SIZE];
        let mut noise = 1_u32;
        for byte in &mut page[..512] {
            // The same in each, so that they are shorter together.
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = noise.to_le_bytes()[3];
        }
        page[512] = block as u8;
        disk.write(block * PAGE_SIZE as u64, &page, &mut scratch)
            .expect("there is room");
    }
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: None,
    };
    for _ in 0..2 {
        disk.memory.space.scan(policy, usize::MAX, &mut scratch);
    }
    assert!(disk.usage().packed_blocks > 0);
}

/// The first byte says whether the input begins with the negotiation, else what was agreed on; and whether the disk holds
/// blocks that are slow to read, and a team serves them.
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
    let disk = Arc::new(Disk::new(space, SIZE, LIMIT).expect("a disk"));
    let team = (mode & 8 != 0).then(|| {
        pack(&disk);
        Team::new(Arc::clone(&disk))
    });
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
        let _ = transmit_beside(&disk, team.as_ref(), agreed, (client, io::sink()));
    }
    let usage = disk.usage();
    assert!(usage.peak_bytes <= LIMIT, "{usage:?}");
    let mut all = vec![0; SIZE as usize];
    disk.read(0, &mut all, &mut Scratch::new())
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
