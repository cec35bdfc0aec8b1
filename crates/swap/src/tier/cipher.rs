//! Authenticated encryption of pages outside of memory.

use std::fmt;

use aes_gcm::{
    AeadInOut, Aes256Gcm, KeyInit,
    aead::{Nonce, Tag},
};
use zeroize::ZeroizeOnDrop;

use crate::{
    entry::Location,
    slot::Slot,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// Bytes of the authentication tag of a sealed record.
pub(super) const TAG: usize = 16;

/// The key of a tier outside of memory: 32 random bytes, made for one run and one tier. Zeroed on
/// drop.
#[derive(ZeroizeOnDrop)]
pub struct TierKey([u8; 32]);

impl TierKey {
    /// A key of these bytes, which must come from the kernel's random number generator and must not
    /// be used for anything else.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for TierKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TierKey(…)")
    }
}

/// AES-256-GCM with nonces that are never reused.
pub(super) struct Cipher {
    cipher: Aes256Gcm,
    /// The nonce of the next record. A run cannot exhaust 64 bits.
    next: AtomicU64,
}

impl Cipher {
    pub(super) fn new(key: &TierKey) -> Self {
        Self {
            cipher: Aes256Gcm::new((&key.0).into()),
            next: AtomicU64::new(0),
        }
    }

    /// Encrypts all of `record` except its last `TAG` bytes, which become the tag. Returns the
    /// nonce.
    pub(super) fn seal(&self, slot: Slot, location: Location, record: &mut [u8]) -> u64 {
        let number = self.next.fetch_add(1, Relaxed);
        let (data, tag) = record.split_at_mut(record.len() - TAG);
        let sealed = self
            .cipher
            .encrypt_inout_detached(&nonce(number), &bound(slot, location), data.into())
            .expect("a page is far shorter than the cipher's limit");
        tag.copy_from_slice(&sealed);
        number
    }

    /// Decrypts a record in place; `None` if it was not sealed for this slot, location and nonce.
    pub(super) fn open<'r>(
        &self,
        slot: Slot,
        location: Location,
        number: u64,
        record: &'r mut [u8],
    ) -> Option<&'r [u8]> {
        let (data, tag) = record.split_at_mut(record.len().checked_sub(TAG)?);
        let tag = Tag::<Aes256Gcm>::try_from(&*tag).ok()?;
        self.cipher
            .decrypt_inout_detached(
                &nonce(number),
                &bound(slot, location),
                (&mut *data).into(),
                &tag,
            )
            .ok()?;
        Some(data)
    }
}

fn nonce(number: u64) -> Nonce<Aes256Gcm> {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes.into()
}

/// The associated data of a record.
fn bound(slot: Slot, location: Location) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&location.into_raw().to_le_bytes());
    bytes[8..].copy_from_slice(&slot.into_raw().to_le_bytes());
    bytes
}
