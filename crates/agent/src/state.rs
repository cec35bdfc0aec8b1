//! What the thread that starts a helper and the helper itself share.

use crate::arena::Arena;
use crate::system;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use memfold_sys::channel::Channel;
pub use memfold_sys::hello::READY;
use memfold_sys::{Errno, PAGE_SIZE};

/// 1 once pages of this program (or of the one it was forked from) may be out: from then on a
/// beacon that reads zero means that the supervisor is gone.
///
/// `SeqCst` where forks are prepared: a thread announces its fork (`Channel::forking`) before it looks here, and the
/// helper sets this before it looks at the announcements and withholds a range.
pub static MANAGED: AtomicU32 = AtomicU32::new(0);

/// 1 where forks are prepared (`prepared.rs`), in this program and what it forks.
pub static PREPARES: AtomicU32 = AtomicU32::new(0);

/// Forks under way that no channel knows of, as there was none when they began: the helper is started while the program
/// runs.
///
/// `SeqCst`, and a fence in [`set_channel`]: a thread counts its fork here before it looks for the channel, and the helper
/// notes the channel before it looks here and withholds a range.
pub static UNANNOUNCED: AtomicU32 = AtomicU32::new(0);

/// Where the channel's address is noted ([`Note`]): a page of this library's that every fork wipes, as no child
/// inherits the channel, and one made without the C library runs no handler. 0 before the first helper.
static CHANNEL_NOTE: AtomicUsize = AtomicUsize::new(0);

/// The number of this program's address space, or in a forked child of its parent's; 0 if none.
pub static ADDRESS_SPACE: AtomicU64 = AtomicU64::new(0);

/// What the starting thread hands to the helper, on the starting thread's stack.
pub struct Handover {
    pub arena: Arena,
    pub inherited: u64,
    /// 0 while the helper sets itself up, then [`READY`], [`REFUSED`] or [`STRANDED`].
    pub state: AtomicU32,
}

/// There is no helper, and the supervisor knows of none.
pub const REFUSED: u32 = 2;
/// There is no helper, but the supervisor may count on one.
pub const STRANDED: u32 = 3;

/// Makes the note of the channel, once; children keep the page, empty.
pub fn make_note() -> Result<(), Errno> {
    if CHANNEL_NOTE.load(Ordering::Relaxed) != 0 {
        return Ok(());
    }
    let page = system::reserve(PAGE_SIZE)?;
    let made =
        system::open_up(page, PAGE_SIZE).and_then(|()| system::wipe_in_children(page, PAGE_SIZE));
    match made {
        Ok(()) => CHANNEL_NOTE.store(page, Ordering::Relaxed),
        Err(_) => system::unmap(page, PAGE_SIZE),
    }
    made
}

/// 1 where the supervisor brought the library: no thread of the program comes into it by itself.
pub static IS_BROUGHT: AtomicU32 = AtomicU32::new(0);

/// 1 where the supervisor led the program's forks into the library.
pub static HAS_FORK_SITES: AtomicU32 = AtomicU32::new(0);

/// Unmaps the note of a program that was let go. The last thread in the library calls this, where it was brought.
pub fn drop_note() {
    let page = CHANNEL_NOTE.swap(0, Ordering::Relaxed);
    if page != 0 {
        system::unmap(page, PAGE_SIZE);
    }
}

/// What every fork wipes.
#[repr(C)]
struct Note {
    /// The channel's address; 0 before the helper of this very process has mapped it.
    channel: AtomicUsize,
    /// 1 once a thread of this process was sent to start a helper in a forked child.
    is_joining: AtomicUsize,
}

fn note() -> Option<&'static Note> {
    let address = CHANNEL_NOTE.load(Ordering::Relaxed) as *const Note;
    // SAFETY: null, or a page made by `make_note` for these words alone, which stays mapped while any thread is in here
    // (`drop_note`).
    unsafe { address.as_ref() }
}

/// Begins to start the helper of a forked child. `false` if this process has one, or another thread is at it, or its
/// memory is that of a process to which one of these applies.
pub fn begin_to_join() -> bool {
    let is_first = |note: &Note| note.is_joining.swap(1, Ordering::AcqRel) == 0;
    channel().is_none() && note().is_some_and(is_first)
}

/// No helper was started: another try may be made.
pub fn end_joining() {
    if let Some(note) = note() {
        note.is_joining.store(0, Ordering::Release);
    }
}

/// 1 once the supervisor has let the program go: neither it nor its children have to do with memfold any more.
static LEFT: AtomicU32 = AtomicU32::new(0);

/// Whether the program was let go.
pub fn has_left() -> bool {
    LEFT.load(Ordering::SeqCst) != 0
}

/// Lets the program go, of which the supervisor has nothing any more. Returns whether that is done: forks that began
/// before are served to their end.
pub fn let_go(channel: &Channel) -> bool {
    // SeqCst: a thread announces its fork before it looks here.
    LEFT.store(1, Ordering::SeqCst);
    channel.forking.load(Ordering::SeqCst) == 0
}

/// Notes the channel that the helper mapped for good.
pub fn set_channel(channel: &'static Channel) {
    PREPARES.store(
        channel.fork.prepared.load(Ordering::Relaxed),
        Ordering::Relaxed,
    );
    if let Some(note) = note() {
        let address = &raw const *channel as usize;
        note.channel.store(address, Ordering::Relaxed);
    }
    fence(Ordering::SeqCst);
}

/// The channel, once the helper of this very process has mapped it.
pub fn channel() -> Option<&'static Channel> {
    let address = note()?.channel.load(Ordering::Relaxed) as *const Channel;
    // SAFETY: null (also in whatever was forked since), or what `set_channel` was given.
    unsafe { address.as_ref() }
}

/// What a child knows of the fork that made it.
pub enum Child {
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "no fork is prepared")
    )]
    /// It has its helper, or needs none: nothing is left to do.
    Complete,
    /// It starts a helper, if it may make the system calls for it: the flag says that it may, whatever filters it has.
    ToStart { may_call: bool },
}
