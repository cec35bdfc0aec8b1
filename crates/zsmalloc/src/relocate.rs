//! How a compactor updates the owner of an object.

use crate::word::ObjectWord;

/// The owner of a pool's objects, as a compactor sees it.
///
/// A compactor copies an object and then asks its owner to replace the word. The pool does not
/// record owners: an owner that wants compaction stores what it needs to find its own entry, such
/// as a slot number, in the object.
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
