//! Synthetic page contents.

use memfold_swap::{PAGE_SIZE, Page};

use crate::random::Random;

/// Pages of repeated and random bytes that LZ4 compresses about 2.2:1.
pub fn compressible(pages: usize) -> Vec<Page> {
    let mut random = Random::new(7);
    (0..pages).map(|_| page(&mut random)).collect()
}

fn page(random: &mut Random) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut at = 0;
    while at < PAGE_SIZE {
        let end = (at + 8 + random.below(32)).min(PAGE_SIZE);
        if at > 64 && random.below(100) >= 36 {
            let back = 1 + random.below(at.min(1000));
            for index in at..end {
                page[index] = page[index - back];
            }
        } else {
            page[at..end].fill_with(|| random.next() as u8);
        }
        at = end;
    }
    page
}
