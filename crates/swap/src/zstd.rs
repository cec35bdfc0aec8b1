//! The Zstandard contexts of a thread.

use zstd_safe::{CCtx, CParameter, DCtx};

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
        // A one-shot compression fails only if the output is too small.
        context
            .compress2(out, data)
            .map_err(|_| Uncompressed::TooLong)
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
