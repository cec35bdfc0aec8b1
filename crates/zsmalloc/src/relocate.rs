//! How owners are told of moves.

use crate::word::ObjectWord;

/// The owner of a pool's objects, as a compactor sees it.
///
/// A compactor copies an object to a new place and then asks the owner to replace its word. The
/// pool keeps no record of who owns an object: an owner that wants compaction puts what it needs
/// to find its own entry (a slot number, say) into the object itself.
pub trait Relocate: Sync {
    /// Replace `old` by `new` where it is kept, if it is still there, with one atomic
    /// compare-and-swap with release ordering or under a lock; `true` if it was.
    ///
    /// From `true` on the owner may use and free only `new`; the pool frees `old`, once no
    /// [`ReadGuard`](crate::ReadGuard) that was taken earlier is left. After `false` nothing has happened. It is
    /// right to refuse when the object was freed meanwhile, is just being freed, is not yet entered
    /// anywhere, or is in use in some way that stands in the way; it will be asked again another
    /// time.
    ///
    /// `object` is the object's whole slot. No lock of the pool is held during the call, so it may
    /// use the pool; it must not wait for a thread that holds a pin.
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool;
}
