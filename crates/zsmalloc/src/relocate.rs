//! How a compactor updates the owner of an object.

use crate::word::ObjectWord;

/// The owner of a pool's objects, as a compactor sees it.
///
/// A compactor copies an object and then asks its owner to replace the word. The pool does not
/// record owners: an owner that wants compaction stores what it needs to find its own entry, such
/// as a slot number, in the object.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use zsmalloc::{Config, HeapSource, ObjectWord, Pool, Relocate};
///
/// /// An owner of one object.
/// struct Owner(AtomicU64);
///
/// impl Relocate for Owner {
///     fn relocate(&self, old: ObjectWord, new: ObjectWord, _object: &[u8]) -> bool {
///         let (old, new) = (old.into_raw(), new.into_raw());
///         self.0
///             .compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
///             .is_ok()
///     }
/// }
///
/// let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(4096))?;
/// let owner = Owner(AtomicU64::new(pool.store(&[b"an object"])?.into_raw()));
/// pool.compact(&owner, || true);
///
/// // The pin comes before the load of the word.
/// let pin = pool.pin();
/// let word = ObjectWord::from_raw(owner.0.load(Ordering::Acquire)).expect("stored above");
/// pool.read(word, 9, |object| assert_eq!(object, b"an object"));
/// drop(pin);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Relocate: Sync {
    /// Replaces `old` by `new` in the owner's entry if it is still there, by one compare-and-swap
    /// with release ordering or under a lock. Returns whether it did.
    ///
    /// After `true` the owner may use and free only `new`; the pool frees `old` once every
    /// [`ReadGuard`](crate::ReadGuard) taken earlier is dropped. `false` changes nothing: refuse if
    /// the object was freed or is being freed, is not published yet, or is in use in a way that
    /// forbids the change. A later compaction asks again.
    ///
    /// `object` is the whole slot. No lock of the pool is held, so the call may use the pool; it
    /// must not wait for a thread that holds a guard.
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool;
}
