//! Compression of single pages, without dictionaries: they gain next to nothing on 4 KiB pages.

use std::{
    ffi::{c_char, c_int},
    fmt,
    str::FromStr,
};

use crate::{PAGE_SIZE, page::Page, scratch::Scratch, zstd::Uncompressed};

/// A compression algorithm.
///
/// ```
/// use memfold_swap::Algorithm;
///
/// assert_eq!("zstd".parse(), Ok(Algorithm::Zstd));
/// assert_eq!(Algorithm::default().to_string(), "lz4");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Algorithm {
    /// LZ4: the faster one.
    #[default]
    Lz4,
    /// Zstandard at level 1: takes two to three times as long as LZ4 and saves more memory.
    Zstd,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: &[Self] = &[Self::Lz4, Self::Zstd];

    /// The name that users write: `lz4` or `zstd`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// What distinguishes it, in a few words.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Lz4 => "The fastest",
            Self::Zstd => "Smaller and slower",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of an algorithm is none of [`Algorithm::ALL`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown compression algorithm {0:?}: use \"lz4\" or \"zstd\"")]
pub struct ParseAlgorithmError(String);

impl FromStr for Algorithm {
    type Err = ParseAlgorithmError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .copied()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| ParseAlgorithmError(name.to_owned()))
    }
}

/// A codec with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Lz4,
    Zstd { level: i32 },
}

impl From<Algorithm> for Codec {
    fn from(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Lz4 => Self::Lz4,
            Algorithm::Zstd => Self::Zstd { level: 1 },
        }
    }
}

/// Tags of codecs in an object's header.
impl Codec {
    const LZ4: u16 = 0;
    const ZSTD: u16 = 1;

    pub(crate) fn tag(self) -> u16 {
        match self {
            Self::Lz4 => Self::LZ4,
            Self::Zstd { .. } => Self::ZSTD,
        }
    }

    /// The codec to decompress data with this tag.
    pub(crate) fn of_tag(tag: u16) -> Option<Self> {
        match tag {
            Self::LZ4 => Some(Self::Lz4),
            Self::ZSTD => Some(Self::Zstd { level: 1 }),
            _ => None,
        }
    }
}

impl Codec {
    /// Compresses `page` to at most `limit` bytes.
    pub(crate) fn compress<'s>(
        self,
        page: &Page,
        limit: usize,
        scratch: &'s mut Scratch,
    ) -> Result<&'s [u8], Uncompressed> {
        let (buffer, zstd) = scratch.parts();
        let limit = limit.min(buffer.len());
        let length = match self {
            Self::Lz4 => compress_lz4(page, &mut buffer[..limit]),
            Self::Zstd { level } => zstd.compress(level, page, &mut buffer[..limit]),
        }?;
        Ok(&buffer[..length])
    }

    /// Decompresses `data` to exactly a page; `false` if it does not decode to one.
    pub(crate) fn decompress(self, data: &[u8], page: &mut Page, scratch: &mut Scratch) -> bool {
        match self {
            Self::Lz4 => decompress_lz4(data, page),
            Self::Zstd { .. } => scratch.parts().1.decompress(data, page),
        }
    }
}

/// LZ4's C implementation, which is faster than `lz4_flex`. Its state is 16 KiB of stack.
fn compress_lz4(page: &Page, out: &mut [u8]) -> Result<usize, Uncompressed> {
    // SAFETY: the pointers and lengths are those of the two slices, and LZ4 stays inside.
    let length = unsafe {
        lz4_sys::LZ4_compress_fast(
            page.as_ptr().cast::<c_char>(),
            out.as_mut_ptr().cast::<c_char>(),
            PAGE_SIZE as c_int,
            out.len() as c_int,
            1,
        )
    };
    if length > 0 {
        Ok(length as usize)
    } else {
        Err(Uncompressed::TooLong)
    }
}

fn decompress_lz4(data: &[u8], page: &mut Page) -> bool {
    // SAFETY: as in `compress_lz4`; this function is made for untrusted data.
    let length = unsafe {
        lz4_sys::LZ4_decompress_safe(
            data.as_ptr().cast::<c_char>(),
            page.as_mut_ptr().cast::<c_char>(),
            data.len() as c_int,
            PAGE_SIZE as c_int,
        )
    };
    length == PAGE_SIZE as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_page() -> Page {
        std::array::from_fn(|i| b"swap tables and tiers "[i * i % 22])
    }

    #[test]
    fn algorithms_parse_from_their_names_only() {
        for &algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        let error = "LZ4".parse::<Algorithm>().unwrap_err();
        assert!(error.to_string().contains("\"LZ4\""));
    }

    #[test]
    fn pages_survive_each_codec() {
        let mut scratch = Scratch::new();
        for codec in [
            Codec::Lz4,
            Codec::Zstd { level: 1 },
            Codec::Zstd { level: 5 },
        ] {
            let data = codec
                .compress(&text_page(), PAGE_SIZE, &mut scratch)
                .unwrap()
                .to_vec();
            assert!(data.len() < PAGE_SIZE / 4);
            let mut page = [0; PAGE_SIZE];
            assert!(codec.decompress(&data, &mut page, &mut scratch));
            assert_eq!(page, text_page());
            assert!(!codec.decompress(&data[..data.len() - 1], &mut page, &mut scratch));
        }
    }

    #[test]
    fn a_result_above_the_limit_is_refused() {
        let mut scratch = Scratch::new();
        for codec in [Codec::Lz4, Codec::Zstd { level: 1 }] {
            let length = codec
                .compress(&text_page(), PAGE_SIZE, &mut scratch)
                .unwrap()
                .len();
            let short = codec.compress(&text_page(), length - 1, &mut scratch);
            assert_eq!(short, Err(Uncompressed::TooLong));
        }
    }
}
