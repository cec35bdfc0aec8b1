//! The Zstandard contexts of a thread.

use zstd_safe::{CCtx, CParameter, DCtx};

use crate::{PAGE_SIZE, page::Page};

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
    compressor: Option<(i32, CCtx<'static>)>,
    decompressor: Option<DCtx<'static>>,
}

impl ZstdContexts {
    fn compressor(&mut self, level: i32) -> Result<&mut CCtx<'static>, Uncompressed> {
        if self
            .compressor
            .as_ref()
            .is_none_or(|(had, _)| *had != level)
        {
            let mut context = CCtx::try_create().ok_or(Uncompressed::Failed)?;
            // Page size, checksum and dictionary are known or stored elsewhere.
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
            self.compressor = Some((level, context));
        }
        self.compressor
            .as_mut()
            .map(|(_, context)| context)
            .ok_or(Uncompressed::Failed)
    }

    pub(crate) fn compress(
        &mut self,
        level: i32,
        page: &Page,
        out: &mut [u8],
    ) -> Result<usize, Uncompressed> {
        let context = self.compressor(level)?;
        // A one-shot compression fails only if the output is too small.
        context
            .compress2(out, &page[..])
            .map_err(|_| Uncompressed::TooLong)
    }

    /// Allocates the decompression context, if there is memory.
    pub(crate) fn prepare(&mut self) {
        if self.decompressor.is_none() {
            self.decompressor = DCtx::try_create();
        }
    }

    pub(crate) fn decompress(&mut self, data: &[u8], page: &mut Page) -> bool {
        self.prepare();
        let Some(context) = &mut self.decompressor else {
            return false;
        };
        context.decompress(&mut page[..], data) == Ok(PAGE_SIZE)
    }
}
