//! The Zstandard contexts of a thread.

use zstd_safe::{CCtx, CParameter, DCtx, ErrorCode, zstd_sys::ZSTD_ErrorCode};

/// Why a page was not compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Uncompressed {
    /// The result would be longer than allowed.
    TooLong,
    /// The codec failed, or had no memory for its context.
    Failed,
}

/// Zstandard's contexts, allocated on first use.
#[derive(Default)]
pub(crate) struct ZstdContexts {
    /// By level: threads that migrate pages use two or three.
    compressors: Vec<(i32, CCtx<'static>)>,
    decompressor: Option<DCtx<'static>>,
}

/// Why a one-shot compression failed. The context allocates its workspace at its first one.
fn reason(code: ErrorCode) -> Uncompressed {
    const OUTPUT_TOO_SMALL: ErrorCode =
        (ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall as ErrorCode).wrapping_neg();
    match code {
        OUTPUT_TOO_SMALL => Uncompressed::TooLong,
        _ => Uncompressed::Failed,
    }
}

impl ZstdContexts {
    fn compressor(&mut self, level: i32) -> Result<&mut CCtx<'static>, Uncompressed> {
        if let Some(index) = self.compressors.iter().position(|(had, _)| *had == level) {
            return Ok(&mut self.compressors[index].1);
        }
        let mut context = CCtx::try_create().ok_or(Uncompressed::Failed)?;
        // Size, checksum and dictionary are known or stored elsewhere.
        for parameter in [
            CParameter::CompressionLevel(level),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ] {
            context
                .set_parameter(parameter)
                .map_err(|_| Uncompressed::Failed)?;
        }
        self.compressors
            .try_reserve(1)
            .map_err(|_| Uncompressed::Failed)?;
        self.compressors.push((level, context));
        let (_, context) = self.compressors.last_mut().ok_or(Uncompressed::Failed)?;
        Ok(context)
    }

    pub(crate) fn compress(
        &mut self,
        level: i32,
        data: &[u8],
        out: &mut [u8],
    ) -> Result<usize, Uncompressed> {
        let context = self.compressor(level)?;
        context.compress2(out, data).map_err(reason)
    }

    /// Allocates the decompression context. `false` if there is no memory.
    pub(crate) fn prepare(&mut self) -> bool {
        if self.decompressor.is_none() {
            self.decompressor = DCtx::try_create();
        }
        self.decompressor.is_some()
    }

    /// Decompresses `data` to exactly the length of `out`; `false` if it does not decode to that.
    pub(crate) fn decompress(&mut self, data: &[u8], out: &mut [u8]) -> bool {
        self.prepare();
        let Some(context) = &mut self.decompressor else {
            return false;
        };
        context.decompress(&mut *out, data) == Ok(out.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_not_incompressible_for_lack_of_memory() {
        // As the library numbers its errors: `zstd_errors.h`.
        let (no_memory, too_small) = (0_usize.wrapping_sub(64), 0_usize.wrapping_sub(70));
        assert_eq!(reason(no_memory), Uncompressed::Failed);
        assert_eq!(reason(too_small), Uncompressed::TooLong);
    }
}
