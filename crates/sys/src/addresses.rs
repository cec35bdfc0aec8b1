//! Which addresses a program has.

/// Where a program's addresses end, but for mappings that it asks to be above (five levels of page tables on x86-64,
/// addresses of 52 bits on aarch64).
pub const END: u64 = if cfg!(target_arch = "aarch64") {
    1 << 48
} else {
    1 << 47
};

/// A page that the kernel takes for a program's, whatever it was built for: seldom mapped. Kernels of aarch64 with pages of
/// 4 KiB may have addresses of 39 bits.
pub(crate) const FAR_PAGE: u64 = if cfg!(target_arch = "aarch64") {
    (1 << 39) - 0x2000
} else {
    END - 0x2000
};
