//! The first words between a program's helper thread and the supervisor.
//!
//! The helper sends one [`Hello`] with its two userfaultfds; the supervisor answers with one
//! [`Welcome`] with the channel's descriptor (and, for a forked child, the userfaultfd that the
//! kernel made for it). Nothing else is ever sent: afterwards the socket's end of file tells the
//! supervisor that the address space is gone.
//!
//! A program that became another user's may not make a userfaultfd that serves the kernel's own
//! faults. Its helper says so ([`Hello::refused`]), gets a [`Welcome`] to no address space with
//! [`DEVICE`](crate::uffd::DEVICE), which lets it, and says hello again.

/// Spells "memfold1".
pub const MAGIC: u64 = 0x3164_6c6f_666d_656d;

/// What a forked child finds in its beacon instead of its address space's number if part of what
/// it inherited is lost: it must stop.
pub const LOST: u64 = u64::MAX;

/// Longest socket path, as the kernel has it, terminator included.
pub const SOCKET_PATH_MAX: usize = 108;

/// What the preload library's image holds where the socket's path is patched in.
pub const SOCKET_PATH_MARK: [u8; 32] = *b"@memfold-control-socket-path-her";

/// Helper to supervisor. Addresses are of the program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: u64,
    /// The address space that the program inherited by fork; 0 if none.
    pub inherited: u64,
    /// The helper's own mapping (guards, stack, stage, trash): never managed.
    pub arena: u64,
    /// Its length in bytes.
    pub arena_length: u64,
    /// First page of the stage.
    pub stage: u64,
    /// Pages of the stage.
    pub stage_pages: u64,
    /// First page of the trash, where dropped pages pass through.
    pub trash: u64,
    /// The page by which a forked child learns what it inherited.
    pub beacon: u64,
    /// The address space of the process that forked this one, where nothing is inherited by way of
    /// the supervisor; 0 if it was executed.
    pub relative: u64,
    /// The helper's number, as it knows itself.
    pub thread: u64,
    /// Why there are no userfaultfds: an errno, or 0. No descriptors come with it then.
    pub refused: u64,
}

/// Supervisor to helper.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u64,
    /// The address space's number, from 1; 0 for who was refused a userfaultfd.
    pub address_space: u64,
    /// 1 if a userfaultfd comes behind the channel's descriptor and replaces the first one.
    pub replaces_uffd: u64,
}
