//! Pages, and same-filled pages.

use zsmalloc::PAGE_SIZE;

/// The contents of one page.
pub type Page = [u8; PAGE_SIZE];

/// The 64-bit word that `page` repeats from its first byte to its last, if it does.
pub fn fill_word(page: &Page) -> Option<u64> {
    let (words, _) = page.as_chunks::<8>();
    let first = u64::from_ne_bytes(words[0]);
    // Most other pages differ in their first or last words.
    if u64::from_ne_bytes(words[words.len() - 1]) != first {
        return None;
    }
    let (blocks, _) = words.as_chunks::<8>();
    let same = blocks.iter().all(|block| {
        block.iter().fold(0, |difference, word| {
            difference | (u64::from_ne_bytes(*word) ^ first)
        }) == 0
    });
    same.then_some(first)
}

/// Fills `page` with `word`.
pub fn fill(page: &mut Page, word: u64) {
    let (words, _) = page.as_chunks_mut::<8>();
    words.fill(word.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_repeated_word_is_seen() {
        let mut page = [0; PAGE_SIZE];
        for word in [0, 1, u64::MAX, 0.1_f64.to_bits(), 0x0102_0304_0506_0708] {
            fill(&mut page, word);
            assert_eq!(fill_word(&page), Some(word));
        }
    }

    #[test]
    fn one_different_byte_anywhere_is_seen() {
        let mut page = [0x5a; PAGE_SIZE];
        for position in 0..PAGE_SIZE {
            page[position] ^= 1;
            assert_eq!(fill_word(&page), None, "byte {position}");
            page[position] ^= 1;
        }
    }
}
